"""Several front-ends, little memory, and requests that come back: nothing is mixed up or lost."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens import CaptureSpec, LensRequest, SteeringVector
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.protocol.messages import (
    ROWS,
    SCORES,
    Block,
    Failure,
    Message,
    Opened,
    seal,
)
from inspect_lens.errors import CapacityError, CaptureError
from inspect_lens.spec import EngineProbe, ProbeUse
from tests.kit.steps import (
    CAPTURE,
    FACTS,
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


@pytest.mark.parametrize("refused", [Opened, Block])
def test_a_front_end_that_takes_nothing_fails_its_own_requests_only(
    worker: Worker, collector: Collector, monkeypatch: pytest.MonkeyPatch, refused: type
) -> None:
    gone = Collector()
    keys = {gone: ["g0", "g1"], collector: ["h0", "h1"]}
    probe = EngineProbe(layers=(2,), tensors={"weight": np.ones((1, HIDDEN))})
    worker.stepper.probes.add(probe)
    both = LensRequest(capture=CAPTURE.capture, probes=(ProbeUse(name="p", positions="all"),))
    try:
        for request in (CAPTURE, both):
            for k in (0, 1):  # by turns, so that both share all blocks
                for owner, mine in keys.items():
                    mine[k] += "+"
                    envelope = seal(
                        request,
                        FACTS,
                        reply=owner.address,
                        n_prompt=4,
                        max_tokens=3,
                        probes={"p": probe},
                    )
                    begin(worker, owner, mine[k], envelope)
            original = worker.stepper._exporter._send

            def send(reply: str, message: Any, send: Any = original) -> bool:
                refuses = reply == gone.address and isinstance(message, refused)
                return False if refuses else bool(send(reply, message))

            monkeypatch.setattr(worker.stepper._exporter, "_send", send)
            alive = [(key, 1, 0, 4) for k in (0, 1) for key in (keys[gone][k], keys[collector][k])]
            worker.step(alive)
            assert worker.stepper.n_requests == 2
            worker.step([(key, 1, 4, 1) for key in keys[collector]])
            scores = 5 if request is both else 0
            for key in keys[collector]:
                counts = {ROWS: 5, SCORES: scores}
                got = collector.take(key, counts=counts, n_fed=5, timeout_s=5)
                expected = torch.stack([rows(1, layer, 0, 5) for layer in (0, 5)])
                np.testing.assert_array_equal(got.tensors[ROWS].storage, expected.numpy())
                worker.stepper.remove(key)
            for key in keys[gone]:
                with pytest.raises(CapacityError, match="took no rows"):
                    gone.take(key, counts=counts, n_fed=5, timeout_s=5)
    finally:
        gone.close()


def test_rows_of_a_request_that_failed_in_its_step_are_nobodys(
    worker: Worker, collector: Collector
) -> None:
    for key in ("i", "j"):
        begin(worker, collector, key, sealed(collector, CAPTURE, 4, 2))
    steps = worker.stepper
    steps.begin(["i", "j"], np.array([0, 4]), np.array([4, 4]), np.array([0, 0]))
    steps._fail("i", CaptureError("it failed"))
    steps.end_step("eager")
    worker.step([("j", 1, 4, 1)])
    collector.take("j", counts={ROWS: 5, SCORES: 0}, n_fed=5, timeout_s=5)
    steps.remove("j")


def test_a_front_end_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, channel = exporter(), Full()
    made._channels["ipc:///full"] = channel
    monkeypatch.setattr("inspect_lens._engine.export.transport._SEND_TIMEOUT_S", 0.2)
    waited = []
    for _ in range(3):
        made.send_failure("ipc:///full", Failure("k", "CaptureError", "it failed"))
        waited.append(channel.waits)
    assert waited[0] == waited[1] == waited[2] > 0
    made.close()


class Full:
    """A channel whose other end takes nothing."""

    waits = 0

    def put(self, data: bytes, message: Message) -> bool:
        return False

    def wait(self, seconds: float) -> None:
        self.waits += 1
        time.sleep(seconds)

    def is_alive(self) -> bool:
        return True

    def is_stopped(self) -> bool:
        return False

    def close(self) -> None:
        pass


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
    assert worker.stepper.arena.bytes_in_use == 0
    worker.stepper.close()


def test_named_positions_that_the_cache_already_had_are_confirmed(
    worker: Worker, collector: Collector
) -> None:
    vector = SteeringVector(
        activations=np.ones((1, HIDDEN)), layer_indices=[2], position_indices=[0, 3]
    )
    begin(worker, collector, "w", sealed(collector, LensRequest(edits=(vector,)), 6, 4))
    worker.step([("w", 1, 4, 2)])  # an equal request left the first four tokens, steered
    worker.step([("w", 1, 6, 1)])
    got = collector.take("w", counts={ROWS: 0, SCORES: 0}, n_fed=7, timeout_s=5)
    assert got.n_steered == 0
    worker.stepper.remove("w")


def test_a_pre_empted_request_that_is_added_again_is_one_request(
    worker: Worker, collector: Collector
) -> None:
    vector = SteeringVector(activations=np.ones((1, HIDDEN)), layer_indices=[2])
    envelope = sealed(collector, LensRequest(edits=(vector,), capture=CAPTURE.capture), 6, 4)
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
