"""A reduced result that says it is there is whole: at no moment of its placing is it half so."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest

from inspect_lens import CaptureSpec, LensRequest
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.collect.placement import Placing
from inspect_lens._engine.protocol.messages import ROWS, SCORES
from tests.kit.steps import FACTS, Worker, begin, exporter, rows, sealed

PLACING = {Placing.place.__code__, Placing._write.__code__}


@pytest.fixture
def folding() -> Any:
    made = Worker(exporter(), sum_rows=8)
    yield made
    made.stepper.close()


@pytest.mark.parametrize("n_completion", [2, 6, 9])
def test_a_mean_that_is_there_can_be_taken_at_every_line(
    folding: Worker, monkeypatch: pytest.MonkeyPatch, n_completion: int
) -> None:
    """What another thread of a front-end may see between two lines of the one that places rows.

    The engine feeds one token behind the end, as asynchronous scheduling does.
    """
    collector = Collector()
    asked = LensRequest(capture=CaptureSpec(layers=(0, 2, 5), reduce="mean"))
    n_prompt, max_tokens = 4, 12
    n_fed = n_prompt + n_completion - 1
    counts = {ROWS: n_fed, SCORES: 0}
    seen: list[bool] = []

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        pending = collector._pending.get("m")
        if frame.f_code in PLACING and pending is not None:
            stream = pending.streams[ROWS]
            if stream.has(n_fed):
                seen.append(stream.is_cut(n_fed))
            return look
        return None

    place = collector._placing.place

    def traced(*args: Any) -> bool:
        sys.settrace(look)
        try:
            return place(*args)
        finally:
            sys.settrace(None)

    monkeypatch.setattr(collector._placing, "place", traced)
    try:
        begin(folding, collector, "m", sealed(collector, asked, n_prompt, max_tokens))
        folding.step([("m", 1, 0, n_prompt)])
        for position in range(n_prompt, n_fed + 1):
            folding.step([("m", 1, position, 1)])
        folding.stepper.remove("m")
        taken = collector.take("m", counts=counts, n_fed=n_fed, timeout_s=5).tensors[ROWS]
        mean = np.stack([rows(1, layer, 0, n_fed).numpy().mean(0) for layer in FACTS.layers])
        np.testing.assert_allclose(taken.storage[:, 0], mean, rtol=1e-6)
        assert not any(seen)
    finally:
        collector.close()
