"""Memory of results: never shared by two that live, bounded, and given back."""

from __future__ import annotations

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
from inspect_lens._engine.collect.result_memory import ARRIVED, COVERED, ResultMemory, Slab
from inspect_lens.errors import CapacityError

MIB = 1 << 20
FLOAT = np.dtype("<f4")


@pytest.fixture(autouse=True)
def _nothing_is_kept_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_memory, "_KEPT_LEAST", 0)


def values_of(slab: Slab, rows: int) -> Any:
    return slab.array(FLOAT, (rows, slab.row_bytes // 4))


def filled(memory: ResultMemory, mib: int, row_bytes: int = 4096) -> Any:
    """The values of a slab every row of which was written."""
    rows = (mib << 20) // row_bytes
    values = values_of(memory.take(rows, row_bytes), rows)
    values[:] = 7
    return values


def dropped(memory: ResultMemory) -> None:
    """What nobody holds is there again; nothing here is held by a circle."""
    memory.take_back()


def test_200_widths_are_served_out_of_one_range_of_addresses() -> None:
    memory = ResultMemory(0)
    held = []
    for width in range(1, 201):
        values = values_of(memory.take(50, 4 * width), 50)
        values[:] = width
        held.append(values)
    assert all((values == width).all() for width, values in enumerate(held, 1))


STEPS = st.lists(
    st.tuples(st.booleans(), st.integers(1, 300), st.sampled_from([4, 24, 40]), st.booleans()),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(0, 40_000))
def test_living_slabs_never_overlap_and_are_counted(steps: Any, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(result_memory, "_LARGE", 2400)
        memory = ResultMemory(most)
        live: list[tuple[Slab, Any, int]] = []
        slab = values = None
        now = time.monotonic()
        for number, (is_new, size, row_bytes, is_full) in enumerate(steps):
            if is_new or not live:
                slab = memory.take(size, row_bytes, is_full=is_full)
                assert not slab.flags.any()
                values = values_of(slab, size)
                values[:], slab.flags[:] = number, ARRIVED
                live.append((slab, values, number))
            else:
                live.pop(size % len(live))
                slab = values = None
            memory.sweep(now := now + 40)
            for slab, values, then in live:
                assert (values == then).all()
                assert slab.has_arrived(len(values))
            places = [(s.first_row * s.row_bytes, s.first_flag + len(v)) for s, v, _ in live]
            assert all(a[1] <= b[0] for a, b in pairwise(sorted(places)))
            assert sum(end - first for first, end in places) <= memory.used
            assert 0 <= memory.kept <= max(0, most - memory.used)
        live.clear()
        del slab, values
        dropped(memory)
        assert memory.used == 0


def test_a_slab_lives_as_long_as_any_view_of_it() -> None:
    memory = ResultMemory(MIB)
    slab = memory.take(8, 24)
    start = slab.first_row
    tensor = torch.from_numpy(values_of(slab, 8)[2:5])[1:]
    del slab
    dropped(memory)
    tensor.fill_(3.0)
    assert memory.take(8, 24).first_row != start
    del tensor
    dropped(memory)
    assert memory.take(8, 24).first_row == start


def test_what_was_dropped_is_taken_again_only_when_the_thread_that_places_says_so() -> None:
    """It may still be at rows of a request that has ended."""
    memory = ResultMemory(MIB)
    start = memory.take(8, 24).first_row
    gc.collect()
    other = memory.take(8, 24)
    assert other.first_row != start
    memory.take_back()
    assert memory.take(8, 24).first_row == start


def test_memory_of_dropped_slabs_stays_for_the_next_ones_for_a_minute() -> None:
    memory = ResultMemory(64 * MIB)
    first, second = filled(memory, 16), filled(memory, 16)
    address = first.ctypes.data
    del first
    dropped(memory)
    again = values_of(memory.take(4096, 4096), 4096)
    assert again.ctypes.data == address
    assert (again == 7).all()
    del again, second
    gc.collect()
    began = time.monotonic()
    memory.sweep(began)
    memory.sweep(began + 30)
    assert memory.kept >= 32 * MIB, "a minute has not passed"
    memory.sweep(time.monotonic() + 61)
    assert memory.kept == 0
    assert not values_of(memory.take(4096, 4096), 4096).any(), "what went back reads as zero"


def test_what_is_kept_and_in_use_stays_within_one_bound_for_all_widths() -> None:
    memory = ResultMemory(40 * MIB)
    one, two = filled(memory, 16, 4096), filled(memory, 16, 8192)
    del one
    dropped(memory)
    assert memory.kept >= 16 * MIB
    three = filled(memory, 20, 12288)
    assert memory.kept == 0, "a slab of another size needs the room"
    del two, three
    dropped(memory)
    assert 0 < memory.kept <= 40 * MIB


def test_much_memory_goes_back_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_memory, "_SWEPT", 16 * MIB)
    memory = ResultMemory(128 * MIB)
    values = [filled(memory, 16) for _ in range(3)]
    del values
    dropped(memory)
    kept = []
    for _ in range(4):
        kept.append(memory.kept)
        memory.sweep(time.monotonic() + 61)
    assert kept == sorted(set(kept), reverse=True)
    assert memory.kept == 0


@pytest.mark.parametrize("rows", [100, 100_003])
@pytest.mark.parametrize("is_refused", [False, True])
def test_flags_of_a_slab_that_is_used_again_are_clear(
    monkeypatch: pytest.MonkeyPatch, rows: int, is_refused: bool
) -> None:
    if is_refused:
        # What the system says of pages that are locked.
        monkeypatch.setattr(result_memory, "_discard", lambda _: (0, 0))
    memory = ResultMemory(0)
    before = memory.take(7, 24)
    before.flags[:] = COVERED
    for _ in range(2):
        slab = memory.take(rows, 24)
        start = slab.first_row
        assert not slab.flags.any()
        assert not slab.has_arrived(1)
        slab.flags[:] = COVERED
        del slab
        dropped(memory)
    assert memory.take(rows, 24).first_row == start
    assert (before.flags == COVERED).all()


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


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="there are no huge pages"
)
@pytest.mark.parametrize(
    ("mib", "is_full", "most", "expected"),
    [(16, True, 0, True), (16, False, 0, False), (16, False, 64, True), (1, True, 64, False)],
)
def test_large_slabs_that_fill_up_get_huge_pages(
    mib: int, is_full: bool, most: int, expected: bool
) -> None:
    memory = ResultMemory(most * MIB)
    slab = memory.take(mib << 8, 4096, is_full=is_full)
    assert has_huge_pages(values_of(slab, 1)) == expected


def test_addresses_are_used_up_to_the_last_half_and_larger_slabs_serve_smaller_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(result_memory, "_RESERVE", 1 << 28)
    memory = ResultMemory(0)
    # Of 32 MiB with their flags, in two halves of 128.
    live = [memory.take(31 << 8, 4096, is_full=i % 2 == 0) for i in range(8)]
    assert len({slab.first_row for slab in live}) == 8
    with pytest.raises(CapacityError, match="drop some"):
        memory.take(31 << 8, 4096)
    live.clear()
    dropped(memory)
    assert [memory.take(17 << 8, 4096).first_row for _ in range(3)]


def test_fewer_addresses_are_taken_where_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = mmap.mmap

    def mapped(number: int, nbytes: int, **others: Any) -> Any:
        if nbytes > most:
            raise OSError(12, "Cannot allocate memory")
        return real(number, nbytes, **others)

    monkeypatch.setattr(mmap, "mmap", mapped)
    most = 1 << 34
    assert 1 << 32 <= len(ResultMemory(0).mapped) <= most
    most = 0
    with pytest.raises(CapacityError, match="ulimit -v"):
        ResultMemory(0)


def test_a_slab_that_is_dropped_while_the_lock_is_held_is_counted_later() -> None:
    """By the garbage collector, in the very thread that takes one; or in a fork of it."""
    memory = ResultMemory(64 * MIB)
    values = filled(memory, 16)
    with memory._lock:
        child = os.fork()
        if not child:
            del values
            gc.collect()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        del values
        gc.collect()
    assert memory.used >= 16 * MIB
    memory.take_back()
    assert (memory.used, memory.kept) == (0, 0)


def test_what_was_just_dropped_and_is_not_taken_back_yet_keeps_nobody_waiting() -> None:
    memory = ResultMemory(8 << 30)
    slab = memory.take(3 << 20, 1024)
    del slab
    # More than may be kept beside it is counted, and none of it can be let go of yet.
    large = memory.take(7 << 20, 1024)
    memory.take_back()
    assert memory.kept <= 1 << 30
    del large
