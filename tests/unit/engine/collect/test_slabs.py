"""Memory of results: never shared by two that live, given back when the last view is gone."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
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

from inspect_lens._engine.collect import result_memory
from inspect_lens._engine.collect.result_memory import Budget, Slab, SlabPool
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
        patch.setattr(result_memory, "_LARGE", 100 * ROW)
        take_and_drop(SlabPool(ROW, Budget(keep)), steps)


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
    pool = SlabPool(ROW, Budget(keep))
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
    pool = SlabPool(4096, Budget(0))
    slab = pool.take(16)
    slab.array(FLOAT)[:] = 1
    del slab
    gc.collect()
    fresh = pool.take(16)
    assert not fresh.array(FLOAT).any(), "pages that were given back read as zero"


def test_fewer_addresses_are_taken_where_many_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = result_memory._mapped

    def mapped(nbytes: int) -> Any:
        if nbytes > 1 << 34:
            raise OSError("no")
        return real(nbytes)

    monkeypatch.setattr(result_memory, "_mapped", mapped)
    assert len(SlabPool(ROW, Budget(0)).memory) <= 1 << 34


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
    pool = SlabPool(4096, Budget(0))
    slab = pool.take(mib << 8, is_full=is_full)
    there_are_any = Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert has_huge_pages(slab.array(FLOAT)) == (expected and there_are_any)


def test_slabs_that_may_stay_empty_get_huge_pages_while_they_could_all_be_full() -> None:
    pool = SlabPool(4096, Budget(0, 40 << 20))
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
    monkeypatch.setattr(
        result_memory, "_reserve", lambda row_bytes: result_memory._mapped(64 << 20)
    )
    pool = SlabPool(4096, Budget(0))
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


def found(pool: SlabPool, mib: int) -> Any:
    """What stands in the next slab."""
    return pool.take(mib << 8).array(FLOAT).copy()


class Advice:
    """Notes what the system is told, and tells it."""

    def __init__(self, patch: pytest.MonkeyPatch, refused: int | None = None) -> None:
        self.given: list[tuple[int, int, int]] = []
        madvise = result_memory._madvise

        def note(address: int, nbytes: int, advice: int) -> None:
            self.given.append((address, nbytes, advice))
            if advice != refused:
                madvise(address, nbytes, advice)

        patch.setattr(result_memory, "_madvise", note)

    def on(self, pool: SlabPool) -> list[tuple[int, int, int]]:
        """Address, bytes and advice, of this pool only."""
        first, last = pool._address, pool._address + len(pool.memory)
        return [given for given in self.given if first <= given[0] < last]


def test_memory_of_dropped_slabs_stays_for_the_next_ones_for_a_minute() -> None:
    budget = Budget(0, 64 << 20)
    pool = SlabPool(4096, budget)
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
    assert not budget.sweep(began)
    assert not budget.sweep(began + 59)
    assert budget.kept == 32 << 20, "a minute has not passed"
    assert not budget.sweep(time.monotonic() + 61)
    assert budget.kept == 0
    assert not found(pool, 16).any(), "pages that were given back read as zero"


def test_what_is_kept_and_in_use_stays_within_a_bound() -> None:
    budget = Budget(0, 40 << 20)
    pool = SlabPool(4096, budget)
    one, two, three = filled(pool, 16), filled(pool, 16), filled(pool, 16)
    del one
    gc.collect()
    # 32 of 40 MiB are in use still: there is no room for 16 more.
    assert not found(pool, 16).any()
    gc.collect()
    del two
    gc.collect()
    assert (found(pool, 16) == 7).any()
    gc.collect()
    # Slabs of another size make room by taking what is kept.
    four = filled(pool, 24)
    assert not found(pool, 16).any()
    del three, four


def test_rows_of_all_widths_share_the_bound() -> None:
    budget = Budget(0, 40 << 20)
    narrow, wide = SlabPool(4096, budget), SlabPool(8192, budget)
    held = wide.take(16 << 7)
    for _ in range(2):
        values = filled(narrow, 16)
        del values
        gc.collect()
    assert budget.kept == 16 << 20
    other = wide.take(16 << 7)
    assert (budget.used, budget.kept) == (32 << 20, 0), "what the other pool kept has to go"
    del held, other


def test_the_system_may_have_what_is_kept_beyond_the_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    advice = Advice(monkeypatch)
    # Rows of a width that divides no page.
    pool = SlabPool(5000, Budget(24 << 20, 128 << 20))
    first, second = filled(pool, 16), filled(pool, 16)
    start, nbytes, huge = second.ctypes.data, second.nbytes, 2 << 20
    assert start % huge
    assert (start + nbytes) % huge
    del first
    gc.collect()
    assert not advice.on(pool), "kept in any case"
    del second
    gc.collect()
    # Whole huge pages only: a part would be cut off.
    first_page, last_page = -(-start // huge) * huge, (start + nbytes) // huge * huge
    assert advice.on(pool) == [(first_page, last_page - first_page, mmap.MADV_FREE)]


@pytest.mark.parametrize("refused", [mmap.MADV_FREE, mmap.MADV_DONTNEED])
def test_a_system_that_does_not_take_pages_back_keeps_them(
    monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    advice = Advice(monkeypatch, refused)
    budget = Budget(0, 64 << 20)
    pool = SlabPool(4096, budget)
    del (values := [filled(pool, 16)])[0]
    gc.collect()
    assert not values
    assert (found(pool, 16) == 7).any()
    gc.collect()
    assert not budget.sweep(time.monotonic() + 61)
    assert budget.kept == 0
    assert refused in {kind for _, _, kind in advice.on(pool)}
    assert pool.take(16 << 8).array(FLOAT).any() == (refused == mmap.MADV_DONTNEED)


def test_pages_that_are_locked_stop_nothing() -> None:
    budget = Budget(0, 64 << 20)
    pool = SlabPool(4096, budget)
    values = filled(pool, 16)
    libc = ctypes.CDLL(None)
    if libc.mlock(ctypes.c_void_p(values.ctypes.data), ctypes.c_size_t(4096)):
        pytest.skip("no page may be locked here")
    address = values.ctypes.data
    try:
        del values
        gc.collect()
        assert not budget.sweep(time.monotonic() + 61)
        assert (budget.used, budget.kept) == (0, 0)
        assert pool.take(16 << 8).array(FLOAT).ctypes.data == address
    finally:
        libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(4096))


def test_much_memory_goes_back_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_memory, "_SWEPT", 16 << 20)
    budget = Budget(0, 64 << 20)
    pool = SlabPool(4096, budget)
    values = [filled(pool, 16) for _ in range(3)]
    del values
    gc.collect()
    budget.sweep(time.monotonic())
    later = time.monotonic() + 61
    assert [budget.sweep(later) for _ in range(4)] == [True, True, True, False]
    assert (budget.used, budget.kept) == (0, 0)


def test_a_slab_that_is_dropped_while_another_thread_counts_is_counted_later() -> None:
    budget = Budget(64 << 20)
    pool = SlabPool(4096, budget)
    values = filled(pool, 16)
    with budget.lock:
        del values
        gc.collect()
    assert budget.used == 16 << 20
    pool.take_back()
    assert (budget.used, budget.kept) == (0, 0)
    assert not found(pool, 16).any(), "its memory went back"


def test_a_slab_is_used_again_only_after_its_memory_was_dealt_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = SlabPool(4096, Budget(0, 24 << 20))
    returned = []
    monkeypatch.setattr(result_memory, "_madvise", lambda *_: returned.append(len(pool.returned)))
    one, two = filled(pool, 16), filled(pool, 16)
    del one  # goes back
    gc.collect()
    pool.take_back()
    del two  # is kept
    gc.collect()
    assert returned == [0, 0]


def test_a_forked_child_keeps_nothing() -> None:
    budget = Budget(64 << 20)
    pool = SlabPool(4096, budget)
    values = filled(pool, 16)
    child = os.fork()
    if not child:
        del values
        gc.collect()
        os._exit(budget.kept != 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    del values
    gc.collect()
    assert budget.kept == 16 << 20


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(1, 300), st.booleans(), st.booleans(), st.booleans()),
        max_size=40,
    ),
    st.integers(0, 3000),
    st.integers(0, 9000),
)
def test_counts_of_memory_are_right_whatever_is_taken_and_dropped(
    steps: list[tuple[bool, int, bool, bool, bool]], keep: int, spare: int
) -> None:
    budget = Budget(keep, spare)
    pools = SlabPool(ROW, budget), SlabPool(2 * ROW, budget)
    live: list[Slab] = []
    sizes: list[int] = []
    now = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(result_memory, "_LARGE", 100 * ROW)
        for is_new, size, is_full, is_wide, sweeps in steps:
            if is_new or not live:
                live.append(pools[is_wide].take(size, is_full=is_full))
                sizes.append(live[-1].size * pools[is_wide].row_bytes)
            else:
                live.pop(size % len(live))
                sizes.pop(size % len(sizes))
            if sweeps:
                now += 40
                budget.sweep(now)
            assert budget.used == sum(sizes)
            assert 0 <= budget.kept <= max(keep, spare - budget.used)
            starts = sorted((id(slab._pool), slab.start, slab.start + slab.size) for slab in live)
            assert all(a[2] <= b[1] for a, b in pairwise(starts) if a[0] == b[0])


def test_widths_for_which_no_addresses_are_left_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(nbytes: int) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(result_memory, "_mapped", full)
    with pytest.raises(CapacityError, match="no addresses left for rows of 4096 bytes"):
        SlabPool(4096, Budget(0))
