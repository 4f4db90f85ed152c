"""Several front-ends, little memory, and requests that come back: nothing is mixed up or lost."""

from __future__ import annotations

import numpy as np

from inspect_lens import CaptureSpec, LensRequest, SteeringVector
from inspect_lens._engine._collector import Collector
from inspect_lens._engine._pending import ROWS, SCORES
from tests.kit.steps import (
    CAPTURE,
    HIDDEN,
    Worker,
    begin,
    exporter,
    rows,
    sealed,
)


def test_two_front_ends_get_their_own_rows_only(worker: Worker, collector: Collector) -> None:
    other = Collector()
    try:
        begin(worker, collector, "s", sealed(collector, CAPTURE, 4, 2))
        begin(worker, other, "t", sealed(other, CAPTURE, 6, 2))
        worker.step([("s", 1, 0, 4), ("t", 2, 0, 3)])
        worker.step([("t", 2, 3, 3), ("s", 1, 4, 1)])
        mine = collector.take("s", counts={ROWS: 5, SCORES: 0}, n_fed=5, timeout_s=5).tensors[ROWS]
        theirs = other.take("t", counts={ROWS: 6, SCORES: 0}, n_fed=6, timeout_s=5).tensors[ROWS]
        np.testing.assert_array_equal(mine.storage[1], rows(1, 5, 0, 5).numpy())
        np.testing.assert_array_equal(theirs.storage[1], rows(2, 5, 0, 6).numpy())
    finally:
        other.close()


def test_rows_of_more_bytes_than_there_is_room_for_come_in_pieces(collector: Collector) -> None:
    # Two taps of 30 tokens are 1920 bytes; a block takes 4096, and the memory has room for two.
    worker = Worker(exporter(8192))
    worker.stepper._exporter.arena.nbytes = 8192
    request = LensRequest(capture=CaptureSpec(layers=(0, 2, 5)))
    begin(worker, collector, "u", sealed(collector, request, 600, 2))
    for first in range(0, 600, 30):
        worker.step([("u", 3, first, 30)])
    got = collector.take("u", counts={ROWS: 600, SCORES: 0}, n_fed=600, timeout_s=5).tensors[ROWS]
    np.testing.assert_array_equal(got.storage[2], rows(3, 5, 0, 600).numpy())
    assert worker.stepper.bytes_in_use == 0
    worker.stepper.close()


def test_named_positions_that_the_cache_already_had_are_confirmed(
    worker: Worker, collector: Collector
) -> None:
    vector = SteeringVector(
        activations=np.ones((1, HIDDEN)), layer_indices=[2], position_indices=[0, 3]
    )
    begin(worker, collector, "w", sealed(collector, LensRequest(steer=(vector,)), 6, 4))
    worker.step([("w", 1, 4, 2)])  # an equal request left the first four tokens, steered
    worker.step([("w", 1, 6, 1)])
    got = collector.take("w", counts={ROWS: 0, SCORES: 0}, n_fed=7, timeout_s=5)
    assert got.n_steered == 0
    worker.stepper.remove("w")


def test_a_pre_empted_request_that_is_added_again_is_one_request(
    worker: Worker, collector: Collector
) -> None:
    vector = SteeringVector(activations=np.ones((1, HIDDEN)), layer_indices=[2])
    envelope = sealed(collector, LensRequest(steer=(vector,), capture=CAPTURE.capture), 6, 4)
    begin(worker, collector, "v", envelope)
    worker.step([("v", 1, 0, 6)])
    worker.stepper.remove("v")
    worker.stepper.add("v", envelope.pack())
    worker.step([("v", 1, 2, 4)])  # four of its six tokens were still in the cache
    worker.step([("v", 1, 6, 1)])
    got = collector.take("v", counts={ROWS: 7, SCORES: 0}, n_fed=7, timeout_s=5)
    assert got.n_steered == 7
    assert got.tensors[ROWS].shape == (2, 7, HIDDEN)
    worker.stepper.remove("v")
