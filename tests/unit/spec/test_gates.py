"""Rules, schedules, and what gates, rules and schedules cannot be."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from inspect_lens import LensRequest
from inspect_lens.errors import SpecError
from inspect_lens.spec import (
    MOST_GATES,
    MOST_SCHEDULED,
    Ablate,
    Add,
    Gate,
    Rule,
    Schedule,
    Zero,
    check_edits,
    parse_edits,
    parse_extra_args,
    to_extra_args,
    to_wire_args,
)
from inspect_lens.spec._instruction import Instruction, Kind, run_program
from inspect_lens.spec._values import MOST_OF
from tests.kit.facts import engine_facts

V = np.ones(4)
FORM = {"op": "add", "vector": V.tolist(), "layers": [1], "positions": "completion"}
GATE = {"direction": V.tolist(), "layer": 0}


def test_a_schedule_is_its_closed_form() -> None:
    k = np.arange(12)
    line = Schedule(points=[(2, 1.0), (6, -1.0), (10, 3.0)])
    np.testing.assert_allclose(
        [line.at(i) for i in k], np.interp(k, [2, 6, 10], [1.0, -1.0, 3.0]), rtol=1e-6
    )
    smooth = Schedule(points=[(0, 2.0), (8, 0.0)], between="cosine")
    wanted = 1.0 + np.cos(np.pi * np.minimum(k, 8) / 8)
    np.testing.assert_allclose([smooth.at(i) for i in k], wanted, atol=1e-6)
    steps = Schedule(points=[(0, 0.5), (3, 2.0)], between="step")
    assert [steps.at(i) for i in k] == [0.5] * 3 + [2.0] * 9
    halving = Schedule(half_life=2.5)
    np.testing.assert_allclose([halving.at(i) for i in k], 0.5 ** (k / 2.5), rtol=1e-6)
    assert halving.at(10**6) == 0.0
    thirds = Schedule(points=[(0, 1.0), (2, 1.0), (3, -3.0), (4, -1.0), (7, 2.0)])
    assert thirds.at(5) == 0.0, "exactly, however many points lie before"
    assert line.at(-1) == line.at(0), "in front of the sampled tokens, as where it runs"
    assert len(Schedule(half_life=512.0).factors) <= MOST_SCHEDULED


@pytest.mark.filterwarnings("error")
def test_a_gate_far_from_its_threshold_keeps_its_digits() -> None:
    for steepness, threshold, wanted in (
        (1.0, 20.0, 1.0 / (1.0 + math.exp(20.0))), (1.0, 60.0, math.exp(-60.0)),
        (1e4, 1e4, 0.0), (-1e4, 1e4, 1.0), (math.inf, 0.0, 0.0),
    ):  # fmt: skip
        one = V.astype(np.float32)
        opened = Instruction(Kind.GATE, one, None, (steepness, threshold, 0.0, 0.0), True, 1)
        added = Instruction(Kind.LATENT_ADD, one, one, (0.0, 0.0, 1.0, 0.0), True, 1)
        edited = run_program(np.zeros(4), [opened, added], np.zeros(4))
        np.testing.assert_allclose(edited, wanted, rtol=1e-12, atol=1e-30)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schedule": {}}, "give points or half_life"),
        ({"schedule": {"points": [[0, 1.0]], "half_life": 2.0}}, "one of them"),
        ({"schedule": {"points": [[3, 1.0], [3, 2.0]]}}, "tokens that ascend"),
        ({"schedule": {"points": [[0, 1.0], [MOST_SCHEDULED, 2.0]]}}, "at most 16383"),
        ({"schedule": {"points": [[0, float("nan")]]}}, "not finite"),
        ({"schedule": {"points": [[0, 1e9]]}}, "beyond 10000"),
        ({"schedule": {"half_life": 0.0}}, "half_life"),
        ({"schedule": {"half_life": 2.0, "between": "step"}}, "leave it out"),
        ({"schedule": {"half_life": 2.0}, "positions": "all"}, "counts sampled tokens"),
        ({"when": {}}, "when.gate.direction"),
        ({"when": {"all": []}}, "give all, any or none"),
        ({"when": {"any": [GATE] * 8, "none": [GATE]}}, "a rule of 9 gates; 8 at most"),
        (
            {"when": {"all": [{"all": [{"all": [{"all": [{"all": GATE}]}]}]}]}},
            "nested more than 4 deep",
        ),
        ({"when": {"all": [GATE], "threshold": 2.0}}, "when.rule.threshold"),
        (
            {"when": {"all": [GATE, {**GATE, "scope": "rest", "shadow": True}]}},
            "shadow of some of its gates",
        ),
        (
            {"when": {"none": [{**GATE, "scope": "next"}]}, "positions": "all"},
            "decides on sampled tokens",
        ),
        ({"when": {**GATE, "reads": "prompt_mean"}}, "belongs to scope='rest'"),
        ({"when": {**GATE, "conversation": True}}, "conversation beside scope='token'"),
        ({"when": {**GATE, "similarity": "cast"}}, "is that of a prompt"),
        ({"when": {**GATE, "similarity": "cosine", "bias": 1.0}}, "a latent is read as a product"),
        ({"when": {**GATE, "active_above": -1.0}}, "active_above"),
        ({"when": {**GATE, "active_above": 1e39}}, r"active_above=1e\+39: .* float32"),
        ({"when": {**GATE, "bias": -1e39}}, r"bias=-1e\+39: .* float32"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        parse_edits([{**FORM, **change}])


def test_rules_and_schedules_survive_the_wire_and_the_log() -> None:
    latent = Gate(direction=V, layer=0, bias=-0.5, active_above=0.25, threshold=1.0)
    about = Gate(
        direction=V, layer=3, scope="rest", reads="prompt_mean", similarity="cast",
        conversation=True,
    )  # fmt: skip
    rule = Rule(all=[about], any=[latent, Rule(none=[latent])])
    edit = Add(
        vector=V, layers=[1], when=rule, positions="completion", schedule=Schedule(half_life=4.0)
    )
    request = LensRequest(edits=[edit], open_gates=[about.key])
    wire = to_wire_args(to_extra_args(request))
    back = parse_extra_args(json.loads(json.dumps(wire)))
    assert back is not None
    (made,) = back.edits
    assert made.when is not None
    assert made.when.content == rule.content
    assert (made.schedule, back.open_gates) == (edit.schedule, (about.key,))
    assert len(edit.all_tensors) == 4
    assert "data" not in json.dumps(edit.reference())
    # What is not asked for is left out.
    plain = Add(vector=V, layers=[1], when=Gate(direction=V, layer=0)).model_dump(mode="json")
    assert "schedule" not in plain
    assert not {"bias", "active_above", "conversation", "reads"} & set(plain["when"])


def test_a_rule_is_counted_before_one_of_its_gates_is_read() -> None:
    most = [{"direction": "no tensor"}] * 8
    rule = {name: [dict.fromkeys(Rule.names, most)] * 8 for name in Rule.names}
    with pytest.raises(SpecError, match=r"when\.rule: a rule of 576 gates; 8 at most$"):
        parse_edits([{**FORM, "when": rule}])


@pytest.mark.parametrize("depth", [100, 100_000])
def test_a_rule_is_judged_deeper_than_python_can_follow(depth: int) -> None:
    rule: Any = GATE
    for _ in range(depth):
        rule = {"any": [rule]}
    for build in (lambda: Rule(**rule), lambda: Ablate(direction=V, layers=[1], when=rule)):
        with pytest.raises(SpecError, match="nested more than 4 deep"):
            build()


def test_a_rule_counts_the_gates_of_an_iterator_too() -> None:
    with pytest.raises(ValidationError, match="a rule of 9 gates"):
        Rule.model_validate({"all": (GATE for _ in range(9))})


def test_a_gate_of_a_rule_is_named_by_its_place() -> None:
    late = {**GATE, "layer": 2}
    with pytest.raises(SpecError, match=r"when\.none\[0\]\.all\[1\]\.layer 2 comes after"):
        parse_edits([{**FORM, "when": {"any": [GATE], "none": [{"all": [GATE, late]}]}}])
    rule = Rule(all=[Gate(direction=np.ones(8), layer=0), Gate(direction=V, layer=1)])
    with pytest.raises(SpecError, match=r"^edits\[0\]\.when\.all\[1\]\.direction: 4 wide"):
        check_edits([Zero(layers=[1], when=rule)], engine_facts(hidden=8))


@pytest.mark.parametrize("keys", [["x"], ["A" * 64], ["0" * 64] * 2049, [5]])
def test_keys_are_hashes_and_not_many(keys: Any) -> None:
    with pytest.raises(SpecError, match="open_gates"):
        parse_extra_args({"inspect_lens": {"open_gates": keys}})


def test_all_gates_that_a_request_can_have_may_be_open_in_the_next_one() -> None:
    assert MOST_OF["open_gates"] == MOST_OF["edits"] * MOST_GATES


def test_a_keys_gate_is_what_it_reads_and_how_it_decides() -> None:
    def gate(**options: Any) -> Gate:
        return Gate(**{"direction": V, "layer": 0, "scope": "rest", **options})

    same = gate(), gate(conversation=True), gate(shadow=True), gate(reads="completion")
    assert len({one.key for one in same}) == 1
    zeros = (
        gate(reads="last_prompt", threshold=zero, bias=zero, active_above=zero)
        for zero in (0.0, -0.0)
    )
    assert len({one.key for one in zeros}) == 1, "equal gates have one key"
    others = gate(threshold=1.0), gate(layer=1), gate(ema=0.5), gate(direction=V * 2)
    assert len({one.key for one in (same[0], *others)}) == 5
