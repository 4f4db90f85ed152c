"""Memory of results: never shared by two that live, given back when the last view is gone."""

from __future__ import annotations

import gc
import mmap
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inspect_lens._engine import _slabs
from inspect_lens._engine._slabs import Slab, SlabPool
from inspect_lens.errors import CapacityError

ROW = 24
FLOAT = np.dtype("<f4")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 300), st.booleans()), max_size=40),
    st.integers(0, 9000),
)
def test_living_slabs_never_overlap_and_start_empty(
    steps: list[tuple[bool, int, bool]], keep: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_slabs, "_LARGE", 100 * ROW)
        take_and_drop(SlabPool(ROW, keep), steps)


def take_and_drop(pool: SlabPool, steps: list[tuple[bool, int, bool]]) -> None:
    live: list[tuple[Any, int]] = []
    for number, (is_new, size, is_full) in enumerate(steps):
        if is_new or not live:
            slab = pool.take(size, is_full=is_full)
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


def has_huge_pages(values: np.ndarray[Any, Any]) -> bool:
    """Whether the system was asked for huge pages where an array begins."""
    address, is_here = values.ctypes.data, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, last = (int(part, 16) for part in found.groups())
            is_here = first <= address < last
        elif is_here and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError(f"{address:x} is not mapped")


@pytest.mark.parametrize(
    ("mib", "is_full", "expected"), [(16, True, True), (16, False, False), (1, True, False)]
)
def test_large_slabs_that_fill_up_get_huge_pages(mib: int, is_full: bool, expected: bool) -> None:
    pool = SlabPool(4096, keep_bytes=0)
    slab = pool.take(mib << 8, is_full=is_full)
    there_are_any = Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert has_huge_pages(slab.array(FLOAT)) == (expected and there_are_any)


def test_slabs_that_may_stay_empty_get_huge_pages_while_they_could_all_be_full() -> None:
    pool = SlabPool(4096, keep_bytes=0, spare_bytes=40 << 20)
    has_any = Path("/sys/kernel/mm/transparent_hugepage").exists()

    def take(mib: int, *, is_full: bool = False) -> tuple[Slab, bool]:
        slab = pool.take(mib << 8, is_full=is_full)
        return slab, has_huge_pages(slab.array(FLOAT)) or not has_any

    first, second, third = take(16), take(16), take(16)
    assert [is_huge for _, is_huge in (first, second, third)] == [True, True, not has_any]
    assert take(1)[1] is not has_any, "pages that it would share with others"
    assert take(16, is_full=True)[1], "of those most is written in any case"
    del first, third
    gc.collect()
    assert take(16)[1], "what was given back counts no more"
    del second
    fourth = take(32, is_full=True)
    assert not has_any or not take(16)[1], "what is written in any case counts, too"
    del fourth


def test_either_half_serves_where_the_other_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_slabs, "_reserve", lambda row_bytes: _slabs._mapped(64 << 20))
    pool = SlabPool(4096, keep_bytes=0)
    for is_full in (True, False):
        live = [pool.take(16 << 8, is_full=is_full) for _ in range(4)]
        assert len({slab.start for slab in live}) == 4
        with pytest.raises(CapacityError, match="drop some"):
            pool.take(16 << 8, is_full=is_full)
        del live
        gc.collect()


def filled(pool: SlabPool, mib: int) -> Any:
    """The values of a slab of 4 KiB rows, every one of them written."""
    values = pool.take(mib << 8).array(FLOAT)
    values[:] = 7
    return values


def test_memory_of_dropped_slabs_stays_for_the_next_ones_for_a_minute() -> None:
    pool = SlabPool(4096, keep_bytes=0, spare_bytes=64 << 20)
    first, second = filled(pool, 16), filled(pool, 16)
    address = first.ctypes.data
    del first
    gc.collect()
    again = pool.take(16 << 8).array(FLOAT)
    assert again.ctypes.data == address
    # The system may have taken a page of those that were not touched since, but not all.
    assert (again == 7).any()
    del again, second
    gc.collect()
    began = time.monotonic()
    assert not pool.sweep(began)
    assert (filled_before(pool, 16) == 7).any(), "a minute has not passed"
    gc.collect()
    assert not pool.sweep(time.monotonic() + 59)
    assert not pool.sweep(time.monotonic() + 61)
    assert not filled_before(pool, 16).any(), "pages that were given back read as zero"


def filled_before(pool: SlabPool, mib: int) -> Any:
    return pool.take(mib << 8).array(FLOAT).copy()


def test_what_is_kept_and_in_use_stays_within_a_bound() -> None:
    pool = SlabPool(4096, keep_bytes=0, spare_bytes=40 << 20)
    one, two, three = filled(pool, 16), filled(pool, 16), filled(pool, 16)
    del one
    gc.collect()
    # 32 of 40 MiB are in use still: there is no room for 16 more.
    assert not filled_before(pool, 16).any()
    gc.collect()
    del two
    gc.collect()
    kept = filled_before(pool, 16)
    assert (kept == 7).any()
    gc.collect()
    # Slabs of another size make room by taking what is kept.
    four = filled(pool, 24)
    assert not filled_before(pool, 16).any()
    del three, four


def test_a_system_that_cannot_take_pages_back_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SlabPool(4096, keep_bytes=0, spare_bytes=64 << 20)
    advise = pool._advise

    def refuse(advice: int, start: int, rows: int) -> None:
        if advice == mmap.MADV_FREE:
            raise OSError("unknown advice")
        advise(advice, start, rows)

    monkeypatch.setattr(pool, "_advise", refuse)
    del (values := [filled(pool, 16)])[0]
    gc.collect()
    assert (filled_before(pool, 16) == 7).all()
    assert not values


def test_much_memory_goes_back_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_slabs, "_SWEPT", 16 << 20)
    pool = SlabPool(4096, keep_bytes=0, spare_bytes=64 << 20)
    values = [filled(pool, 16) for _ in range(3)]
    del values
    gc.collect()
    pool.sweep(time.monotonic())
    later = time.monotonic() + 61
    assert [pool.sweep(later) for _ in range(4)] == [True, True, True, False]
    assert pool._kept == 0
    assert pool._used == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(1, 300), st.booleans(), st.booleans()), max_size=40
    ),
    st.integers(0, 3000),
    st.integers(0, 9000),
)
def test_counts_of_memory_are_right_whatever_is_taken_and_dropped(
    steps: list[tuple[bool, int, bool, bool]], keep: int, spare: int
) -> None:
    pool = SlabPool(ROW, keep, spare)
    live: list[Slab] = []
    now = time.monotonic()
    for is_new, size, is_full, sweeps in steps:
        if is_new or not live:
            live.append(pool.take(size, is_full=is_full))
        else:
            live.pop(size % len(live))
        if sweeps:
            now += 40
            pool.sweep(now)
        used = sum(slab.size * ROW for slab in live)
        assert pool._used == used
        assert 0 <= pool._kept <= max(keep, spare - used)
    starts = sorted((slab.start, slab.start + slab.size) for slab in live)
    assert all(a[1] <= b[0] for a, b in pairwise(starts))
