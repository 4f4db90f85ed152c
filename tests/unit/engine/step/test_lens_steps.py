"""Steps whose requests ask for a logit lens: the right rows, bounded pieces, and faults."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens import LensRequest
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.protocol.messages import LENS, ROWS, SCORES
from inspect_lens._engine.readout import logit_lens
from inspect_lens._engine.step.request_stepper import RequestStepper
from inspect_lens.errors import CaptureError, LensError, UnsupportedError
from tests.kit.steps import HIDDEN, Worker, begin, exporter, rows, sealed

VOCAB = 40
WEIGHT = torch.randn(HIDDEN, VOCAB, generator=torch.Generator().manual_seed(1))


class Head:
    """An unembedding without a norm."""

    vocab, n_ranks = VOCAB, 1

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.fails_at: int | None = None

    def say(self, text: str) -> list[str]:
        return [text]

    def logits(self, made: Callable[[], torch.Tensor]) -> torch.Tensor:
        found = made()
        self.sizes.append(len(found))
        if self.fails_at == len(self.sizes):
            raise MemoryError("no memory for logits")
        return found @ WEIGHT


class LensWorker(Worker):
    def __init__(self, head: Any, rank: int = 0) -> None:
        super().__init__(exporter())
        self.stepper: RequestStepper = RequestStepper(self.state, self.stepper._exporter, rank=rank)
        self.stepper.head = head


@pytest.fixture
def head() -> Head:
    return Head()


@pytest.fixture
def reader(head: Head) -> Iterator[LensWorker]:
    made = LensWorker(head)
    yield made
    made.stepper.close()


def test_how_rows_are_read_is_known_with_the_model_and_not_with_a_request(
    reader: LensWorker,
) -> None:
    stepper = reader.stepper
    assert stepper._sender.read is not None
    assert stepper._sender.rows_read > 1


def asked(**lens: Any) -> LensRequest:
    return LensRequest(lens={"layers": [0, 5], "top_k": 3, "tokens": [2, 39], **lens})


def take(collector: Collector, key: str, n: int, n_fed: int, captured: int = 0) -> Any:
    counts = {ROWS: captured, SCORES: 0, LENS: n}
    return collector.take(key, counts=counts, n_fed=n_fed, timeout_s=5)


def check(numbers: Any, number: int, positions: range, layers: tuple[int, ...] = (0, 5)) -> None:
    assert numbers.shape == (len(layers), len(positions), 10)
    for tap, layer in enumerate(layers):
        stream = rows(number, layer, positions.start, len(positions)).double()
        logprobs = (stream @ WEIGHT.double()).log_softmax(dim=-1).numpy()
        found = numbers.storage[tap]
        best = -np.sort(-logprobs, axis=-1)[:, :3]
        np.testing.assert_allclose(found[:, 3:6], best, atol=1e-4)
        np.testing.assert_allclose(found[:, 6:8], logprobs[:, [2, 39]], atol=1e-4)


def test_chunks_and_single_tokens_are_read_at_their_positions(
    reader: LensWorker, collector: Collector, head: Head
) -> None:
    begin(reader, collector, "a", sealed(collector, asked(), 10, 8))
    reader.step([("x", 9, 0, 3), ("a", 1, 0, 6)])
    reader.step([("a", 1, 6, 4), ("x", 9, 3, 1)])
    for position in range(10, 16):  # steps that repeat
        reader.step([("a", 1, position, 1), ("x", 9, position - 6, 1)])
    check(take(collector, "a", 16, 16).tensors[LENS], 1, range(16))
    # Steps that repeat wait for one product, and the last ones less: clients wait for them.
    assert head.sizes == [12, 8, 2, 6, 4]
    reader.stepper.remove("a")
    reader.step([("x", 9, 10, 1)])
    assert len(head.sizes) == 5  # nothing is done where nobody asks


def test_requests_of_several_forms_and_front_ends_get_their_own(
    reader: LensWorker, collector: Collector
) -> None:
    other = Collector()
    both = LensRequest(
        capture={"layers": [2]}, lens={"layers": [0, 5], "top_k": 3, "tokens": [2, 39],
        "positions": "completion"},
    )  # fmt: skip
    try:
        begin(reader, collector, "a", sealed(collector, asked(), 6, 8))
        begin(reader, other, "b", sealed(other, asked(layers=[2]), 4, 8))
        begin(reader, collector, "c", sealed(collector, both, 3, 8))
        begin(reader, collector, "d", sealed(collector, asked(positions=[1, 4]), 6, 8))
        reader.step([("a", 1, 0, 6), ("b", 2, 0, 4), ("c", 3, 0, 3), ("d", 4, 0, 6)])
        for i in range(5):
            reader.step([("c", 3, 3 + i, 1), ("b", 2, 4 + i, 1), ("a", 1, 6 + i, 1)])
        reader.stepper.finish(["a", "b", "c", "d"])
        check(take(collector, "a", 11, 11).tensors[LENS], 1, range(11))
        check(take(other, "b", 9, 9).tensors[LENS], 2, range(9), (2,))
        got = take(collector, "c", 5, 8, captured=8)
        check(got.tensors[LENS], 3, range(3, 8))
        np.testing.assert_array_equal(got.tensors[ROWS].storage[0], rows(3, 2, 0, 8).numpy())
        named = take(collector, "d", 2, 6).tensors[LENS]
        check(type(named)(named.storage[:, :1], "float32"), 4, range(1, 2))
        check(type(named)(named.storage[:, 1:], "float32"), 4, range(4, 5))
    finally:
        other.close()


def test_logits_are_made_in_pieces(
    reader: LensWorker, collector: Collector, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logit_lens, "LOGIT_BYTES", 5 * 4 * VOCAB)
    begin(reader, collector, "a", sealed(collector, asked(), 9, 4))
    reader.step([("a", 1, 0, 9)])
    assert head.sizes == [5, 5, 5, 3]
    check(take(collector, "a", 9, 9).tensors[LENS], 1, range(9))


def test_no_more_steps_wait_than_one_product_takes(
    reader: LensWorker, collector: Collector, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logit_lens, "LOGIT_BYTES", 5 * 4 * VOCAB)
    begin(reader, collector, "a", sealed(collector, asked(positions=[0, 4, 5, 7, 9]), 3, 12))
    begin(reader, collector, "b", sealed(collector, LensRequest(capture={"layers": [2]}), 3, 12))
    reader.step([("a", 1, 0, 3), ("b", 2, 0, 3)])
    for position in range(3, 14):
        reader.step([("a", 1, position, 1), ("b", 2, position, 1)])
    numbers = take(collector, "a", 5, 14).tensors[LENS]
    for i, position in enumerate([0, 4, 5, 7, 9]):
        one = type(numbers)(numbers.storage[:, i : i + 1], "float32")
        check(one, 1, range(position, position + 1))
    assert head.sizes[0] == 2
    assert max(head.sizes) <= 5
    got = collector.take("b", counts={ROWS: 14, SCORES: 0}, n_fed=14, timeout_s=5)
    np.testing.assert_array_equal(got.tensors[ROWS].storage[0], rows(2, 2, 0, 14).numpy())


def test_a_fault_fails_those_who_asked_and_nobody_else(
    reader: LensWorker, collector: Collector, head: Head
) -> None:
    capture = LensRequest(capture={"layers": [2]})
    begin(reader, collector, "a", sealed(collector, asked(), 5, 4))
    begin(reader, collector, "b", sealed(collector, capture, 4, 4))
    head.fails_at = 1
    reader.step([("a", 1, 0, 5), ("b", 2, 0, 4)])
    reader.step([("a", 1, 5, 1), ("b", 2, 4, 1)])
    with pytest.raises(CaptureError, match="no memory for logits"):
        take(collector, "a", 6, 6)
    got = collector.take("b", counts={ROWS: 5, SCORES: 0}, n_fed=5, timeout_s=5)
    np.testing.assert_array_equal(got.tensors[ROWS].storage[0], rows(2, 2, 0, 5).numpy())
    assert reader.stepper.is_watching
    reader.stepper.finish(["a", "b"])
    reader.stepper.remove("a")
    reader.stepper.remove("b")
    assert not reader.stepper.is_watching


def test_a_model_whose_head_is_not_known_is_refused_by_name(
    reader: LensWorker, collector: Collector
) -> None:
    reader.stepper.head, reader.stepper.no_head = None, "the final norm of Odd is not known"
    begin(reader, collector, "a", sealed(collector, asked(), 5, 4))
    reader.step([("a", 1, 0, 5)])
    with pytest.raises(UnsupportedError, match="final norm of Odd"):
        take(collector, "a", 5, 5)


class Meeting:
    """Gives both ranks what both have brought; one that does not come breaks it for the other."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=60)
        self.brought: dict[int, Any] = {}

    def of(self, rank: int, value: Any) -> list[Any]:
        self.brought[rank] = value
        self.barrier.wait()
        found = [self.brought[0], self.brought[1]]
        self.barrier.wait()
        return found


