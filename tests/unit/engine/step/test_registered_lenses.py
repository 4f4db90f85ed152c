"""Steps whose requests name a tuned or a Jacobian lens: the formula, pieces, and faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens import LensRequest
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.protocol.messages import LENS, ROWS, SCORES
from inspect_lens._engine.readout import logit_lens
from inspect_lens._engine.readout.logit_lens import LensStore, Span, Translator
from inspect_lens._engine.step.request_stepper import RequestStepper
from inspect_lens.errors import CapacityError, SpecError
from inspect_lens.spec import EngineLens, as_tensor_data
from tests.kit.steps import HIDDEN, Worker, begin, exporter, rows, sealed

VOCAB = 40
RNG = np.random.default_rng(2)
WEIGHT = torch.from_numpy(RNG.standard_normal((HIDDEN, VOCAB), dtype=np.float32))
MATRIX = RNG.standard_normal((2, HIDDEN, HIDDEN), dtype=np.float32) / 4
BIAS = RNG.standard_normal((2, HIDDEN), dtype=np.float32)


def lens(kind: Any, matrix: Any = MATRIX) -> EngineLens:
    tensors = {"matrix": matrix} | ({"bias": BIAS} if kind == "tuned" else {})
    return EngineLens(kind=kind, n_layers=6, layers=(0, 2), tensors=tensors)


class Head:
    vocab, n_ranks = VOCAB, 1

    def say(self, text: str) -> list[str]:
        return [text]

    def logits(self, made: Callable[[], torch.Tensor]) -> torch.Tensor:
        return made() @ WEIGHT


class LensWorker(Worker):
    def __init__(self) -> None:
        super().__init__(exporter())
        self.stepper: RequestStepper = RequestStepper(self.state, self.stepper._exporter)
        self.stepper.head = Head()


@pytest.fixture
def worker() -> Iterator[LensWorker]:
    made = LensWorker()
    yield made
    made.stepper.close()


def asked(item: EngineLens, **more: Any) -> LensRequest:
    values = {"name": "x", "layers": "all", "top_k": 2, "tokens": [3]} | more
    request = LensRequest(lens=values)
    assert request.lens is not None
    return request.model_copy(update={"lens": item.entry.resolve(request.lens)})


def expected(item: EngineLens, number: int, layer: int, n: int) -> np.ndarray[Any, Any]:
    """Log-probabilities in float64, (tokens, vocabulary)."""
    stream = rows(number, layer, 0, n).double().numpy()
    if layer != 5:
        i = item.layers.index(layer)
        made = stream @ item.tensors["matrix"].to_float32()[i].astype(np.float64).T
        stream = stream + made + BIAS[i] if item.kind == "tuned" else made
    logits = torch.from_numpy(stream @ WEIGHT.double().numpy())
    return logits.log_softmax(dim=-1).numpy()


def check(collector: Collector, key: str, item: EngineLens, number: int, n: int) -> None:
    counts = {ROWS: 0, SCORES: 0, LENS: n}
    found = collector.take(key, counts=counts, n_fed=n, timeout_s=5).tensors[LENS].storage
    assert found.shape == (3, n, 6)
    for i, layer in enumerate((0, 2, 5)):
        truth = expected(item, number, layer, n)
        np.testing.assert_allclose(found[i, :, 2:4], -np.sort(-truth, axis=-1)[:, :2], atol=1e-4)
        np.testing.assert_allclose(found[i, :, 4], truth[:, 3], atol=1e-4)


@pytest.mark.parametrize("piece", [0, 5])
def test_rows_of_each_layer_are_translated_by_the_lens_of_their_request(
    worker: LensWorker, collector: Collector, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    if piece:  # whose borders lie inside of layers
        monkeypatch.setattr(logit_lens, "LOGIT_BYTES", piece * 4 * VOCAB)
    kinds = {"a": lens("tuned"), "b": lens("jacobian"), "c": lens("jacobian", MATRIX * 2)}
    for item in kinds.values():
        worker.stepper.lenses.add(item)
    for key, item in kinds.items():
        begin(worker, collector, key, sealed(collector, asked(item), 6, 4))
    plain = LensRequest(lens={"layers": [2], "tokens": [3], "top_k": 0})
    begin(worker, collector, "d", sealed(collector, plain, 4, 4))
    worker.step([("a", 1, 0, 6), ("b", 2, 0, 6), ("d", 4, 0, 4), ("c", 3, 0, 6)])
    for position in (6, 7):
        worker.step([(key, i + 1, position, 1) for i, key in enumerate("abc")])
    for i, (key, item) in enumerate(kinds.items()):
        check(collector, key, item, i + 1, 8)
    counts = {ROWS: 0, SCORES: 0, LENS: 4}
    found = collector.take("d", counts=counts, n_fed=4, timeout_s=5).tensors[LENS].storage
    truth = (rows(4, 2, 0, 4).double() @ WEIGHT.double()).log_softmax(-1)[:, 3]
    np.testing.assert_allclose(found[0, :, 0], truth, atol=1e-4)


def test_a_running_request_keeps_a_lens_that_is_removed(
    worker: LensWorker, collector: Collector
) -> None:
    item = lens("jacobian")
    worker.stepper.lenses.add(item)
    begin(worker, collector, "a", sealed(collector, asked(item), 6, 4))
    worker.step([("a", 1, 0, 6)])
    worker.stepper.lenses.remove(item.sha256)
    assert worker.stepper.lenses.nbytes == 0
    worker.step([("a", 1, 6, 1)])
    check(collector, "a", item, 1, 7)
    worker.stepper.remove("a")
    assert not worker.stepper._named
    begin(worker, collector, "b", sealed(collector, asked(item), 6, 4))
    worker.step([("b", 1, 0, 6)])
    with pytest.raises(SpecError, match="register it with this engine again"):
        check(collector, "b", item, 1, 6)


def test_rows_that_wait_for_one_product_are_read_when_their_request_is_pre_empted(
    worker: LensWorker, collector: Collector
) -> None:
    item = lens("jacobian")
    worker.stepper.lenses.add(item)
    begin(worker, collector, "a", sealed(collector, asked(item), 6, 20))
    worker.step([("a", 1, 0, 6)])
    for position in (6, 7, 8):
        worker.step([("a", 1, position, 1)])
    # Without `finish`: it may come back.
    worker.stepper.remove("a")
    assert not worker.stepper._named
    check(collector, "a", item, 1, 9)


@pytest.mark.parametrize(("dtype", "stored"), [("float16", np.float16), ("bfloat16", None)])
def test_tensors_of_16_bits_stay_so_and_are_multiplied_in_float32(dtype: str, stored: Any) -> None:
    kept = torch.from_numpy(MATRIX).to(getattr(torch, dtype))
    item = lens("jacobian", as_tensor_data(kept))
    translator = Translator(item, torch.device("cpu"))
    assert translator.nbytes == MATRIX.nbytes // 2
    stream = torch.from_numpy(RNG.standard_normal((7, HIDDEN), dtype=np.float32))
    found = translator(stream, [Span(2, 0, 3), Span(5, 3, 4), Span(0, 4, 7)])
    wide = kept.double()
    truth = torch.cat(
        [stream[:3].double() @ wide[1].T, stream[3:4], stream[4:].double() @ wide[0].T]
    )
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-5)
    half = translator(stream.bfloat16(), [Span(2, 0, 7)])
    assert half.dtype == torch.bfloat16
    truth = stream.bfloat16().double() @ wide[1].T
    torch.testing.assert_close(half.double(), truth, rtol=1e-2, atol=1e-2)


def test_lenses_on_the_device_have_a_budget() -> None:
    store = LensStore(torch.device("cpu"), most_bytes=int(1.5 * MATRIX.nbytes))
    first, second = lens("jacobian"), lens("jacobian", MATRIX * 2)
    store.add(first)
    store.add(first)
    with pytest.raises(CapacityError, match="INSPECT_LENS_LENS_BYTES"):
        store.add(second)
    store.remove(first.sha256)
    store.add(second)
    assert store.nbytes == MATRIX.nbytes
