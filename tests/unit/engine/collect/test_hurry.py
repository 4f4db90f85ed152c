"""The thread that places rows looks for them rarely, and at once when somebody waits."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from inspect_lens._engine.collect import collector as collecting
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.export.transport import Copier
from inspect_lens._engine.protocol.messages import ROWS, SCORES
from inspect_lens.errors import CaptureError
from tests.kit.steps import CAPTURE, Worker, begin, rows, sealed

COUNTS = {ROWS: 4, SCORES: 0}


@pytest.fixture
def landed(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Rows of the worker land when it is set; until then nobody looks for them by himself."""
    event = threading.Event()
    copy = Copier.copy

    def late(self: Copier, rows: object, offset: int, seq: int, dtype: object) -> None:
        before = int(self._view.landed[0])
        copy(self, rows, offset, seq, dtype)  # type: ignore[arg-type]
        self._view.landed[0] = before

        def land() -> None:
            event.wait()
            self._view.landed[0] = seq

        threading.Thread(target=land, daemon=True).start()

    monkeypatch.setattr(Copier, "copy", late)
    monkeypatch.setattr(collecting, "_POLL_SHARE", 1e12)
    monkeypatch.setattr(collecting, "_POLL_MOST_S", 60.0)
    return event


@pytest.mark.parametrize("waiters", [1, 2])
def test_rows_are_looked_for_at_once_while_somebody_waits(
    worker: Worker, collector: Collector, landed: threading.Event, waiters: int
) -> None:
    keys = [f"k{i}" for i in range(waiters)]
    for key in keys:
        begin(worker, collector, key, sealed(collector, CAPTURE, 4, 2))
    worker.step([(key, i, 0, 4) for i, key in enumerate(keys)])
    time.sleep(0.1)  # the thread has found them announced, and sleeps
    assert not collector.notifier.hurry.is_set()
    with ThreadPoolExecutor(waiters) as pool:
        found = [
            pool.submit(collector.take, key, counts=COUNTS, n_fed=4, timeout_s=40) for key in keys
        ]
        while collector.notifier.n_waiting < waiters:
            time.sleep(0.01)
        assert collector.notifier.hurry.is_set()
        landed.set()
        for i, one in enumerate(found):
            tensor = one.result().tensors[ROWS]
            np.testing.assert_array_equal(tensor.storage[1], rows(i, 5, 0, 4).numpy())
    assert not collector.notifier.hurry.is_set()


def test_whoever_waits_in_vain_leaves_nothing(worker: Worker, collector: Collector) -> None:
    begin(worker, collector, "k", sealed(collector, CAPTURE, 4, 2))
    with pytest.raises(CaptureError, match="did not arrive"):
        collector.take("k", counts=COUNTS, n_fed=4, timeout_s=0.05)
    assert (collector.notifier.n_waiting, collector.notifier.hurry.is_set()) == (0, False)


def test_scores_that_are_read_as_they_come_are_looked_for(
    worker: Worker, collector: Collector
) -> None:
    for key in "ab":
        begin(worker, collector, key, sealed(collector, CAPTURE, 4, 2))
    assert collector.further("gone", {SCORES: 0}, n_fed=1, settled=None) is None
    assert collector.notifier.hurry.is_set()
    worker.step([("a", 1, 0, 4)])
    collector.take("a", counts=COUNTS, n_fed=4, timeout_s=5)
    assert not collector.notifier.hurry.is_set(), "until somebody takes what he did not read"
