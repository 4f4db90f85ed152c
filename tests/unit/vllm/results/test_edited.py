"""Requests that are edited alone are taken together, and get what each would have got by itself."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from inspect_lens import LensRequest, SteeringVector
from inspect_lens._engine.collect import collector as module
from inspect_lens._engine.export.transport import COLUMN
from inspect_lens._engine.protocol.messages import ArenaWriter, Opened, Opening, seal
from inspect_lens._vllm.results.attach import Results
from inspect_lens._vllm.results.choices import Ticket
from inspect_lens.errors import CaptureError
from inspect_lens.spec import Ablate, Add
from tests.unit.vllm.results.test_results import FACTS, completion, output

ROW = np.ones(4, dtype=np.float32)
ASKED = {
    "a vector": LensRequest(edits=[SteeringVector(activations=ROW[None], layer_indices=[0])]),
    "two layers": LensRequest(edits=[Ablate(direction=ROW, layers=[0, 1])]),
    "the completion": LensRequest(edits=[Add(vector=ROW, layers=[1], positions="completion")]),
    "some": LensRequest(edits=[Add(vector=ROW, layers=[1], positions=[0, 2])]),
    "both": LensRequest(
        edits=[
            SteeringVector(activations=ROW[None], layer_indices=[0], phase="decode"),
            Add(vector=ROW, layers=[1], positions=[1]),
        ],
    ),
}
N_PROMPT, N_MAX = 3, 6


class Batch:
    """Requests of one worker, which has told of all that was fed."""

    def __init__(self, asked: list[LensRequest], last: int = N_MAX) -> None:
        self.results, self.arena = Results(timeout_s=0.05), ArenaWriter(1 << 16)
        self.keys = [f"k{i}" for i in range(len(asked))]
        collector = self.results.the_collector()
        for i, request in enumerate(asked):
            envelope = seal(
                request, FACTS, reply=self.results.address, n_prompt=N_PROMPT, max_tokens=4
            )
            self.results.expect(self.keys[i], envelope.pack(), n_prompt=N_PROMPT, n_max=N_MAX)
            self.arena.view.board[1 + i, :3] = 1 + i, 0, last
            opening = Opening(1 + i, self.keys[i], [(0, 0)] * 4, len(envelope.edited.taps))
            with collector.notifier.changed:
                collector._accept_openings(Opened(self.arena.name, [opening]))

    def end(self, n_completion: int) -> tuple[list[Any], list[Any]]:
        """Outputs, and their errors."""
        outputs = []
        for key in self.keys:
            choice = completion(0)
            choice.inspect_lens_ticket = Ticket(key, n_completion=n_completion)
            outputs.append(output(choice))
        return outputs, self.results.attach_each(outputs)


@pytest.mark.parametrize("n_completion", [1, 2, 4])
@pytest.mark.parametrize("is_prepared", [False, True])
def test_receipts_are_those_of_requests_taken_one_by_one(
    monkeypatch: pytest.MonkeyPatch, n_completion: int, is_prepared: bool
) -> None:
    receipts: list[list[Any]] = []
    for is_alone in (True, False):
        batch = Batch(list(ASKED.values()))
        with monkeypatch.context() as patch:
            if is_alone:
                patch.setattr(module, "told_of_edits", lambda pending, n_fed: {})
            else:
                collector = batch.results.the_collector()
                patch.setattr(collector, "take", None)
                if is_prepared:
                    batch.results.prepare(deque(batch.keys))
                    assert batch.results._expected["k0"].prepared is not None
            outputs, errors = batch.end(n_completion)
        assert errors == [None] * len(ASKED)
        assert not batch.results.the_collector().n_open
        receipts.append([one.inspect_lens for one in outputs])
    assert receipts[0] == receipts[1]
    n_fed = N_PROMPT + n_completion - 1
    found = dict(zip(ASKED, receipts[1], strict=True))
    assert found["two layers"].steer.n_tokens == n_fed
    assert found["the completion"].steer.n_tokens == n_completion - 1
    assert found["some"].steer.n_tokens == 2
    assert found["both"].steer.n_tokens == n_completion
    assert found["a vector"].steer.layers == (0,)


def test_one_that_was_not_steered_to_its_end_fails_alone() -> None:
    batch = Batch([ASKED["a vector"], ASKED["two layers"]])
    batch.arena.view.board[1, 2] = N_MAX - 1
    outputs, errors = batch.end(4)
    assert isinstance(errors[0], CaptureError)
    assert "must not be used" in str(errors[0])
    assert errors[1] is None
    assert outputs[1].inspect_lens.steer.n_tokens == N_MAX


def test_one_whose_row_became_too_large_fails_alone() -> None:
    batch = Batch([ASKED["a vector"], ASKED["two layers"]])
    batch.arena.view.board[2, COLUMN] = 1
    _, errors = batch.end(4)
    assert errors[0] is None
    assert "too large" in str(errors[1])


def test_one_that_ended_before_its_first_token_has_no_results() -> None:
    _, errors = Batch([ASKED["a vector"]]).end(0)
    assert "aborted" in str(errors[0])


def test_a_record_of_another_request_says_nothing() -> None:
    batch = Batch([ASKED["a vector"]])
    batch.arena.view.board[1, 0] = 77
    _, errors = batch.end(4)
    assert isinstance(errors[0], CaptureError)
