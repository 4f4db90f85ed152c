"""Memory of results: never shared by two that live, given back when the last view is gone."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inspect_lens._engine import _slabs
from inspect_lens._engine._slabs import SlabPool

ROW = 24
FLOAT = np.dtype("<f4")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300)), max_size=40), st.integers(0, 9000))
def test_living_slabs_never_overlap_and_start_empty(
    steps: list[tuple[bool, int]], keep: int
) -> None:
    pool = SlabPool(ROW, keep)
    live: list[tuple[Any, int]] = []
    for number, (is_new, size) in enumerate(steps):
        if is_new or not live:
            slab = pool.take(size)
            assert not slab.arrived.any()
            assert slab.size >= size
            values = slab.array(FLOAT)
            values[:] = number
            slab.arrived[:] = True
            live.append((values, number))
        else:
            live.pop(size % len(live))
        for values, number_then in live:
            assert (values == number_then).all()


@pytest.mark.parametrize("keep", [0, 1 << 20])
def test_a_slab_lives_as_long_as_any_view_of_it(keep: int) -> None:
    pool = SlabPool(ROW, keep)
    slab = pool.take(8)
    start = slab.start
    tensor = torch.from_numpy(slab.array(FLOAT).reshape(8, -1)[2:5])[1:]
    del slab
    gc.collect()
    assert not pool.returned
    tensor.fill_(3.0)
    assert pool.take(8).start != start
    del tensor
    gc.collect()
    again = pool.take(8)
    assert again.start == start


def test_memory_beyond_what_is_kept_goes_back_to_the_system() -> None:
    pool = SlabPool(4096, keep_bytes=0)
    slab = pool.take(16)
    slab.array(FLOAT)[:] = 1
    del slab
    gc.collect()
    fresh = pool.take(16)
    assert not fresh.array(FLOAT).any(), "pages that were given back read as zero"


def test_fewer_addresses_are_taken_where_many_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = _slabs._mapped

    def mapped(nbytes: int) -> Any:
        if nbytes > 1 << 34:
            raise OSError("no")
        return real(nbytes)

    monkeypatch.setattr(_slabs, "_mapped", mapped)
    assert len(SlabPool(ROW, 0).memory) <= 1 << 34
