"""Reductions and conversions on a GPU, beside the same on a CPU, through the real copier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens import CaptureSpec, LensRequest
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.export.transport import Copier, Exporter, StreamCopier
from inspect_lens._engine.plan import GroupBlock, Longs
from inspect_lens._engine.protocol.messages import ROWS, SCORES, ArenaWriter, seal
from inspect_lens._engine.step.stepper import Stepper
from inspect_lens._engine.tap.buffers import TapState
from tests.kit.steps import bf16_facts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

HIDDEN, N_PROMPT, N_FED = 256, 1500, 1510
FACTS = bf16_facts(HIDDEN, 2048)
TAPS = FACTS.taps


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def run(
    device: str, collector: Collector, rows: torch.Tensor, capture: CaptureSpec, sum_rows: int = 0
) -> Any:
    """Feed the rows of a request through a worker's ring on a device."""
    target, arena = torch.device(device), ArenaWriter(64 << 20)
    state = TapState(
        taps=TAPS,
        hidden=HIDDEN,
        dtype=torch.bfloat16,
        max_tokens=2048,
        max_groups=4,
        ring_rows=3 * 2048,
        bank_rows=4,
        device=target,
        sum_rows=sum_rows,
    )
    copier = Copier(arena) if device == "cpu" else StreamCopier(arena, target, state.parts)
    stepper = Stepper(state, Exporter(arena, copier))
    request = LensRequest(capture=capture)
    envelope = seal(
        request, FACTS, reply=collector.address, n_prompt=N_PROMPT, max_tokens=N_FED - N_PROMPT + 1
    )
    key = f"{device}-{id(rows)}-{capture!r}"
    collector.open(key, envelope)
    stepper.add(key, envelope.pack())
    whole = rows.to(target)
    for first, n in ((0, 700), (700, 800), *((p, 1) for p in range(N_PROMPT, N_FED))):
        numbers: list[Longs] = [np.asarray([v]) for v in (0, n, first)]
        stepper.begin([key], *numbers)
        plan = stepper._plan
        assert plan is not None
        for block in plan.blocks:
            fill(state, block, whole[:, first : first + n])
        stepper.end_step("eager")
    assert (stepper.sum_rows_in_use > 0) == (sum_rows > 0 and capture.reduce != "norm")
    stepper.remove(key)
    count = N_FED - envelope.capture.lo if envelope.capture else 0
    got = collector.take(key, counts={ROWS: count, SCORES: 0}, n_fed=N_FED, timeout_s=30)
    stepper.close()
    return torch.from_numpy(got.tensors[ROWS].to_float32().copy())


def fill(state: TapState, block: GroupBlock, rows: torch.Tensor) -> None:
    """Put rows where the taps would; the last number of a group is no row of a tap."""
    for base, wanted in zip(
        state.base[0, : len(rows)].tolist(), rows[:, -block.n_tokens :], strict=True
    ):
        begin = int(state.header[1]) + base
        state.ring[begin : begin + len(wanted)] = wanted


@pytest.mark.parametrize("dtype", ["model", "float32", "float16"])
@pytest.mark.parametrize("reduce", ["none", "mean", "last", "max", "norm"])
def test_a_gpu_reduces_as_a_cpu_does(collector: Collector, reduce: Any, dtype: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, N_FED, HIDDEN, generator=generator).bfloat16()
    capture = CaptureSpec(reduce=reduce, dtype=dtype)
    found, expected = (run(device, collector, rows, capture) for device in ("cuda", "cpu"))
    wide = rows.double()
    truth = {
        "none": wide,
        "mean": wide.mean(dim=1, keepdim=True),
        "last": wide[:, -1:],
        "max": wide.amax(dim=1, keepdim=True),
        "norm": wide.norm(dim=-1, keepdim=True),
    }[reduce]
    step = {"model": 2**-8, "float32": 1e-5, "float16": 2**-11}[dtype]
    torch.testing.assert_close(found.double(), truth, rtol=step, atol=1e-5)
    torch.testing.assert_close(found, expected, rtol=2 * step, atol=1e-6)


@pytest.mark.parametrize("reduce", ["mean", "max", "last"])
def test_what_grows_on_a_gpu_is_what_rows_that_are_sent_become(
    collector: Collector, reduce: Any
) -> None:
    rows = torch.randn(3, N_FED, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    capture = CaptureSpec(reduce=reduce, dtype="float32")
    sent, grown, on_cpu = (
        run(device, collector, rows, capture, n)
        for device, n in (("cuda", 0), ("cuda", 64), ("cpu", 64))
    )
    torch.testing.assert_close(grown, sent, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grown, on_cpu, rtol=1e-5, atol=1e-6)
