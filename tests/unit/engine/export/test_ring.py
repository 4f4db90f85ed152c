"""Spans of the ring: rows of a step stay until they have been copied out, and few wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inspect_lens import CaptureSpec, LensRequest
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.export.transport import Copier, Exporter
from inspect_lens._engine.protocol.messages import ROWS, SCORES, ArenaWriter
from inspect_lens._engine.step.exporter import Ring
from inspect_lens._engine.tap.buffers import CudaMaps, TapState
from tests.kit.steps import LAYERS, Worker, begin, rows, sealed

PARTS = [2, 4, 8, 32]


class LateCopier(Copier):
    """Copies like a slow stream: in order, and only when somebody waits for it."""

    def __init__(self, arena: ArenaWriter) -> None:
        super().__init__(arena)
        self._asked: deque[Callable[[], None]] = deque()
        self._done = 0
        self._marks: dict[int, int] = {}
        self.n_waits = 0
        """Times that somebody waited for a copy that had not been made."""

    def copy(self, rows: torch.Tensor, offset: int, seq: int, dtype: torch.dtype) -> None:
        # What of the ring is looked at is read when the copy is made.
        self._asked.append(partial(super().copy, rows, offset, seq, dtype))

    def release(self, part: int) -> None:
        self._marks[part] = self._done + len(self._asked)

    def wait_for(self, part: int) -> None:
        self.n_waits += self._marks[part] > self._done
        self.run(self._marks[part] - self._done)

    def run(self, n: int | None = None) -> None:
        """Make the oldest copies, or all of them."""
        for _ in range(len(self._asked) if n is None else max(0, n)):
            self._asked.popleft()()
            self._done += 1


class Event:
    """Of a device that is never behind."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Noting:
    """A copier of which only what a ring asks is of interest."""

    def __init__(self) -> None:
        self.n_copies = self._made = 0
        self._marks: dict[int, int] = {}
        self.waited: list[int] = []

    @property
    def under_way(self) -> set[int]:
        """Parts whose copies nobody has waited for."""
        return {part for part, mark in self._marks.items() if mark > self._made}

    def wait_for(self, part: int) -> None:
        self.waited.append(part)
        self._made = max(self._made, self._marks[part])

    def release(self, part: int) -> None:
        self._marks[part] = self.n_copies


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 6, 32]),
    st.integers(1, 9),
    st.lists(st.tuples(st.floats(0.0, 1.0), st.booleans()), max_size=80),
)
def test_no_span_holds_rows_that_may_still_be_copied(
    parts: int, part_rows: int, steps: list[tuple[float, bool]]
) -> None:
    copier: Any = Noting()
    ring = Ring(parts, part_rows, copier)
    half = max(1, parts // 2)
    before: set[int] = set()
    for share, is_fault in steps:
        n = max(1, round(share * half * part_rows))
        waits = len(copier.waited)
        span = ring.take(n)
        mine = set(span.parts)
        assert not mine & copier.under_way
        assert len(copier.waited) <= waits + 1, "one wait is enough"
        assert span.first_row == span.parts[0] * part_rows
        assert 0 <= len(span.parts) * part_rows - n < part_rows, "no more than it needs"
        assert span.parts[0] // half == span.parts[-1] // half, "within a half"
        assert 0 <= span.parts[0] <= span.parts[-1] < parts
        assert parts == 1 or not mine & before, "the last step's rows are left alone"
        before = mine
        if not is_fault:
            copier.n_copies += 1
            ring.release(span)


def test_a_small_step_behind_a_large_one_does_not_wait_for_it() -> None:
    copier: Any = Noting()
    ring = Ring(32, 10, copier)
    large = ring.take(160)
    ring.release(large)
    for _ in range(16):
        small = ring.take(3)
        ring.release(small)
        assert len(small.parts) == 1
    assert not copier.waited
    ring.take(3)
    assert copier.waited == [0], "sixteen steps later"


def cuda_maps(state: TapState) -> CudaMaps:
    """What fills the maps of a GPU, here those of a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("inspect_lens._engine.tap.buffers._EVENT", Event)
        patch.setattr(torch.Tensor, "pin_memory", lambda self: self)
        return CudaMaps(state)


def run(
    collector: Collector,
    parts: int,
    operations: list[tuple[str, int, int]],
    positions: list[Any],
    *,
    has_cuda_maps: bool = False,
) -> int:
    """Run steps of four requests on a worker that copies late, and compare every row.

    Returns:
        How often a step had to wait for a copy.
    """
    arena = ArenaWriter(4 << 20)
    copier = LateCopier(arena)
    worker = Worker(Exporter(arena, copier), parts=parts)
    if has_cuda_maps:
        worker.stepper._maps = cuda_maps(worker.state)
    n_prompt, most = 60, 120
    fed = {f"r{i}": 0 for i in range(4)}
    layers = [(0,), LAYERS, LAYERS, (2, 5)]
    for i, key in enumerate(fed):
        request = LensRequest(capture=CaptureSpec(layers=layers[i], positions=positions[i]))
        begin(worker, collector, key, sealed(collector, request, n_prompt, most))
    try:
        for operation, number, size in operations:
            keys = [f"r{number}"] if operation == "alone" else list(fed)
            count = dict.fromkeys(keys, 1)
            if operation != "decode":
                count[f"r{number}"] = size
            worker.step([(key, int(key[1:]), fed[key], n) for key, n in count.items()])
            for key, n in count.items():
                fed[key] += n
        worker.stepper.leave(fed)
        waits = copier.n_waits
        copier.run()
        for key, n in fed.items():
            i = int(key[1:])
            lo, hi = {"all": (0, n), "prompt": (0, min(n, n_prompt))}[positions[i]]
            if hi <= lo:
                continue
            taken = collector.take(key, counts={ROWS: hi - lo, SCORES: 0}, n_fed=n, timeout_s=5)
            for rank, layer in enumerate(layers[i]):
                np.testing.assert_array_equal(
                    taken.tensors[ROWS].to_float32()[rank], rows(i, layer, lo, hi - lo).numpy()
                )
        return waits
    finally:
        copier.run()
        for key in fed:
            collector.discard(key)
        worker.stepper.close()


def room(operations: list[tuple[str, int, int]]) -> bool:
    """Whether requests stay within the tokens that they may have."""
    return sum(size for _, _, size in operations) + len(operations) < 170


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(PARTS),
    st.lists(
        st.tuples(
            st.sampled_from(["decode", "decode", "decode", "decode", "alone", "mixed"]),
            st.integers(0, 3),
            st.sampled_from([1, 2, 3, 6, 8, 9, 16, 17, 29]),
        ),
        max_size=40,
    ).filter(room),
    st.lists(st.sampled_from(["all", "prompt"]), min_size=4, max_size=4),
    st.booleans(),
)
def test_rows_arrive_whatever_the_sizes_of_steps_and_however_late_they_are_copied(
    collector: Collector,
    parts: int,
    operations: list[tuple[str, int, int]],
    positions: list[Any],
    has_cuda_maps: bool,
) -> None:
    run(collector, parts, operations, positions, has_cuda_maps=has_cuda_maps)


def test_a_decode_step_waits_for_a_large_step_only_where_the_ring_has_few_parts(
    collector: Collector,
) -> None:
    operations = [("alone", 1, 32)] + 8 * [("decode", 0, 1)]
    assert run(collector, 32, operations, ["all"] * 4) == 0
    assert run(collector, 2, operations, ["all"] * 4) > 0
