"""Lenses as engines register them: what is read, judged and refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from inspect_lens import LensRequest
from inspect_lens.errors import SpecError
from inspect_lens.spec import (
    EngineLens,
    LogitLens,
    ResolvedLens,
    TensorLimits,
    check_engine_lens,
    parse_extra_args,
)
from tests.kit.facts import engine_facts

FACTS = engine_facts(hidden=6, max_step_tokens=8, ring_rows=32, bank_rows=4)


def form(**change: Any) -> dict[str, Any]:
    values = {
        "kind": "tuned",
        "n_layers": 4,
        "layers": [0, 2],
        "tensors": {"matrix": np.zeros((2, 6, 6)), "bias": np.zeros((2, 6))},
    }
    return values | change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "logit"}, "kind"),
        ({"kind": "jacobian"}, r"has the tensors \['matrix'\]"),
        ({"layers": [2, 0]}, "ascending"),
        ({"layers": [0, 4]}, "0 to 3"),
        ({"layers": []}, "at least one"),
        ({"layers": [0]}, r"need \(1, 6, 6\)"),
        ({"n_layers": "4"}, "n_layers"),
        ({"tensors": {"matrix": np.zeros((2, 6, 6))}}, "has the tensors"),
        ({"tensors": {"matrix": np.zeros((2, 6, 5)), "bias": np.zeros((2, 6))}}, "has shape"),
        ({"tensors": {"matrix": np.full((2, 6, 6), np.inf), "bias": np.zeros((2, 6))}}, "NaN"),
    ],
)
def test_what_makes_no_lens_is_refused(change: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        EngineLens(**form(**change))


def test_logs_get_a_reference() -> None:
    lens = EngineLens(**form())
    reference = {"$lens": "lens/1", "sha256": lens.sha256, "kind": "tuned", "layers": [0, 2]}
    assert lens.reference() == reference
    assert lens.model_dump(mode="json")["tensors"]["matrix"]["shape"] == [2, 6, 6]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": 8}, "width 8"),
        ({"n_layers": 5}, "5 layers"),
    ],
)
def test_an_engine_of_another_model_refuses_it(change: Any, words: str) -> None:
    from dataclasses import replace

    lens = EngineLens(**form())
    check_engine_lens(lens, FACTS)
    with pytest.raises(SpecError, match=words):
        check_engine_lens(lens, replace(FACTS, **change))


def test_shapes_are_judged_before_anything_is_unpacked() -> None:
    limits = TensorLimits(FACTS)
    for shape, words in (
        ([2, 6, 7], "7 in shape"),
        ([2, 7, 6], "7 in shape"),
        ([5, 6, 6], "has 5 layers"),
        ([6, 6], "needs 3 axes"),
    ):
        forged = {"data": "", "dtype": "float32", "shape": shape, "compression": "zstd"}
        with pytest.raises(ValidationError, match=words):
            EngineLens.model_validate(
                form(kind="jacobian", tensors={"matrix": forged}), context=limits.context
            )
    large = TensorLimits(engine_facts(hidden=1 << 14, n_layers=64))
    with pytest.raises(SpecError, match="INSPECT_LENS_REGISTER"):
        large.judge_weights((64, 1 << 14, 1 << 14), 2, axes="lhh", what="lens")


def test_a_name_is_resolved_to_the_layers_of_its_lens() -> None:
    entry = EngineLens(**form()).entry
    every = entry.resolve(LogitLens(name="t", top_k=2, positions="prompt"))
    assert isinstance(every, ResolvedLens)
    assert every.layers == (0, 2, 3), "the last layer needs no translation"
    assert (every.top_k, every.positions, every.entry) == (2, "prompt", entry)
    assert entry.resolve(LogitLens(name="t", layers=[3, 0])).layers == (0, 3)
    with pytest.raises(SpecError, match=r"\[1\]; the lens 't' reads the layers \[0, 2, 3\]"):
        entry.resolve(LogitLens(name="t", layers=[0, 1]))


def test_clients_send_names_and_nothing_else() -> None:
    request = parse_extra_args({"inspect_lens": {"lens": {"name": "t", "layers": [2]}}})
    assert isinstance(request, LensRequest)
    assert request.lens == LogitLens(name="t", layers=[2])
    with pytest.raises(SpecError, match="letters"):
        parse_extra_args({"inspect_lens": {"lens": {"name": "../t"}}})
    entry = EngineLens(**form()).entry.model_dump()
    with pytest.raises(SpecError, match="entry"):
        parse_extra_args({"inspect_lens": {"lens": {"name": "t", "entry": entry}}})
