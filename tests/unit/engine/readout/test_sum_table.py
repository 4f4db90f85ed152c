"""What grows of sampled tokens: it leaves once, and only where the end of a request is known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inspect_lens import CaptureSpec, LensRequest
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.protocol.messages import ROWS, SCORES, Block, seal, unpacked
from inspect_lens._engine.protocol.readouts import LAG
from inspect_lens._engine.readout.reduce import SumTable
from inspect_lens.errors import CaptureError
from tests.kit.cases import KEYS, noise
from tests.kit.steps import FACTS, HIDDEN, LAYERS, Worker, begin, exporter

N_PROMPT, N_SAMPLED = 5, 40


@pytest.fixture
def roomy() -> Iterator[Worker]:
    """A worker with room for three requests at all taps."""
    made = Worker(exporter(), torch.float32, noise, sum_rows=3 * len(LAYERS))
    yield made
    made.stepper.close()


@pytest.fixture
def sent(roomy: Worker, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rows, tokens that they stand for) of each block that leaves the worker."""
    blocks: list[tuple[int, int]] = []
    exporter_ = roomy.stepper._exporter
    original = exporter_._send

    def send(reply: str, message: Any) -> bool:
        if isinstance(message, Block):
            covers = unpacked(message.covers)
            tokens = int(covers.sum()) if len(covers) else message.shape[1]
            blocks.append((message.shape[1], tokens))
        return original(reply, message)

    monkeypatch.setattr(exporter_, "_send", send)
    return blocks


def start(worker: Worker, collector: Collector, spec: dict[str, Any], **options: Any) -> str:
    request = LensRequest(capture=CaptureSpec(layers=LAYERS, **spec))
    envelope = seal(
        request,
        FACTS,
        reply=collector.address,
        n_prompt=N_PROMPT,
        max_tokens=N_SAMPLED + 1,
        **options,
    )
    key = f"t{next(KEYS)}"
    begin(worker, collector, key, envelope)
    return key


def run(worker: Worker, key: str, n_sampled: int = N_SAMPLED) -> None:
    worker.step([(key, 0, 0, N_PROMPT)])
    for i in range(n_sampled):
        worker.step([(key, 0, N_PROMPT + i, 1)])


def take(collector: Collector, key: str, n_fed: int, count: int | None = None) -> Any:
    counts = {ROWS: n_fed if count is None else count, SCORES: 0}
    return collector.take(key, counts=counts, n_fed=n_fed, timeout_s=5).tensors[ROWS]


@pytest.mark.parametrize("reduce", ["mean", "max", "last"])
def test_of_sampled_tokens_one_row_and_the_last_few_leave(
    roomy: Worker, collector: Collector, sent: list[tuple[int, int]], reduce: str
) -> None:
    key = start(roomy, collector, {"reduce": reduce})
    run(roomy, key)
    in_prompt = (1, 1) if reduce == "last" else (1, N_PROMPT)
    assert sent == [in_prompt]
    roomy.stepper.remove(key)
    assert sent == [in_prompt, (1 + LAG, N_SAMPLED)]
    n_fed = N_PROMPT + N_SAMPLED
    found = take(collector, key, n_fed, count=N_SAMPLED + 1 if reduce == "last" else None)
    rows = torch.stack([noise(0, layer, 0, n_fed) for layer in LAYERS]).double()
    truth = {"mean": rows.mean(1), "max": rows.amax(1), "last": rows[:, -1]}[reduce]
    np.testing.assert_allclose(found.to_float32()[:, 0], truth, rtol=1e-6, atol=1e-6)