class HalfHead(Head):
    """Half of the vocabulary."""

    n_ranks = 2

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__()
        self.meeting, self.rank = meeting, rank

    def say(self, text: str) -> list[str]:
        return self.meeting.of(self.rank, text)

    def logits(self, made: Callable[[], torch.Tensor]) -> torch.Tensor:
        part: Any = None
        try:
            half = VOCAB // 2
            found = made()
            self.sizes.append(len(found))
            if self.fails_at == len(self.sizes):
                raise MemoryError("no memory for logits")
            part = found @ WEIGHT[:, self.rank * half : (self.rank + 1) * half]
        finally:
            parts = self.meeting.of(self.rank, part)
        if any(one is None for one in parts):
            raise LensError("another rank could not take part")
        return torch.cat(parts, dim=1)


def on_both(workers: list[LensWorker], parts: list[tuple[str, int, int, int]]) -> None:
    threads = [threading.Thread(target=worker.step, args=(parts,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("case", ["well", "dropped", "memory"])
def test_ranks_meet_or_none_of_them_does(collector: Collector, case: str) -> None:
    meeting = Meeting()
    heads = [HalfHead(meeting, rank) for rank in range(2)]
    workers = [LensWorker(half, rank) for rank, half in enumerate(heads)]
    sent: list[Any] = []
    workers[1].stepper._sender._export = lambda *what: sent.append(what)  # type: ignore[method-assign]
    try:
        both = LensRequest(capture={"layers": [2]}, lens=asked(positions="completion").lens)
        begin(workers[0], collector, "a", sealed(collector, asked(), 6, 8))
        begin(workers[0], collector, "b", sealed(collector, both, 6, 8))
        for key, request in (("a", asked()), ("b", both)):
            envelope = sealed(collector, request, 6, 8)
            workers[1].stepper.add(key, dict(envelope.pack()))
        on_both(workers, [("b", 2, 0, 6), ("a", 1, 0, 6)])
        if case == "dropped":
            # One rank alone knows that a front-end takes nothing any more.
            workers[0].stepper._fail("b", CaptureError("dropped"))
        if case == "memory":
            heads[1].fails_at = 2
        on_both(workers, [("b", 2, 6, 1), ("a", 1, 6, 1)])
        if case == "well":
            check(take(collector, "a", 7, 7).tensors[LENS], 1, range(7))
            check(take(collector, "b", 1, 7, captured=7).tensors[LENS], 2, range(6, 7))
        else:
            with pytest.raises(LensError):
                take(collector, "a", 7, 7)
            assert all(not w.stepper._live.by_key for w in workers)
        assert heads[0].sizes == heads[1].sizes or case == "memory"
        assert not sent, "the first rank sends for all"
    finally:
        for worker in workers:
            worker.stepper.close()
