"""Reductions one by one: what leaves the device, who shares a step, how numbers are rounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from inspect_lens import CaptureSpec, LensRequest
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.export.transport import Copier, Exporter
from inspect_lens._engine.protocol import readouts
from inspect_lens._engine.protocol.messages import ROWS, SCORES, ArenaWriter, seal
from inspect_lens._engine.protocol.readouts import narrowed, seal_capture
from inspect_lens.errors import CaptureError
from inspect_lens.spec import EngineProbe, ProbeUse, Reduction
from tests.kit.cases import DTYPES, KEYS, Case, checked, compare, noise
from tests.kit.steps import FACTS, HIDDEN, LAYERS, Worker, begin, exporter, sealed


class Copied(Copier):
    """Counts the bytes that leave the device."""

    n_bytes = 0

    def copy(self, rows: torch.Tensor, offset: int, seq: int, dtype: torch.dtype) -> None:
        self.n_bytes += rows.numel() * dtype.itemsize
        super().copy(rows, offset, seq, dtype)


@pytest.mark.parametrize(
    ("spec", "n_bytes"),
    [
        ({"reduce": "mean", "positions": "prompt"}, 2 * HIDDEN * 4),
        ({"reduce": "max", "positions": "prompt"}, 2 * HIDDEN * 4),
        ({"reduce": "max", "positions": "prompt", "dtype": "float16"}, 2 * HIDDEN * 2),
        ({"reduce": "last", "positions": "prompt"}, HIDDEN * 4),
        ({"reduce": "norm"}, 24 * 4),
        ({"reduce": "none", "positions": "prompt", "dtype": "bfloat16"}, 20 * HIDDEN * 2),
        # Of the tokens that were sampled any may be the last one, or none of the result.
        ({"reduce": "mean"}, (2 + 4) * HIDDEN * 4),
        ({"positions": "last"}, (1 + 4) * HIDDEN * 4),
        ({"phase": "prefill", "positions": "last"}, HIDDEN * 4),
    ],
)
def test_only_what_was_asked_for_leaves_the_device(
    collector: Collector, spec: dict[str, Any], n_bytes: int
) -> None:
    arena = ArenaWriter(1 << 20)
    copier = Copied(arena)
    worker = Worker(Exporter(arena, copier), make=noise)
    capture = CaptureSpec(layers=(0,), **spec)
    key = f"r{next(KEYS)}"
    begin(worker, collector, key, sealed(collector, LensRequest(capture=capture), 20, 5))
    for first, n in ((0, 12), (12, 8), (20, 1), (21, 1), (22, 1), (23, 1)):
        worker.step([(key, 1, first, n)])
    assert copier.n_bytes == n_bytes
    worker.stepper.close()


class Deviation(Reduction):
    """The standard deviation, as somebody might add it: two numbers of each are sent."""

    combine = "sum"

    def columns(self, hidden: int) -> int:
        return 2 * hidden

    def on_device(self, torch: Any, rows: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.cat((rows.double(), rows.double() ** 2), dim=-1)
        return made.float()

    def finish(self, combined: Any, n: int) -> Any:
        mean, squares = np.split(combined / n, 2)
        return np.sqrt(np.maximum(squares - mean**2, 0))


@pytest.mark.parametrize("where", ["all", "last"])
def test_a_new_reduction_may_send_more_numbers_than_its_result_has(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(readouts, "REDUCTIONS", {**readouts.REDUCTIONS, "mean": Deviation()})
    # A worker of its own: it keeps what it makes of equal requests.
    worker, key = Worker(exporter(), make=noise), f"r{next(KEYS)}"
    request = LensRequest(capture=CaptureSpec(layers=LAYERS, reduce="mean", positions=where))
    envelope = sealed(collector, request, 6, 3)
    assert envelope.capture is not None
    begin(worker, collector, key, envelope)
    for first, n in ((0, 4), (4, 2), (6, 1), (7, 1)):
        worker.step([(key, 1, first, n)])
    counts = {ROWS: len(envelope.capture.fed(8)), SCORES: 0}
    got = collector.take(key, counts=counts, n_fed=8, timeout_s=10).tensors[ROWS]
    rows = torch.stack([noise(1, layer, 0, 8) for layer in LAYERS]).double()
    wanted = rows.std(dim=1, keepdim=True, correction=0)
    assert envelope.capture.n_bytes(8) == got.nbytes
    np.testing.assert_allclose(
        got.to_float32(), wanted if where == "all" else 0 * wanted, rtol=1e-3, atol=2e-3
    )
    worker.stepper.close()


def test_a_worker_that_forgot_a_request_reduces_it_again_from_the_start(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inspect_lens._engine.export.transport._MOST_AWAY", 0)
    worker = Worker(exporter(), make=noise)
    case = Case({"reduce": "mean", "positions": "prompt"}, 10, 1, [5], [], 0, 0)
    envelope = sealed(collector, checked(case) or LensRequest(), 10, 1)
    key = f"r{next(KEYS)}"
    begin(worker, collector, key, envelope)
    for first, n in ((0, 3), (3, 4)):
        worker.step([(key, 1, first, n)])
    worker.stepper.remove(key)
    worker.stepper.add(key, envelope.pack())
    worker.step([(key, 1, 0, 4)])
    with pytest.raises(CaptureError, match="18 of 30"):
        collector.take(key, counts={ROWS: 10, SCORES: 0}, n_fed=10, timeout_s=1)
    collector.open(key, envelope)
    worker.stepper.remove(key)
    worker.stepper.add(key, envelope.pack())
    for first, n in ((0, 4), (4, 6)):
        worker.step([(key, 1, first, n)])
    got = collector.take(key, counts={ROWS: 10, SCORES: 0}, n_fed=10, timeout_s=10)
    compare(got.tensors[ROWS], case, 1, "float32")
    worker.stepper.close()


def test_another_request_under_a_used_key_starts_from_nothing(
    noisy: dict[str, Worker], collector: Collector
) -> None:
    worker, key = noisy["float32"], f"r{next(KEYS)}"
    for number, n_prompt in ((1, 4), (2, 9)):
        case = Case({"reduce": "mean"}, n_prompt, 1, [5], [], 0, 0)
        begin(
            worker, collector, key, sealed(collector, checked(case) or LensRequest(), n_prompt, 1)
        )
        worker.step([(key, number, 0, n_prompt)])
        counts = {ROWS: n_prompt, SCORES: 0}
        got = collector.take(key, counts=counts, n_fed=n_prompt, timeout_s=10)
        compare(got.tensors[ROWS], case, number, "float32")
        worker.stepper.remove(key)


def test_requests_of_several_front_ends_and_forms_share_a_step(noisy: dict[str, Worker]) -> None:
    worker, ends = noisy["float32"], (Collector(), Collector())
    specs: list[dict[str, Any]] = [{"reduce": "mean"}, {"reduce": "mean"}, {"reduce": "norm"}, {}]
    asked = [Case(s, 6 + i, 3, [6], [], 0, 0) for i, s in enumerate(specs)]
    keys = [f"r{next(KEYS)}" for _ in asked]
    for i, (key, case) in enumerate(zip(keys, asked, strict=True)):
        end = ends[i % 2]
        begin(worker, end, key, sealed(end, checked(case) or LensRequest(), case.n_prompt, 3))
    for first, n in ((0, 4), (4, 5)):
        worker.step([(key, i, first, n) for i, key in enumerate(keys)])
    for i, (key, case) in enumerate(zip(keys, asked, strict=True)):
        if (left := case.n_fed - 9) > 0:
            worker.step([(key, i, 9, left)])
        got = ends[i % 2].take(
            key, counts={ROWS: case.n_fed, SCORES: 0}, n_fed=case.n_fed, timeout_s=10
        )
        compare(got.tensors[ROWS], case, i, "float32")
        worker.stepper.remove(key)
    for end in ends:
        end.close()


def test_a_reduced_capture_beside_a_probe(noisy: dict[str, Worker], collector: Collector) -> None:
    worker = noisy["float32"]
    weight = np.ones((1, HIDDEN), dtype=np.float32)
    probe = EngineProbe(layers=(2,), tensors={"weight": weight, "bias": np.float32(0)})
    worker.stepper.probes.add(probe)
    case = Case({"reduce": "max", "positions": [1, 3, 4, 8]}, 7, 3, [4], [], 0, 0)
    request = LensRequest(
        capture=CaptureSpec(layers=LAYERS, **case.spec),
        probes=(ProbeUse(name="p", positions="all"),),
    )
    envelope = seal(
        request, FACTS, reply=collector.address, n_prompt=7, max_tokens=3, probes={"p": probe}
    )
    key = f"r{next(KEYS)}"
    begin(worker, collector, key, envelope)
    for first, n in ((0, 4), (0, 5), (5, 2), (7, 1), (8, 1)):
        worker.step([(key, 3, first, n)])
    got = collector.take(key, counts={ROWS: 4, SCORES: 9}, n_fed=9, timeout_s=10)
    compare(got.tensors[ROWS], case, 3, "float32")
    expected = noise(3, 2, 0, 9).sum(dim=1).numpy()
    np.testing.assert_allclose(got.tensors[SCORES].storage[0, :, 0], expected, atol=1e-5)
    worker.stepper.remove(key)


FLOATS = st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=40)


@given(FLOATS, st.sampled_from(list(DTYPES)))
@example([65519.996, 65520.0, 1e38, 3.4e38, 1.00390625, 1.01171875, -0.0], "float16")
@example([65519.996, 65520.0, 1e38, 3.4e38, 1.00390625, 1.01171875, -0.0], "bfloat16")
def test_numbers_are_rounded_as_torch_rounds_them(values: list[float], dtype: Any) -> None:
    array = np.asarray(values, dtype=np.float32)
    expected = torch.from_numpy(array).to(DTYPES[dtype])
    found = narrowed(array, dtype)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.to_float32(), expected.float().numpy())


def test_a_long_sum_does_not_lose_its_small_terms() -> None:
    rows = np.full((1, 1 << 17, HIDDEN), 1e-3, dtype=np.float32)
    rows[0, 0] = 4096.0
    asked = seal_capture(CaptureSpec(layers=(0,), reduce="mean"), FACTS, 4, 8)
    assert asked is not None
    found = asked.merge(rows, None, map).storage[0, 0, 0]
    exact = rows.astype(np.float64).mean()
    assert abs(found - exact) <= np.spacing(np.float32(exact))
