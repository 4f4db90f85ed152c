"""Drafts: rejected rows are written again, and nothing is returned before that has happened."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens import CaptureSpec, LensRequest, SteeringVector
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.protocol.messages import ROWS, SCORES, Envelope, seal
from inspect_lens.errors import CaptureError
from inspect_lens.spec import EngineProbe
from tests.kit.steps import (
    FACTS,
    HIDDEN,
    Worker,
    begin,
    rows,
    sealed,
)

# Fixtures come in by name.
# ruff: noqa: F811

PROMPT = 4
SPECULATIVE = replace(FACTS, is_speculative=True)

NONE = {ROWS: 0, SCORES: 0}


def sealed(collector: Collector, request: LensRequest) -> Envelope:
    return seal(request, SPECULATIVE, reply=collector.address, n_prompt=PROMPT, max_tokens=12)


def capture(positions: Any = "all") -> LensRequest:
    return LensRequest(capture=CaptureSpec(layers=(0,), positions=positions))


def run_to_rejection(worker: Worker, key: str) -> None:
    """The prompt, then one token with three drafts of which the first is accepted."""
    worker.step([(key, 1, 0, PROMPT)])
    worker.step([(key, 7, 4, 4)])


def test_rows_of_rejected_drafts_are_not_returned(worker: Worker, collector: Collector) -> None:
    begin(worker, collector, "a", sealed(collector, capture()))
    run_to_rejection(worker, "a")
    # Rows 4 to 7 are there, and 6 and 7 are of rejected drafts. The last step, at 6, has fed
    # one token more and two drafts that were accepted; its rows are still on their way.
    with pytest.raises(CaptureError, match="rejected drafts"):
        collector.take("a", counts={ROWS: 8, SCORES: 0}, n_fed=9, settled=7, timeout_s=0.2)


def test_a_request_that_comes_back_for_its_last_token_is_settled(
    worker: Worker, collector: Collector
) -> None:
    begin(worker, collector, "back", sealed(collector, capture()))
    run_to_rejection(worker, "back")
    # It was pre-empted, and what it had sampled is fed again, in two chunks and without a draft;
    # what is sampled behind that is its last token.
    worker.stepper.remove("back")
    worker.stepper.add("back", dict(sealed(collector, capture()).pack()))
    worker.stepper.drafted = {"another"}
    worker.step([("back", 2, 0, 5)])
    worker.step([("back", 2, 5, 2)])
    got = collector.take("back", counts={ROWS: 7, SCORES: 0}, n_fed=7, settled=7, timeout_s=5)
    np.testing.assert_array_equal(got.tensors[ROWS].storage[0], rows(2, 0, 0, 7).numpy())


def test_the_last_write_wins(worker: Worker, collector: Collector) -> None:
    begin(worker, collector, "b", sealed(collector, capture()))
    run_to_rejection(worker, "b")
    worker.step([("b", 2, 6, 4)])
    got = collector.take("b", counts={ROWS: 9, SCORES: 0}, n_fed=9, settled=7, timeout_s=5)
    assert ROWS in got.tensors
    expected = torch.cat([rows(1, 0, 0, 4), rows(7, 0, 4, 2), rows(2, 0, 6, 3)])
    np.testing.assert_array_equal(got.tensors[ROWS].storage[0], expected.numpy())


def test_scores_of_rejected_drafts_are_corrected(worker: Worker, collector: Collector) -> None:
    weight = np.zeros((1, HIDDEN), dtype=np.float32)
    weight[0, 0] = 1.0  # the number of whoever wrote the row
    probe = EngineProbe(layers=(0,), tensors={"weight": weight})
    worker.stepper.probes.add(probe)
    envelope = seal(
        LensRequest(probes=["p"]),
        SPECULATIVE,
        reply=collector.address,
        n_prompt=PROMPT,
        max_tokens=12,
        probes={"p": probe},
    )
    begin(worker, collector, "p", envelope)
    run_to_rejection(worker, "p")
    counts = {ROWS: 0, SCORES: 4}
    with pytest.raises(CaptureError, match="rejected drafts"):
        collector.take("p", counts=counts, n_fed=8, settled=7, timeout_s=0.2)
    begin(worker, collector, "q", envelope)
    run_to_rejection(worker, "q")
    worker.step([("q", 2, 6, 4)])
    got = collector.take("q", counts={ROWS: 0, SCORES: 5}, n_fed=9, settled=7, timeout_s=5)
    assert got.tensors[SCORES].storage[0, :, 0].tolist() == [7, 7, 2, 2, 2]


def test_a_named_position_waits_for_the_step_behind_it(
    worker: Worker, collector: Collector
) -> None:
    begin(worker, collector, "c", sealed(collector, capture((6,))))
    run_to_rejection(worker, "c")
    with pytest.raises(CaptureError, match="rejected drafts"):
        collector.take("c", counts={ROWS: 1, SCORES: 0}, n_fed=12, settled=12, timeout_s=0.2)
    begin(worker, collector, "d", sealed(collector, capture((5,))))
    run_to_rejection(worker, "d")
    # Row 5 was an accepted draft; the step at 6 has no row to send and says so all the same.
    worker.step([("d", 2, 6, 1)])
    got = collector.take("d", counts={ROWS: 1, SCORES: 0}, n_fed=12, settled=12, timeout_s=5)
    assert ROWS in got.tensors
    np.testing.assert_array_equal(got.tensors[ROWS].storage[0], rows(7, 0, 5, 1).numpy())


def test_steering_is_confirmed_up_to_the_last_step(worker: Worker, collector: Collector) -> None:
    vector = SteeringVector(activations=np.ones((1, HIDDEN)), layer_indices=[2])
    steer = LensRequest(edits=(vector,))
    begin(worker, collector, "e", sealed(collector, steer))
    run_to_rejection(worker, "e")
    with pytest.raises(CaptureError, match="last step was not reported"):
        collector.take("e", counts=NONE, n_fed=8, settled=7, timeout_s=0.2)
    begin(worker, collector, "f", sealed(collector, steer))
    run_to_rejection(worker, "f")
    worker.step([("f", 2, 6, 2)])
    assert collector.take("f", counts=NONE, n_fed=8, settled=7, timeout_s=5).n_steered == 8


def test_steering_of_a_named_draft_is_confirmed(worker: Worker, collector: Collector) -> None:
    vector = SteeringVector(
        activations=np.ones((1, HIDDEN)), layer_indices=[2], position_indices=[5]
    )
    begin(worker, collector, "g", sealed(collector, LensRequest(edits=(vector,))))
    run_to_rejection(worker, "g")
    worker.step([("g", 2, 6, 1)])
    assert collector.take("g", counts=NONE, n_fed=7, settled=7, timeout_s=5).n_steered == 1
