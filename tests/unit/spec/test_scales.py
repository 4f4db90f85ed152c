"""Steering that would overflow the stream is refused before the engine sees it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from inspect_lens import LensRequest, SteeringVector
from inspect_lens.errors import SpecError
from inspect_lens.spec import LARGEST_NORM, check_request
from tests.kit.steps import FACTS, HIDDEN

UNIT = np.eye(HIDDEN, dtype=np.float32)


def vector(norm: float = 1.0, **fields: Any) -> SteeringVector:
    """One that adds so much along an axis at layer 2."""
    fields = {"activations": UNIT[:1], "layer_indices": [2], "scale": norm} | fields
    return SteeringVector(**fields)


def judge(dtype: str, *vectors: SteeringVector) -> None:
    check_request(LensRequest(steer=vectors), replace(FACTS, dtype=dtype))


@pytest.mark.parametrize("dtype", sorted(LARGEST_NORM))
def test_what_overflows_the_streams_dtype_is_refused_with_the_bound(dtype: str) -> None:
    most = LARGEST_NORM[dtype]
    judge(dtype, vector(most))
    judge(dtype, vector(most / 2), vector(-most / 2))
    judge(dtype, vector(0.99 * most**0.5, norm_match=True), vector(most))
    for bad in (
        [vector(1.01 * most)],
        [vector(0.6 * most), vector(-0.6 * most)],
        [vector(1.01 * most**0.5, norm_match=True)],
        [vector(3e38, norm_match=True)],
        [vector(3e38), vector(3e38)],
    ):
        with pytest.raises(SpecError, match=f"layer 2 sum up to .*{dtype}.*lower the scale"):
            judge(dtype, *bad)


def test_vectors_that_never_meet_at_a_token_do_not_add_up() -> None:
    big = 20000.0  # two of them are too much for float16
    judge("float16", vector(big), vector(big, layer_indices=[5]))
    judge("float16", vector(big, phase="prefill"), vector(big, phase="decode"))
    judge("float16", vector(big, position_indices=[0]), vector(big, position_indices=[1]))
    both = np.stack([UNIT[:2]])  # (layers, positions, hidden)
    judge("float16", vector(big, activations=both), vector(big, position_indices=[2]))
    for meeting in (
        (vector(big), vector(big, position_indices=[7])),
        (vector(big, position_indices=[0]), vector(big, position_indices=[-1])),
        (vector(big, activations=both), vector(big, position_indices=[1])),
        (vector(big, phase="decode"), vector(big)),
    ):
        with pytest.raises(SpecError, match="sum up to"):
            judge("float16", *meeting)


def test_judging_leaves_a_vector_equal_to_its_copies() -> None:
    judged = vector()
    other = vector(activations=judged.activations)  # arrays are compared as objects
    judge("float32", judged)
    assert judged == other
    assert judged.model_dump_json() == other.model_dump_json()
    judge("float32", other)
    assert judged == other
