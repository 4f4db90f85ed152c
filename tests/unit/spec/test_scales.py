"""Steering that would overflow the stream is refused before the engine sees it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from inspect_lens import LensRequest, SteeringVector
from inspect_lens.errors import SpecError
from inspect_lens.spec import LARGEST_NORM, Add, check_request
from tests.kit.steps import FACTS, HIDDEN

UNIT = np.eye(HIDDEN, dtype=np.float32)


def vector(norm: float = 1.0, **fields: Any) -> Add:
    """One that adds so much along an axis at layer 2."""
    fields = {"activations": UNIT[:1], "layer_indices": [2], "scale": norm} | fields
    return SteeringVector(**fields)


def judge(dtype: str, *vectors: Add) -> None:
    check_request(LensRequest(edits=vectors), replace(FACTS, dtype=dtype))


@pytest.mark.parametrize("dtype", sorted(LARGEST_NORM))
def test_what_overflows_the_streams_dtype_is_refused_with_the_bound(dtype: str) -> None:
    most = LARGEST_NORM[dtype]
    judge(dtype, vector(most), vector(-most))
    judge(dtype, vector(0.99 * most**0.5, norm_match=True), vector(most))
    for bad in (
        [vector(), vector(1.01 * most)],
        [vector(1.01 * most**0.5, norm_match=True)],
        [vector(3e38, norm_match=True)],
        [vector(3e38)],
    ):
        with pytest.raises(SpecError, match=f"edits.*norm.*{dtype}.*lower the scale"):
            judge(dtype, *bad)


def test_judging_leaves_a_vector_equal_to_its_copies() -> None:
    judged = vector()
    other = vector(activations=judged.vector)  # arrays are compared as objects
    judge("float32", judged)
    assert judged == other
    assert judged.model_dump_json() == other.model_dump_json()
    judge("float32", other)
    assert judged == other