def test_requests_that_end_together_leave_together(
    roomy: Worker, collector: Collector, sent: list[tuple[int, int]]
) -> None:
    """Also where one of them has fewer rows, and one is of another kind."""
    spec = {"reduce": "mean", "phase": "decode"}
    keys = [start(roomy, collector, spec) for _ in range(2)]
    keys.append(start(roomy, collector, spec | {"reduce": "max"}))
    roomy.step([(key, n, 0, N_PROMPT) for n, key in enumerate(keys)])
    for i in range(12):
        steps = [(k, n, N_PROMPT + i, 1) for n, k in enumerate(keys) if n != 1 or i < 2]
        roomy.step(steps)
    sent.clear()
    roomy.stepper.leave(keys)
    assert sorted(sent) == [(2, 2), (2 * (1 + LAG), 2 * 12)]
    sent.clear()
    for n, key in enumerate(keys):
        roomy.stepper.remove(key)
        n_sampled = 2 if n == 1 else 12
        found = take(collector, key, N_PROMPT + n_sampled, count=n_sampled).to_float32()[:, 0]
        rows = torch.stack([noise(n, layer, N_PROMPT, n_sampled) for layer in LAYERS]).double()
        truth = rows.amax(1) if n == 2 else rows.mean(1)
        np.testing.assert_allclose(found, truth, rtol=1e-6, atol=1e-6)
    assert sent == []
    assert roomy.stepper.sum_rows_in_use == 0


@pytest.mark.parametrize("reduce", ["mean", "max", "last"])
def test_a_long_sum_leaves_in_parts(
    roomy: Worker, collector: Collector, sent: list[tuple[int, int]], reduce: str
) -> None:
    roomy.stepper._sender.sum_table._most = 9
    key = start(roomy, collector, {"reduce": reduce, "phase": "decode"})
    run(roomy, key)
    roomy.stepper.remove(key)
    assert sent == [(1 + LAG, 9)] * 4 + [(1 + LAG, 4)]
    n_fed = N_PROMPT + N_SAMPLED
    found = take(collector, key, n_fed, count=N_SAMPLED).to_float32()[:, 0]
    rows = torch.stack([noise(0, layer, N_PROMPT, N_SAMPLED) for layer in LAYERS]).double()
    truth = {"mean": rows.mean(1), "max": rows.amax(1), "last": rows[:, -1]}[reduce]
    np.testing.assert_allclose(found, truth, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ({"reduce": "mean"}, {"may_overrun": True}),
        ({"reduce": "max"}, {"may_overrun": True}),
    ],
)
def test_where_the_end_is_not_known_in_time_rows_are_sent(
    roomy: Worker,
    collector: Collector,
    sent: list[tuple[int, int]],
    spec: dict[str, Any],
    options: dict[str, Any],
) -> None:
    key = start(roomy, collector, spec, **options)
    run(roomy, key)
    assert len(sent) == 1 + N_SAMPLED
    assert roomy.stepper.sum_rows_in_use == 0
    roomy.stepper.remove(key)
    take(collector, key, N_PROMPT + N_SAMPLED)


def test_tokens_behind_the_end_fail_a_request_and_never_bend_its_result(
    roomy: Worker, collector: Collector
) -> None:
    for surplus in range(LAG + 3):
        key = start(roomy, collector, {"reduce": "mean"})
        run(roomy, key, 20 + surplus)
        roomy.stepper.remove(key)
        if surplus <= LAG:
            truth = torch.stack([noise(0, layer, 0, N_PROMPT + 20) for layer in LAYERS]).mean(1)
            found = take(collector, key, N_PROMPT + 20).to_float32()[:, 0]
            np.testing.assert_allclose(found, truth, rtol=1e-5, atol=1e-6)
        else:
            with pytest.raises(CaptureError, match="behind its end"):
                take(collector, key, N_PROMPT + 20)


def test_a_failed_or_aborted_request_gives_its_room_back(
    roomy: Worker, collector: Collector, sent: list[tuple[int, int]]
) -> None:
    keys = [start(roomy, collector, {"reduce": "mean"}) for _ in range(4)]
    stepper = roomy.stepper
    stepper.take_up()
    assert stepper.sum_rows_in_use == 3 * len(LAYERS), "a fourth finds no room"
    for key in keys:
        run(roomy, key, 9)
    n = len(sent)
    stepper._fail(keys[0], CaptureError("it failed"))
    assert len(sent) == n, "of a failed request nothing is sent"
    collector.discard(keys[1])
    stepper.remove(keys[1])
    stepper.remove(keys[2])
    stepper.remove(keys[3])
    assert stepper.sum_rows_in_use == 0
    with pytest.raises(CaptureError, match="it failed"):
        take(collector, keys[0], N_PROMPT + 9)
    rows = torch.stack([noise(0, layer, 0, N_PROMPT + 9) for layer in LAYERS])
    for key in keys[2:]:
        found = take(collector, key, N_PROMPT + 9).to_float32()[:, 0]
        np.testing.assert_allclose(found, rows.mean(1), rtol=1e-5, atol=1e-6)


