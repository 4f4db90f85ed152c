"""What takes several rows of the edit table side by side: where gaps are too small, they close."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens._engine.protocol.messages import Envelope, seal
from inspect_lens._engine.protocol.programs import N_PROMPT_ROWS, history_rows
from inspect_lens._engine.tap import edit_table
from inspect_lens._engine.tap.edit_table import Bank, Runs
from inspect_lens.errors import CapacityError
from inspect_lens.spec import Add, Gate, LensRequest, TapPoint
from tests.kit.edit_cases import WIDTH, random_rows
from tests.kit.edit_table import N_FED, configs_of, facts, make_state, run, streams

N_PROMPT, ROWS = 2, 24
LAYER_0 = TapPoint("resid_post", 0)
RUNNING = {"scope": "next", "ema": 0.5}
PROMPT = {"scope": "rest", "reads": "prompt_mean"}


class Table:
    """A worker's table with some rows."""

    def __init__(self, rows: int) -> None:
        self.state = make_state(bank_rows=rows)
        self.bank = Bank(self.state.bank)
        self.index = {point: i for i, point in enumerate(self.state.taps)}


class One:
    """A request whose edit at layer 1 has a gate at layer 0, in a table."""

    def __init__(self, table: Table, record: int, envelope: Envelope) -> None:
        self.table, self.record, self.key = table, record, str(record)
        bank = table.bank
        self.steering = bank.admit(envelope, table.index)
        bank.reset(record)
        try:
            bank.keep_history(self.key, record, envelope, table.index)
        except CapacityError:
            self.end()
            raise

    def feed(self, position: int, x: list[torch.Tensor]) -> torch.Tensor:
        """The row of layer 1 at a position."""
        rows = [one[position : position + 1] for one in x]
        configs = configs_of(self.steering)[position : position + 1]
        edited = run(self.table.state, configs, rows, first=position, record=self.record)
        reads = self.table.bank.prompt_reads(self.key)
        if reads is not None and position < N_PROMPT:
            self.table.bank.read_prompt(reads, position, {LAYER_0: rows[0]})
        return edited[1]

    def end(self) -> None:
        self.table.bank.release(self.steering)
        self.table.bank.drop_history(self.key)


def asked(seed: int, max_tokens: int, how: dict[str, Any]) -> Envelope:
    v, probe = random_rows(seed, 2)
    gate = Gate(direction=probe, layer=0, **how)
    edit = Add(vector=v, layers=[1], when=gate, positions="completion")
    request = LensRequest(edits=[edit])
    sealed = seal(request, facts(), reply="", n_prompt=N_PROMPT, max_tokens=max_tokens)
    return Envelope.unpack(dict(sealed.pack()))


@pytest.mark.parametrize(("seed", "piece"), [(0, 1), (1, 5), (2, 4096), (3, 5)])
def test_what_fits_in_total_is_served_and_every_request_is_edited_as_alone(
    seed: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edit_table, "_MOVED_BYTES", piece * WIDTH * 4)
    chance, table, alone, moved = random.Random(seed), Table(ROWS), Table(512), 0
    close = Runs._close_gaps

    def counted(self: Any) -> None:
        nonlocal moved
        moved += 1
        close(self)

    monkeypatch.setattr(Runs, "_close_gaps", counted)
    live: list[tuple[One, One, list[torch.Tensor], list[int]]] = []
    for record in range(1, 120):
        how = chance.choice([RUNNING, RUNNING, PROMPT])
        room = chance.choice([1, 16, 60, 130, 180])
        envelope = asked(record, room + 1, how)
        rows = history_rows(room, WIDTH) if how is RUNNING else N_PROMPT_ROWS
        # A gate that reads the prompt keeps its direction beside the sum.
        rows += 2 if how is RUNNING else 1
        if table.bank.rows_in_use + rows <= ROWS:
            one, twin = One(table, record, envelope), One(alone, record, envelope)
            live.append((one, twin, streams(record), [0]))
        for bank in (table.bank, alone.bank):
            bank.flush()
        for one, twin, x, at in live:
            if at[0] < N_FED:
                assert torch.equal(one.feed(at[0], x), twin.feed(at[0], x)), (record, one.record)
                at[0] += 1
        for which in [which for which in live if chance.random() < 0.2]:
            live.remove(which)
            which[0].end()
            which[1].end()
    assert moved > 2, "else nothing is shown"
    for one, twin, _, _ in live:
        one.end()
        twin.end()
    assert table.bank.rows_in_use == alone.bank.rows_in_use == 0


