"""What readouts take of a device: weights as long as they are used, and a bounded amount beside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inspect_lens import LensRequest, SteeringVector
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.protocol.messages import ROWS, SCORES, seal
from inspect_lens._engine.readout import readers
from inspect_lens._engine.readout.readers import ProbeReader, ProbeStore
from inspect_lens.errors import SpecError
from inspect_lens.spec import EngineProbe, TapPoint
from tests.kit.steps import FACTS, HIDDEN, Worker, begin

RNG = np.random.default_rng(0)
CPU = torch.device("cpu")


def linear(*layers: int, hidden: int = HIDDEN) -> EngineProbe:
    return EngineProbe(layers=layers, tensors={"weight": RNG.normal(size=(len(layers), hidden))})


def mlp(*layers: int, hidden: int = HIDDEN) -> EngineProbe:
    shapes = {"w1": (len(layers), 3, hidden), "b1": (3,), "w2": (3,), "b2": ()}
    tensors = {name: np.asarray(RNG.normal(size=shape)) for name, shape in shapes.items()}
    return EngineProbe(kind="mlp", layers=layers, tensors=tensors)


def taps(*layers: int) -> tuple[TapPoint, ...]:
    return tuple(TapPoint("resid_post", layer) for layer in layers)


def start(worker: Worker, collector: Collector, key: str, probe: EngineProbe, **more: Any) -> None:
    request = LensRequest(probes=[{"name": "p", "positions": "all"}], **more)
    envelope = seal(
        request, FACTS, reply=collector.address, n_prompt=4, max_tokens=2, probes={"p": probe}
    )
    begin(worker, collector, key, envelope)


def score(worker: Worker, collector: Collector, key: str) -> Any:
    worker.step([(key, 1, 0, 4)])
    got = collector.take(key, counts={ROWS: 0, SCORES: 4}, n_fed=4, timeout_s=5)
    worker.stepper.remove(key)
    return got.tensors[SCORES].storage


def test_probes_that_come_and_go_leave_nothing_on_the_device(
    worker: Worker, collector: Collector
) -> None:
    store, groups = worker.stepper.probes, worker.stepper._groups
    for i in range(20):
        probe = linear(0, 5)
        store.add(probe)
        start(worker, collector, f"m{i}", probe)
        score(worker, collector, f"m{i}")
        store.remove(probe.sha256)
        assert (store.nbytes, len(groups)) == (0, 0)
    assert len(groups.taps) == 1, "numbers are used again"


def test_a_running_request_keeps_the_weights_of_a_probe_that_was_removed(
    worker: Worker, collector: Collector
) -> None:
    first, second = linear(0, 5), linear(2)
    for key, probe in (("n0", first), ("n1", second)):
        worker.stepper.probes.add(probe)
        start(worker, collector, key, probe)
    worker.stepper.take_up()
    worker.stepper.probes.remove(first.sha256)
    assert worker.stepper.probes.nbytes == 3 * HIDDEN * 4
    found = score(worker, collector, "n0")
    expected = torch.zeros(4, HIDDEN)
    weight = first.tensors["weight"].to_float32()
    truth = np.zeros(4)
    for row, layer in zip(weight, (0, 5), strict=True):
        expected[:, 0], expected[:, 1], expected[:, 2] = 1, layer, torch.arange(4)
        truth += expected.double().numpy() @ row
    assert found.shape == (1, 4, 1)
    np.testing.assert_allclose(found[0, :, 0], truth, rtol=1e-5)
    assert worker.stepper.probes.nbytes == HIDDEN * 4
    score(worker, collector, "n1")
    assert len(worker.stepper._groups) == 0


def test_of_weights_that_nobody_uses_the_last_used_are_kept() -> None:
    probes = [linear(0) for _ in range(4)]
    store = ProbeStore(CPU, kept_bytes=2 * HIDDEN * 4)
    for probe in probes:
        store.add(probe)

    def use(i: int) -> int:
        return id(store.readout((probes[i].sha256,), taps(0)))

    held = store.readout((probes[0].sha256,), taps(0))
    use(1)
    second = use(2)
    use(1)
    assert store.nbytes == 3 * HIDDEN * 4, "two are kept and one is held"
    assert use(0) == id(held), "what is in use is not made twice"
    del held
    use(3)
    assert store.nbytes == 2 * HIDDEN * 4
    del second
    store.remove(probes[3].sha256)
    assert store.nbytes == HIDDEN * 4


def test_a_request_that_cannot_be_taken_up_gives_everything_back(
    worker: Worker, collector: Collector
) -> None:
    vector = SteeringVector(activations=np.ones((1, HIDDEN)), layer_indices=[2])
    start(worker, collector, "o", linear(2), edits=(vector,))
    worker.stepper.take_up()
    with pytest.raises(SpecError, match="removed or replaced"):
        collector.take("o", counts={ROWS: 0, SCORES: 4}, n_fed=4, timeout_s=5)
    stepper = worker.stepper
    assert (stepper.n_requests, stepper.rows_in_use, len(stepper._groups)) == (0, 0, 0)


class Largest(TorchDispatchMode):
    """Bytes of the largest piece of memory that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Views are of memory that was there.
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.nbytes = max(self.nbytes, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("ranks", [(0, 1, 2), (1, 2, 3), (0, 2, 5), (1, 2, 4), None])
def test_the_memory_of_a_readout_is_bounded_in_bytes(
    monkeypatch: pytest.MonkeyPatch, ranks: Any
) -> None:
    bound = 1 << 20
    monkeypatch.setattr(readers, "READOUT_BYTES", bound)
    hidden = 64
    x = torch.randn(3 if ranks is None else 6, 15_000, hidden).bfloat16()
    probes = [linear(0, 2, 5, hidden=hidden), mlp(0, 5, hidden=hidden)]
    readout = ProbeReader(probes, taps(0, 2, 5), CPU)
    with Largest() as largest:
        found = readout(x, ranks)
    assert found.shape == (1, 15_000, 2)
    assert largest.nbytes <= max(bound, found.nbytes), "as bfloat16 the rows of a tap are 2 MB"
    part = x if ranks is None else x[list(ranks)]
    expected = ProbeReader(probes, taps(0, 2, 5), CPU)(part.float())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 3, 5, 7, 10, 15, 1000])
def test_some_steps_are_read_as_each_of_them_is(chunk: int) -> None:
    """In parts of a step, in steps, and in unequal shares of six; as views of a longer round."""
    x = torch.randn(3, 8, 5, HIDDEN)[:, 1:7]
    probes = [linear(0, 5), mlp(0, 2)]
    whole = ProbeReader(probes, taps(0, 2, 5), CPU)
    expected = torch.cat([whole(x[:, step].contiguous()) for step in range(6)], dim=1)
    readout = ProbeReader(probes, taps(0, 2, 5), CPU)
    readout.chunk = chunk
    found = readout(x)
    assert found.shape == (1, 30, 2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_rows_of_any_width_are_read() -> None:
    """64 tokens of a very wide tap are more than the bound."""
    probe = linear(*range(4), hidden=1 << 18)
    readout = ProbeReader([probe], taps(*range(4)), CPU)
    assert readout.chunk == 64
    x = torch.randn(4, 66, 1 << 18)
    weight = torch.from_numpy(probe.tensors["weight"].to_float32().copy()).double()
    expected = torch.einsum("lth,lh->t", x.double(), weight)[None]
    # The sizes of what is summed tell the error of the sum.
    sizes = torch.einsum("lth,lh->t", x.double().abs(), weight.abs())[None]
    assert ((readout(x)[..., 0] - expected).abs() <= 1e-6 * sizes).all()