def test_nan_is_not_lost(roomy: Worker, collector: Collector) -> None:
    for reduce in ("mean", "max"):
        roomy._make = lambda number, layer, first, n: torch.where(
            (torch.arange(first, first + n) == N_PROMPT + 2)[:, None],
            torch.nan,
            noise(number, layer, first, n),
        )
        key = start(roomy, collector, {"reduce": reduce, "phase": "decode"})
        run(roomy, key, 12)
        roomy.stepper.remove(key)
        assert np.isnan(take(collector, key, N_PROMPT + 12, count=12).to_float32()).all()


Action = tuple[str, int]


def check(
    held: torch.Tensor, covers: Any, rows: list[torch.Tensor], *, fold: Any, lag: int
) -> None:
    """What a request took, (taps, rows, width), against all rows that came of it."""
    assert covers.sum() == len(rows)
    assert len(covers) == min(len(rows), 1 + lag)
    done = len(rows) - lag
    if done > 0:
        whole = torch.stack(rows[:done])
        truth = {"sum": whole.sum(0), "max": whole.amax(0), "last": whole[-1]}[fold]
        torch.testing.assert_close(held[:, 0], truth)
    for k, row in enumerate(reversed(rows[-lag:]), start=1):
        torch.testing.assert_close(held[:, -k], row, rtol=0, atol=0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["open", "add", "add", "add", "take", "close"]), st.integers(0, 4)
        ),
        max_size=60,
    ),
    st.sampled_from(["sum", "max", "last"]),
    st.integers(1, 4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_order_of_calls_keeps_requests_apart(
    actions: list[Action], fold: Any, lag: int, dtype: torch.dtype
) -> None:
    table = torch.full((7, HIDDEN), torch.nan)
    sum_table = SumTable(table, torch.full((7 * lag, HIDDEN), torch.nan, dtype=dtype), lag)
    taps = 2
    live: dict[int, list[torch.Tensor]] = {}
    tallied: dict[int, int] = {}
    clock = 0
    for action, slot in actions:
        clock += 1
        if action == "open" and slot not in live:
            room = len(table) - sum_table.rows_in_use
            if sum_table.open(slot, fold, taps):
                live[slot] = []
            else:
                assert room < taps, "there was room"
        elif action == "add":
            slots = np.asarray(sorted(live), dtype=np.int64)
            if not len(slots):
                continue
            rows = torch.randn(taps, len(slots), HIDDEN).to(dtype)
            sum_table.add(rows, slots, np.full(len(slots), clock))
            for i, s in enumerate(slots.tolist()):
                live[s].append(rows[:, i].float())
                tallied[s] = clock
            assert (sum_table.last(slots) == clock).all()
        elif action == "take":
            # All those from this slot on, and one that nobody has.
            asked = np.asarray([s for s in (0, 1, 2, 3, 4, 99) if s >= slot], dtype=np.int64)
            seen = set()
            for held in sum_table.take(asked):
                parts = held.positions.shape[1]
                assert held.tensor.shape == (taps, parts * len(held.slots), HIDDEN)
                assert held.tensor.dtype == torch.float32
                for i, s in enumerate(held.slots.tolist()):
                    own = slice(i * parts, (i + 1) * parts)
                    check(held.tensor[:, own], held.covers[own], live[s], fold=fold, lag=lag)
                    is_summed = len(live[s]) > lag
                    assert held.folded[i] == (held.positions[i, 0] + 1 if is_summed else 0)
                    assert held.positions[i, -1] == tallied[s]
                    seen.add(s)
                    live[s] = []
            assert not any(live[s] for s in live if s >= slot)
        elif action == "close":
            sum_table.close(slot)
            live.pop(slot, None)
        assert sum_table.rows_in_use == len(live) * taps