def test_what_does_not_fit_in_total_is_refused_and_what_is_gone_writes_nothing() -> None:
    table = Table(12)
    first, second = (One(table, i, asked(i, 42, RUNNING)) for i in (1, 2))
    assert table.bank.rows_in_use == 10
    with pytest.raises(CapacityError, match=r"12 rows, 12 held by running requests, and 3 needed"):
        One(table, 3, asked(3, 42, RUNNING))
    # Nothing of either was written yet, and the third takes rows of the first.
    first.end()
    third, alone = One(table, 4, asked(4, 90, RUNNING)), Table(512)
    twins = [One(alone, i, asked(i, n, RUNNING)) for i, n in ((2, 42), (4, 90))]
    table.bank.flush()
    alone.bank.flush()
    x = streams(5)
    for position in range(N_FED):
        for one, twin in zip((second, third), twins, strict=True):
            assert torch.equal(one.feed(position, x), twin.feed(position, x))


def test_a_device_that_fails_while_gaps_close_leaves_everything_where_it_was() -> None:
    runs: Runs[str] = Runs(11, "table")
    numbers = [runs.take(name, 2)[0] for name in "abcde"]
    runs.give(numbers[0])
    runs.give(numbers[2])
    before = runs.rows.copy()

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    runs.move = fail
    with pytest.raises(RuntimeError):
        runs.take("wide", 4)
    assert np.array_equal(runs.rows, before)
    assert runs.in_use == 6
    runs.move = lambda *_: None
    number, is_new = runs.take("wide", 4)
    assert is_new
    taken = [*range(runs.rows[number], runs.rows[number] + 4)]
    taken += [row for n in (1, 3, 4) for row in (runs.rows[numbers[n]], runs.rows[numbers[n]] + 1)]
    assert sorted(taken) == [*range(1, 11)]


def test_a_device_that_fails_behind_the_copy_leaves_no_wrong_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever was there goes on as alone, although their rows have moved."""
    table, alone = Table(ROWS), Table(512)
    made = [One(table, i, asked(i, 42, RUNNING)) for i in range(1, 5)]
    twins = {i: One(alone, i, asked(i, 42, RUNNING)) for i in (2, 4)}
    for bank in (table.bank, alone.bank):
        bank.flush()
    x = streams(5)
    for i, twin in twins.items():
        assert torch.equal(made[i - 1].feed(0, x), twin.feed(0, x))
    for i in (0, 2):
        made[i].end()
    before = table.bank._vectors.rows.copy()

    def fail(*_: Any) -> Any:
        raise RuntimeError("the device is gone")

    wide = asked(5, 130, RUNNING)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "fill_", fail)
        with pytest.raises(RuntimeError, match="device is gone"):
            One(table, 5, wide)
    assert not np.array_equal(table.bank._vectors.rows, before), "else nothing has moved"
    table.bank.flush()
    for position in range(1, N_FED):
        for i, twin in twins.items():
            assert torch.equal(made[i - 1].feed(position, x), twin.feed(position, x)), position


def test_what_moves_at_once_is_bounded_in_bytes() -> None:
    for width in (64, 4096):
        bank = Bank(make_state(bank_rows=ROWS, width=width).bank)
        assert bank._vectors.most_moved * width * 4 == 64 << 20
