"""What public functions are given is judged by their annotations, before anything runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from inspect_ai.model import GenerateConfigArgs

from inspect_lens import judged_arguments
from inspect_lens.attention import load_heads
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.lens import load_lens
from inspect_lens.oracle import ask_oracle, load_oracle
from inspect_lens.probe import load_probe
from inspect_lens.scorer import (
    attention_tracker,
    calibration_error,
    lens_rank,
    monitor_alarm,
    probe_cascade,
    probe_score,
    recall_at_fpr_metric,
)
from inspect_lens.solver import causal_trace, contrastive_pairs, steering_sweep, with_capture
from inspect_lens.vector import load_vector

PROBE = "organism/deception-lr"


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (probe_score, {"check_model": "no"}, "check_model='no'; allowed is true or false"),
        (probe_score, {"selection": 5}, "selection=5; allowed is a text or None"),
        (probe_score, {"roles": 5}, "roles=5; allowed is a list of texts or None"),
        (probe_score, {"roles": [1]}, r"roles=\[1\]; allowed is a list of texts or None"),
        (monitor_alarm, {"threshold": float("nan")}, "threshold=nan; allowed is a number"),
        (monitor_alarm, {"threshold": True}, "threshold=True; allowed is a number"),
        (probe_score, {"layer": True}, "layer=True; allowed is an integer or None"),
        (probe_score, {"layer": -1}, "layer=-1; allowed are integers of 0 or more"),
        (probe_cascade, {"band": [0.1]}, "band=.* a list of 2 numbers or None"),
    ],
)
def test_what_a_probe_is_asked_for(make: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make(PROBE, **given)


@pytest.mark.parametrize("given", [5, None, ["organism/truth"]])
@pytest.mark.parametrize(
    "load", [load_probe, load_vector, load_lens, load_oracle, load_heads, attention_tracker]
)
def test_what_is_no_name_of_an_artefact(load: Any, given: Any) -> None:
    said = re.escape(f"={given!r}: a {type(given).__name__}; allowed are a name, a path")
    with pytest.raises(ArtifactError, match=said):
        load(given)
    with pytest.raises(ArtifactError, match=r"=''|='\.' was not found"):
        load("")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: causal_trace(site="resid_pos"), "site='resid_pos'.*did you mean 'resid_post'"),
        (lambda: causal_trace(window=0), "window=0; allowed are integers of 1 or more"),
        (lambda: causal_trace(seed=-1), "seed=-1; allowed are integers of 0 or more"),
        (lambda: load_vector("organism/truth").random_control(seed=-1), "seed=-1; allowed are"),
        (lambda: load_vector("organism/truth").relative_scale(4, None), "share=None; allowed is"),
        (lambda: calibration_error(n_bins=0), "n_bins=0; allowed are integers of 1 or more"),
        (lambda: recall_at_fpr_metric(2.0), "fpr=2.0; allowed is a number between 0 and 1"),
        (lambda: lens_rank(layers=[]), "layers=.*at least one"),
        (lambda: lens_rank(layers=[1.5]), r"layers=\[1.5\]; allowed is a list of integers"),
        (lambda: with_capture([1], inner=5), "inner=5; allowed is an Inspect Solver"),
        (lambda: contrastive_pairs(positions="complete"), "positions='complete'"),
        (lambda: steering_sweep("organism/truth", [1.0], capture=["x"]), "capture=.*'x'"),
        (lambda: steering_sweep(5, [1.0]), "vector=5"),
        (lambda: anyio.run(lambda: ask_oracle("m", [], [], seed="x")), "seed='x'"),
    ],
)
def test_what_others_are_asked_for(make: Any, message: str) -> None:
    with pytest.raises((SpecError, ArtifactError), match=message):
        make()


def test_what_numpy_torch_and_the_command_line_give_is_read() -> None:
    def typed(
        n: int, share: float | None = None, layers: list[int] | None = None, free: object = None
    ) -> Any:
        return n, share, layers, free

    taken: Any = judged_arguments(typed)
    found = taken(np.int64(3), np.float32(0.5), layers=["3", np.int64(5)], free=(array := [1]))
    assert found == (3, 0.5, [3, 5], [1])
    assert [type(value) for value in found[:2]] == [int, float]
    assert found[3] is array
    assert taken(1, 2, (i for i in (4, 5)))[2] == [4, 5]
    tensors = taken(torch.tensor(3), np.array(0.5), layers=torch.tensor([3, 5]))
    assert tensors[:3] == (3, 0.5, [3, 5])
    assert {type(value) for value in (tensors[0], *tensors[2])} == {int}
    assert taken("-3", "1e-3", ["1", "2"])[:3] == (-3, 1e-3, [1, 2])
    for wrong in ("nan", "x"):
        with pytest.raises(SpecError, match=f"share='{wrong}'; allowed is a number or None"):
            taken(1, wrong)
    with pytest.raises(TypeError, match="missing"):
        taken()


def test_what_is_no_kind_of_ours_is_left_to_the_function() -> None:
    def mixed(pair: tuple[int, str], *others: Any, config: GenerateConfigArgs | None = None) -> Any:
        return pair, others, config

    def misnamed(value: any | None, limit: int = 1) -> Any:  # type: ignore[valid-type]
        return value, limit

    taken: Any = judged_arguments(mixed)
    assert taken((1, "a"), "x", "y", config={}) == ((1, "a"), ("x", "y"), {})
    assert judged_arguments(misnamed)("x") == ("x", 1)
    with pytest.raises(SpecError, match="limit=0"):
        judged_arguments(misnamed)("x", 0)


def test_one_alone_may_stand_where_several_may() -> None:
    def typed(layers: Sequence[int] = (), roles: list[str] | None = None) -> Any:
        return layers, roles

    taken: Any = judged_arguments(typed)
    assert taken(3, "grader") == taken([3], ["grader"]) == ([3], ["grader"])
    for wrong in ({3: 1}, b"3", "all"):
        with pytest.raises(SpecError, match=r"layers=.*; allowed is a list of integers"):
            taken(wrong)


def test_an_argument_that_is_not_there_is_a_type_error_with_the_nearest_name() -> None:
    @judged_arguments
    def typed(probe: str, *, layers: list[int] | None = None, **others: Any) -> Any:
        return probe, layers, others

    @judged_arguments
    def strict(probe: str, layer: int | None = None) -> Any:
        return len(probe, 1) if layer else probe  # type: ignore[call-arg]

    wrong: Any = strict
    for error in (TypeError, SpecError):
        with pytest.raises(error, match=r"^strict: takes no prob=…; did you mean 'probe'\?$"):
            wrong(prob="x")
    with pytest.raises(SpecError, match="missing a required argument: 'probe'; it takes probe, la"):
        wrong()
    with pytest.raises(SpecError, match="too many positional arguments"):
        wrong("x", 1, 2)

    class Made:
        @judged_arguments
        def __init__(self, probe: str) -> None:
            self.probe = probe

    made: Any = Made
    with pytest.raises(SpecError, match=r"^Made: takes no prob=…; did you mean 'probe'\?$"):
        made(prob="x")
    assert typed("x", lay=1) == ("x", None, {"lay": 1})
    with pytest.raises(TypeError, match=r"len\(\) takes") as error:
        strict("x", 1)
    assert not isinstance(error.value, SpecError), "a fault inside is none of the call"
