"""Tensors of sites lie where rows came, unless they would keep memory that is not theirs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from inspect_lens._engine.protocol.readouts import CaptureEnvelope
from inspect_lens._vllm.registered.rows import tensors_by_name
from inspect_lens.spec import Site, TensorData, decode_tensor, encode_tensor

HIDDEN, NARROW, TOKENS = 16, 4, 5
WIDTHS = {"resid_post": (HIDDEN, 1), "q": (HIDDEN, 1), "k": (NARROW, 1), "v": (NARROW, 1)}


def asked(*sites: Site, layers: tuple[int, ...] = (1, 3)) -> CaptureEnvelope:
    return CaptureEnvelope(
        sites=sites, layers=layers, lo=0, hi=TOKENS, positions=None, hidden=HIDDEN,
        dtype="bfloat16", transport="inline", widths=tuple(WIDTHS[site] for site in sites),
    )  # fmt: skip


def came(capture: CaptureEnvelope) -> TensorData:
    """Rows that say which of all they are; behind a narrow one is nothing of use."""
    shape = len(capture.rows), TOKENS, HIDDEN
    rows = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
    return TensorData(rows, "bfloat16")


@pytest.mark.parametrize("layers", [(2,), (1, 3), (0, 1, 2)])
@pytest.mark.parametrize(
    ("sites", "is_copied"),
    [
        (("q", "k"), {"q": False, "k": False}),
        (("resid_post", "q", "v"), {"residual_stream": False, "q": False, "v": False}),
        (("k",), {"k": True}),
        (("k", "v"), {"k": True, "v": True}),
    ],
)
def test_rows_are_copied_only_where_they_would_keep_others(
    sites: Any, is_copied: dict[str, bool], layers: tuple[int, ...]
) -> None:
    capture = asked(*sites, layers=layers)
    rows = came(capture)
    found = tensors_by_name(rows, capture)
    assert {n: not np.shares_memory(t.storage, rows.storage) for n, t in found.items()} == is_copied
    for site, tensor in zip(sites, found.values(), strict=True):
        at = [i for i, row in enumerate(capture.rows) if row.tap.site == site]
        width = WIDTHS[site][0]
        np.testing.assert_array_equal(tensor.storage, rows.storage[at][..., :width])
        assert tensor.storage.flags.c_contiguous or not is_copied[list(found)[sites.index(site)]]
        # What a response carries does not depend on where the rows lie.
        again = decode_tensor(encode_tensor(tensor))
        np.testing.assert_array_equal(again.storage, tensor.storage)
        plain = TensorData(np.ascontiguousarray(tensor.storage), "bfloat16")
        assert tensor.sha256 == plain.sha256


def test_rows_that_serve_two_sites_are_changed_in_one() -> None:
    # The stream behind layer 1 is the stream in front of layer 2.
    capture = replace(
        asked("resid_post", layers=(1, 2)), sites=("resid_pre", "resid_post"), widths=()
    )
    found = tensors_by_name(came(capture), capture)
    before, behind = found["resid_pre"].storage, found["residual_stream"].storage
    np.testing.assert_array_equal(before[1], behind[0])
    kept = behind.copy()
    before += 1
    np.testing.assert_array_equal(behind, kept)
