"""Running gates in a worker's table: the next token, averages and hysteresis, against a twin."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inspect_lens._engine.protocol.edits import seal_edits
from inspect_lens._engine.protocol.messages import seal
from inspect_lens._engine.protocol.programs import COUNT_SHIFT, LAST_SHIFT, RECENT_BITS, open_among
from inspect_lens._engine.tap.edit_table import Bank
from inspect_lens.errors import CapacityError, SpecError, UnsupportedError
from inspect_lens.spec import (
    N_LATCHES,
    N_REGISTERS,
    Add,
    EditBase,
    Gate,
    LensRequest,
    Rule,
    check_request,
)
from tests.kit.edit_cases import random_rows
from tests.kit.edit_table import N_FED, configs_of, facts, make_state, run, sealed, streams
from tests.kit.gate_twin import expected_gate

N_PROMPT, RECORD, AT = 2, 7, 1
"""The edit acts at layer 1."""


class One:
    """One request whose edit at layer 1 has a gate, in a worker's table.

    Args:
        gate: of the edit.
        vector: that it adds.
    """

    def __init__(self, gate: Gate, vector: Any) -> None:
        edit = Add(vector=vector, layers=[AT], when=gate, positions="completion")
        self.state = make_state()
        self.bank = Bank(self.state.bank)
        self.envelope = sealed(LensRequest(edits=[edit]), n_prompt=N_PROMPT)
        self.index = {point: i for i, point in enumerate(self.state.taps)}
        self.steering = self.bank.admit(self.envelope, self.index)
        self.bank.reset(RECORD)
        self.bank.keep_history("a", RECORD, self.envelope, self.index)
        self.bank.flush()

    def feed(self, first: int, end: int, x: list[torch.Tensor]) -> torch.Tensor:
        """Rows of layer 1 after one pass over some positions."""
        configs = configs_of(self.steering)[first:end]
        return run(self.state, configs, [one[first:end] for one in x], first=first)[AT]

    @property
    def noted(self) -> tuple[int, int]:
        """What front-ends see of the gate."""
        noted = self.state.bank.latches.noted[RECORD]
        return int(noted[0]), int(noted[N_LATCHES])


@st.composite
def gates(draw: st.DrawFn) -> tuple[int, dict[str, Any]]:
    """Layer and options of a running gate."""
    scope: Literal["token", "next", "rest"] = draw(st.sampled_from(("token", "next", "rest")))
    ema = draw(st.sampled_from((0.2, 0.7, 1.0) if scope == "rest" else (None, 0.2, 0.7, 1.0)))
    options: dict[str, Any] = {"scope": scope, "ema": ema}
    options["similarity"] = draw(st.sampled_from(("dot", "cosine")))
    how = draw(st.sampled_from(("step", "smooth", "hysteresis")))
    if scope != "rest" and how == "smooth":
        options["sharpness"] = 2.0
    elif scope != "rest" and (how == "hysteresis" or (scope == "token" and ema is None)):
        options["closes_below"] = -0.3
    if not Gate(direction=[1.0], layer=0, **options).is_running:
        options["ema"] = 0.5
    return draw(st.integers(0, AT if scope == "token" else 2)), options


@settings(max_examples=60, deadline=None)
@given(
    gates(),
    st.integers(0, 2**20),
    st.integers(N_PROMPT + 1, N_FED - 1),
    st.lists(st.integers(1, 5), min_size=3, max_size=3),
)
def test_a_running_gate_is_its_twin_however_tokens_come(
    chosen: tuple[int, dict[str, Any]], seed: int, away: int, sizes: list[int]
) -> None:
    layer, options = chosen
    v, probe = random_rows(seed, 2) / 5
    x = streams(seed)
    gate = Gate(direction=probe, layer=layer, threshold=0.05, **options)
    one = One(gate, v)

    def check(first: int, end: int, got: torch.Tensor) -> None:
        np.testing.assert_allclose(got.numpy(), wanted[first:end], rtol=1e-4, atol=1e-4)

    # The gate reads what is before it: edits of layers below do not reach it in this model.
    plain = np.stack([row.numpy().astype(np.float64) for row in x])
    wanted = plain[AT].copy()
    read, u = plain[layer], probe.astype(np.float64)
    scores = np.empty(N_FED - N_PROMPT)
    for i in range(len(scores)):
        row = read[N_PROMPT + i]
        over = np.linalg.norm(row) * np.linalg.norm(u) if options["similarity"] == "cosine" else 1.0
        scores[i] = row @ u / over
    factors, opens = expected_gate(gate, scores)
    wanted[N_PROMPT:] += factors[:, None] * v
    check(0, N_PROMPT, one.feed(0, N_PROMPT, x))
    for p in range(N_PROMPT, away):
        check(p, p + 1, one.feed(p, p + 1, x))
    # Pre-empted: all of it again, in chunks, and one token that is new. What the gate reads is
    # not to the bit what it was; here it is nonsense, and the decisions stand.
    other = [row.clone() for row in x]
    if layer != AT:
        other[layer][:away] = -3 * other[layer][:away]
    first = 0
    for size in sizes:
        end = min(first + size, away)
        if end > first:
            check(first, end, one.feed(first, end, other))
        first = end
    check(first, away + 1, one.feed(first, away + 1, other))
    for p in range(away + 1, N_FED):
        check(p, p + 1, one.feed(p, p + 1, x))
    fired, note = one.noted
    assert fired == (N_PROMPT + int(opens.argmax()) + 1 if opens.any() else 0)
    for n in range(len(opens) + 1):
        assert open_among(note, n) == int(opens[:n].sum())


def test_a_gate_of_scope_next_may_be_read_behind_its_edit_and_sees_it() -> None:
    v, probe = random_rows(3, 2) / 5
    x = streams(3)
    gate = Gate(direction=probe, layer=AT, scope="next", threshold=float("-1e9"))
    one = One(gate, v)
    one.feed(0, N_PROMPT, x)
    rows = [one.feed(p, p + 1, x)[0] for p in range(N_PROMPT, N_FED)]
    assert torch.equal(rows[0], x[AT][N_PROMPT]), "nothing was decided before the first token"
    for i, row in enumerate(rows[1:], N_PROMPT + 1):
        torch.testing.assert_close(row, x[AT][i] + torch.from_numpy(v))


def test_a_score_that_is_not_finite_leaves_the_average_as_it_was() -> None:
    v, probe = random_rows(4, 2) / 5
    x = streams(4)
    x[0][N_PROMPT + 2] = math.nan
    gate = Gate(direction=probe, layer=0, scope="next", ema=0.5)
    one = One(gate, v)
    rows = [one.feed(p, p + 1, x)[0].numpy() for p in range(N_FED)]
    scores = (x[0] @ torch.from_numpy(probe)).double().numpy()[N_PROMPT:]
    scores[2] = 0.5 * scores[1] + 0.5 * scores[0]
    factors, _ = expected_gate(gate, scores)
    for i in range(N_FED - N_PROMPT):
        at = N_PROMPT + i
        np.testing.assert_allclose(rows[at], x[AT][at].numpy() + factors[i] * v, atol=1e-4)


def test_room_is_given_back_and_a_full_table_keeps_nothing() -> None:
    v, probe = random_rows(5, 2)
    one = One(Gate(direction=probe, layer=0, scope="next"), v)
    before = one.bank.rows_in_use
    one.bank.keep_history("b", RECORD + 1, one.envelope, one.index)
    assert one.bank.rows_in_use == before + 1
    one.bank.keep_history("b", RECORD + 1, one.envelope, one.index)
    assert one.bank.rows_in_use == before + 1, "a request that comes anew has its room once"
    keys: list[str] = []

    def fill() -> None:
        for i in range(10_000):
            keys.append(f"x{i}")
            one.bank.keep_history(keys[-1], i, one.envelope, one.index)

    with pytest.raises(CapacityError):
        fill()
    for key in ("a", "b", "nobody", *keys):
        one.bank.drop_history(key)
    one.bank.release(one.steering)
    assert one.bank.rows_in_use == 0


def test_another_stage_keeps_no_room() -> None:
    v, probe = random_rows(6, 2)
    one = One(Gate(direction=probe, layer=0, scope="next", shadow=True), v)
    one.bank.drop_history("a")
    before = one.bank.rows_in_use
    elsewhere = {tap: i for tap, i in one.index.items() if tap.layer == 2}
    one.bank.keep_history("a", RECORD, one.envelope, elsewhere)
    assert one.bank.rows_in_use == before


def test_more_decisions_than_the_table_holds_are_refused_at_the_edge() -> None:
    v, probe = random_rows(7, 2)
    gate = Gate(direction=probe, layer=0, scope="next")
    request = LensRequest(edits=[Add(vector=v, layers=[1], when=gate, positions="completion")])
    few = facts(bank_rows=4)
    room = 4 * len(v) - 8
    seal(request, few, reply="here", n_prompt=3, max_tokens=room + 1)
    with pytest.raises(UnsupportedError, match="lower max_tokens"):
        seal(request, few, reply="here", n_prompt=3, max_tokens=room + 2)


def test_the_note_tells_how_many_were_open_also_behind_the_end() -> None:
    rng = np.random.default_rng(0)
    opens = rng.random(300) < 0.4
    for seen in (1, 20, 300):
        recent = 0
        for is_open in opens[:seen]:
            recent = (recent * 2 + int(is_open)) % (1 << RECENT_BITS)
        note = seen << LAST_SHIFT | int(opens[:seen].sum()) << COUNT_SHIFT | recent
        for n in range(max(0, seen - RECENT_BITS), seen + 1):
            assert open_among(note, n) == int(opens[:n].sum())
        assert open_among(note, seen + 1) is None
        if seen > RECENT_BITS:
            assert open_among(note, seen - RECENT_BITS - 1) is None


def test_equal_gates_are_one_and_others_are_not() -> None:
    v, probe = random_rows(8, 2)

    def asked(**options: Any) -> Add:
        gate = Gate(direction=probe, layer=0, **options)
        return Add(vector=v, layers=[1], when=gate, positions="completion")

    edits = [asked(scope="next"), asked(scope="next"), asked(scope="next", ema=0.5)]
    edits += [asked(ema=0.5), asked(scope="rest")]
    made = sealed(LensRequest(edits=edits)).edits
    assert [e.latch for e in made if e.latch is not None] == [0, 1, 2, 3]
    assert [e.decides_on for e in made if e.latch is not None] == [1, 1, 0, None]
    assert [e.room for e in made if e.latch is not None] == [4, 4, 4, 0]


def test_the_engines_facts_decide_what_a_running_gate_can_be() -> None:
    v, *probes = random_rows(9, 6)

    def asked(probe: Any, **options: Any) -> Add:
        gate = Gate(direction=probe, layer=0, **options)
        return Add(vector=v, layers=[1], when=gate, positions="completion")

    drafts = replace(facts(), is_speculative=True)
    for options, named in (({"scope": "next"}, "scope='next'"), ({"ema": 0.5}, "ema")):
        with pytest.raises(UnsupportedError, match=f"{named} beside speculative decoding"):
            check_request(LensRequest(edits=[asked(probes[0], **options)]), drafts)
    many = [asked(probe, scope="next") for probe in probes]
    check_request(LensRequest(edits=many[:N_LATCHES]), facts())
    with pytest.raises(SpecError, match=r"5 different gates of scope='next' or 'rest'.*4 at most"):
        check_request(LensRequest(edits=many), facts())


def test_a_gate_of_a_conversation_is_another_one_and_all_have_a_register() -> None:
    v, *probes = random_rows(9, 5)

    def asked(probe: Any, conversation: bool) -> Gate:
        return Gate(direction=probe, layer=0, scope="rest", conversation=conversation)

    def edits(rules: list[Any]) -> list[EditBase]:
        return [Add(vector=v, layers=[1], when=one, positions="completion") for one in rules]

    both = [asked(probes[0], flag) for flag in (False, True)]
    two = [asked(probes[1], flag) for flag in (False, True)]
    check_request(LensRequest(edits=edits([*both, *two])), facts())
    many = edits([*(asked(probe, False) for probe in probes), both[1]])
    with pytest.raises(SpecError, match="5 different gates of scope='next' or 'rest'"):
        check_request(LensRequest(edits=many), facts())
    with pytest.raises(SpecError, match=f"more than {N_LATCHES} registers"):
        seal_edits(many, 4, 8, facts().width_of)
    # Rules over them are different ones, too.
    rules = [Rule(all=[a, b]) for a in both for b in two]
    others = [Gate(direction=probe, layer=0) for probe in random_rows(10, N_REGISTERS - 4)]
    check_request(LensRequest(edits=edits([*rules, *others])), facts())
    others.append(Gate(direction=v, layer=0))
    with pytest.raises(SpecError, match=f"{N_REGISTERS + 1} different gates"):
        check_request(LensRequest(edits=edits([*rules, *others])), facts())
    with pytest.raises(SpecError, match=f"more than {N_REGISTERS} registers"):
        seal_edits(edits([*rules, *others]), 4, 8, facts().width_of)
