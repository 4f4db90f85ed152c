"""Steps whose requests splice an autoencoder in: rows, neighbours, and steps that replay graphs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from inspect_lens import LensRequest
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.protocol.messages import LENS, ROWS, SCORES
from inspect_lens._engine.step.request_stepper import RequestStepper
from inspect_lens.errors import LensError
from inspect_lens.sae import SparseAutoencoder
from inspect_lens.spec import Splice
from tests.kit.edit_cases import random_rows
from tests.kit.steps import HIDDEN, Worker, begin, exporter, rows, sealed

SAE = SparseAutoencoder(
    weight=random_rows(1, 20, HIDDEN),
    bias=random_rows(2, 1, 20)[0],
    decoder=random_rows(3, 20, HIDDEN),
    decoder_bias=random_rows(4, 1, HIDDEN)[0],
)
FORM = SAE.for_engine()


class SplicingWorker(Worker):
    def __init__(self) -> None:
        super().__init__(exporter())
        self.stepper: RequestStepper = RequestStepper(self.state, self.stepper._exporter)
        self.stepper.lenses.add(FORM)


@pytest.fixture
def worker() -> Iterator[SplicingWorker]:
    made = SplicingWorker()
    yield made
    made.stepper.close()


def asking(**options: object) -> LensRequest:
    edit = Splice.model_validate({"sae": "s", "layers": [2], **options}).resolved(FORM.entry)
    return LensRequest(edits=[edit], capture={"layers": [0, 2]})


def taken(collector: Collector, key: str, n: int) -> np.ndarray:
    counts = {ROWS: n, SCORES: 0, LENS: 0}
    found = collector.take(key, counts=counts, n_fed=n, timeout_s=5).tensors[ROWS].storage
    return np.asarray(found)


def made_of(number: int, n: int) -> np.ndarray:
    return SAE.reconstruct(rows(number, 2, 0, n).numpy())


def test_rows_of_prompt_and_answer_are_replaced_and_neighbours_keep_their_bits(
    worker: SplicingWorker, collector: Collector
) -> None:
    begin(worker, collector, "a", sealed(collector, asking(), 6, 4))
    begin(worker, collector, "b", sealed(collector, asking(positions="prompt"), 5, 4))
    plain = LensRequest(capture={"layers": [0, 2]})
    begin(worker, collector, "c", sealed(collector, plain, 4, 4))
    assert worker.stepper.replays_none({"a"})
    assert not worker.stepper.replays_none({"c"})
    worker.step([("a", 1, 0, 4), ("b", 2, 0, 5), ("c", 3, 0, 4)])
    # The rest of a prompt that came in chunks, then the same step again and again.
    worker.step([("a", 1, 4, 2), ("b", 2, 5, 1), ("c", 3, 4, 1)])
    for i in range(2):
        worker.step([("a", 1, 6 + i, 1), ("b", 2, 6 + i, 1), ("c", 3, 5 + i, 1)])
    assert worker.stepper.replays_none({"a", "c"})
    assert not worker.stepper.replays_none({"b", "c"}), "it is past its prompt"
    found = taken(collector, "a", 8)
    assert np.array_equal(found[0], rows(1, 0, 0, 8))
    np.testing.assert_allclose(found[1], made_of(1, 8), rtol=1e-4, atol=1e-4)
    found = taken(collector, "b", 8)
    np.testing.assert_allclose(found[1, :5], made_of(2, 5), rtol=1e-4, atol=1e-4)
    assert np.array_equal(found[1, 5:], rows(2, 2, 5, 3))
    found = taken(collector, "c", 7)
    assert np.array_equal(found[1], rows(3, 2, 0, 7))
    for key in "abc":
        worker.stepper.finish([key])
        worker.stepper.remove(key)
    assert not worker.stepper.replays_none("abc")
    assert not worker.stepper.is_watching
    assert worker.stepper.rows_in_use == 0


def test_a_step_that_replayed_a_graph_fails_those_who_asked_and_nobody_else(
    worker: SplicingWorker, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(worker, collector, "a", sealed(collector, asking(), 4, 4))
    plain = LensRequest(capture={"layers": [0, 2]})
    begin(worker, collector, "c", sealed(collector, plain, 4, 4))
    monkeypatch.setattr("inspect_lens._engine.tap.op._splice", lambda *args: False)
    worker.step([("a", 1, 0, 4), ("c", 3, 0, 4)])
    with pytest.raises(LensError, match="the autoencoder did not run: a step replayed a graph"):
        taken(collector, "a", 4)
    assert np.array_equal(taken(collector, "c", 4)[1], rows(3, 2, 0, 4))
    # Other ranks may go on with it, so this one decides as they do until it is over.
    assert worker.stepper.replays_none({"a"})
    worker.stepper.remove("a")
    assert not worker.stepper.replays_none({"a"})


def test_what_goes_wrong_in_a_product_fails_its_request_with_the_reason(
    worker: SplicingWorker, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    begin(worker, collector, "a", sealed(collector, asking(), 4, 4))
    monkeypatch.setattr("inspect_lens._engine.tap.splice.Splice.step", broken)
    worker.step([("a", 1, 0, 4)])
    with pytest.raises(LensError, match="did not run: no memory left"):
        taken(collector, "a", 4)


def test_an_autoencoder_that_a_worker_does_not_know_is_named(
    worker: SplicingWorker, collector: Collector
) -> None:
    worker.stepper.lenses.remove(FORM.sha256)
    begin(worker, collector, "a", sealed(collector, asking(), 4, 4))
    worker.step([("a", 1, 0, 4)])
    with pytest.raises(LensError, match=f"edits: {FORM.sha256[:12]} removed or replaced"):
        taken(collector, "a", 4)
