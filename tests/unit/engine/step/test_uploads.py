"""Steering that cannot be put where taps read it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inspect_lens import LensRequest, SteeringVector
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.protocol.messages import ROWS, SCORES
from inspect_lens._engine.tap import edit_table
from inspect_lens.errors import LensError
from tests.kit.steps import CAPTURE, HIDDEN, Worker, begin, rows, sealed


def test_a_device_that_refuses_a_copy_fails_who_was_steered_and_no_later_one(
    worker: Worker, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(seed: int) -> LensRequest:
        values = np.random.default_rng(seed).normal(size=(1, HIDDEN))
        return LensRequest(edits=(SteeringVector(activations=values, layer_indices=[0]),))

    def refuse(*_: Any) -> None:
        raise RuntimeError("no pinned memory")

    # Its rows may move to make room for those that come, and then it needs what is not written.
    begin(worker, collector, "d", sealed(collector, asked(1), 4, 2))
    worker.step([("d", 9, 0, 4)])
    with monkeypatch.context() as patch:
        patch.setattr(edit_table, "_upload", refuse)
        begin(worker, collector, "e", sealed(collector, asked(0), 4, 2))
        begin(worker, collector, "c", sealed(collector, CAPTURE, 4, 2))
        worker.step([("e", 1, 0, 4), ("c", 2, 0, 4)])
    # One more than the first step fed: what it had may be there before the failure is heard of.
    for key, n_fed in (("d", 5), ("e", 4)):
        with pytest.raises(LensError, match="no pinned memory"):
            collector.take(key, counts={ROWS: 0, SCORES: 0}, n_fed=n_fed, timeout_s=5)
    got = collector.take("c", counts={ROWS: 4, SCORES: 0}, n_fed=4, timeout_s=5)
    np.testing.assert_array_equal(got.tensors[ROWS].storage[1], rows(2, 5, 0, 4).numpy())
    # The same vector again: nothing of what failed is taken for being there.
    begin(worker, collector, "f", sealed(collector, asked(0), 4, 2))
    worker.step([("f", 3, 0, 4)])
    assert collector.take("f", counts={ROWS: 0, SCORES: 0}, n_fed=4, timeout_s=5).n_steered == 4
    assert worker.stepper.rows_in_use == 1
