"""Steps of a worker whose front-end is on another host: results are those of one host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from inspect_lens import CaptureSpec, LensRequest, SteeringVector
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.collect.placement import Collected
from inspect_lens._engine.export.transport import COLUMN, Copier, Exporter
from inspect_lens._engine.protocol.messages import BOARD_SIZE, ROWS, SCORES, ArenaWriter
from inspect_lens._engine.protocol.processes import Address, Links
from inspect_lens.errors import CaptureError, LensError, SpecError
from tests.kit.steps import HIDDEN, LAYERS, Worker, begin, exporter, rows, sealed
from tests.kit.waiting import until

LINKS = Links(address="127.0.0.1", key="a secret of two hosts", timeout_s=60.0)
N = 30
CAPTURE = CaptureSpec(layers=LAYERS)
STEER = (SteeringVector(activations=np.ones((1, HIDDEN)), layer_indices=[2]),)
COUNTS = {ROWS: N, SCORES: 0}


@pytest.fixture
def far() -> Iterator[Collector]:
    made = Collector(links=LINKS)
    yield made
    made.close()


def far_exporter(**changes: Any) -> Exporter:
    arena = ArenaWriter(1 << 20)
    links = Links(**{"key": LINKS.key, "timeout_s": LINKS.timeout_s, "host": "another", **changes})
    return Exporter(arena, Copier(arena), links)


@pytest.fixture
def far_worker() -> Iterator[Worker]:
    made = Worker(far_exporter())
    yield made
    made.stepper.close()


def run(worker: Worker, collector: Collector, key: str, request: LensRequest) -> Collected:
    begin(worker, collector, key, sealed(collector, request, N - 5, 6))
    worker.step([(key, 3, 0, N - 5)])
    for position in range(N - 5, N):
        worker.step([(key, 3, position, 1)])
    counts = COUNTS if request.capture else {ROWS: 0, SCORES: 0}
    try:
        return collector.take(key, counts=counts, n_fed=N, timeout_s=5)
    finally:
        worker.stepper.remove(key)


@pytest.mark.parametrize(
    "request_",
    [
        LensRequest(capture=CAPTURE),
        LensRequest(capture=CAPTURE, edits=STEER),
        LensRequest(edits=STEER),
        LensRequest(capture=CaptureSpec(layers=LAYERS, reduce="norm")),
    ],
    ids=["captured", "both", "steered", "norms"],
)
def test_results_are_those_of_one_host(
    far: Collector, far_worker: Worker, collector: Collector, request_: LensRequest
) -> None:
    here = Worker(exporter())
    try:
        expected = run(here, collector, "here", request_)
        found = run(far_worker, far, "far", request_)
    finally:
        here.stepper.close()
    assert found.n_steered == expected.n_steered == (N if request_.edits else 0)
    assert found.paths == expected.paths == ("eager",)
    assert found.tensors.keys() == expected.tensors.keys()
    for kind, tensor in found.tensors.items():
        np.testing.assert_array_equal(tensor.storage, expected.tensors[kind].storage)
    assert far.n_open == 0


def test_a_row_that_was_left_as_it_was_fails_its_request_however_late_it_is_noted(
    far: Collector, far_worker: Worker
) -> None:
    """A GPU's taps note it behind the steps; tokens have come by another way before."""
    begin(far_worker, far, "o", sealed(far, LensRequest(capture=CAPTURE, edits=STEER), N, 2))
    far_worker.step([("o", 3, 0, N)])
    stepper = far_worker.stepper
    number = stepper._live.by_key["o"].number
    time.sleep(0.3)
    stepper.arena.view.board[number % BOARD_SIZE, COLUMN] = 1
    with pytest.raises(SpecError, match="too large"):
        far.take("o", counts=COUNTS, n_fed=N, timeout_s=5)
    stepper.remove("o")


def test_a_worker_that_goes_fails_what_it_has_under_way_and_nothing_else(far: Collector) -> None:
    request = LensRequest(capture=CAPTURE)
    first, second = Worker(far_exporter()), Worker(far_exporter())
    ended: dict[str, LensError] = {}
    far.ends = ended.update
    for key, worker in (("lost", first), ("kept", second)):
        begin(worker, far, key, sealed(far, request, N, 2))
        worker.step([(key, 3, 0, 15)])
    assert until(lambda: all(p.shares for p in far._pending.values()))
    first.stepper.close()
    with pytest.raises(CaptureError, match="a worker on another host has gone"):
        far.take("lost", counts=COUNTS, n_fed=N, timeout_s=LINKS.timeout_s / 3)
    assert list(ended) == ["lost"]
    second.step([("kept", 3, 15, 15)])
    got = far.take("kept", counts=COUNTS, n_fed=N, timeout_s=5)
    expected = np.stack([rows(3, layer, 0, N).numpy() for layer in LAYERS])
    np.testing.assert_array_equal(got.tensors[ROWS].storage, expected)
    second.stepper.close()


def test_a_link_that_has_ended_is_made_anew_for_the_next_request(
    far: Collector, far_worker: Worker
) -> None:
    request = LensRequest(capture=CAPTURE)
    run(far_worker, far, "before", request)
    exporter_ = far_worker.stepper._exporter
    (link,) = exporter_._channels.values()
    link.close()
    got = run(far_worker, far, "after", request)
    assert got.tensors[ROWS].storage[1, 7, 1] == LAYERS[1]
    assert exporter_._channels[far.address] is not link
    # The front-end says so after it has taken the rows.
    assert until(lambda: far_worker.stepper.arena.bytes_in_use == 0)


def test_requests_that_were_judged_by_other_facts_fail_by_name(far: Collector) -> None:
    """On a worker of the same host, too: it is the engine that must be the same."""
    worker = Worker(far_exporter(facts="ours"))
    envelope = sealed(far, LensRequest(capture=CAPTURE), N, 2)
    theirs = Address.unpack(far.address)
    reply = Address(theirs.local, theirs.host, theirs.remote, "theirs").pack()
    far.open("k", envelope)
    worker.stepper.add("k", {**envelope.pack(), "reply": reply})
    worker.step([("k", 3, 0, N)])
    with pytest.raises(LensError, match="different INSPECT_LENS"):
        far.take("k", counts=COUNTS, n_fed=N, timeout_s=5)
    worker.stepper.close()


def test_processes_of_one_host_share_memory_also_where_others_are_far(far: Collector) -> None:
    worker = Worker(far_exporter(host=""))
    run(worker, far, "near", LensRequest(capture=CAPTURE))
    assert not far.listener._workers  # type: ignore[union-attr]
    worker.stepper.close()
