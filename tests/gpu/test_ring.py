"""Spans of the ring on a GPU: steps of all sizes, faster than their rows are copied out."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from inspect_lens import CaptureSpec, LensRequest
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.export.transport import Exporter, copier_for
from inspect_lens._engine.protocol.messages import ROWS, SCORES, ArenaWriter, seal
from inspect_lens._engine.step.stepper import Stepper
from inspect_lens._engine.tap.buffers import TapState, install
from inspect_lens._engine.tap.op import tap, warm_up
from tests.kit.steps import bf16_facts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

HIDDEN, STEP, N_PROMPT, MOST = 4096, 1024, 3000, 3500
FACTS = bf16_facts(HIDDEN, STEP)
TAPS = FACTS.taps
LAYERS = [(0, 1, 2), (1,), (0, 2)]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def rows(number: int, layer: int, first: int, n: int, device: str) -> torch.Tensor:
    """Rows that say, exactly in bfloat16, whose they are, and in all their columns."""
    at = torch.arange(first, first + n, device=device)
    named = torch.stack([at // 128, at % 128, torch.full_like(at, 10 * number + layer)], dim=1)
    return named.repeat(1, HIDDEN // 3 + 1)[:, :HIDDEN].to(torch.bfloat16)


def run(
    device: str,
    parts: int,
    seed: int,
    collector: Collector,
    layers_of: list[tuple[int, ...]] = LAYERS,
) -> None:
    """Run random steps without ever waiting for the device, and compare every row."""
    arena = ArenaWriter(256 << 20)
    target = torch.device(device)
    state = TapState(
        taps=TAPS,
        hidden=HIDDEN,
        dtype=torch.bfloat16,
        max_tokens=STEP,
        max_groups=4,
        ring_rows=3 * STEP,
        bank_rows=4,
        device=target,
        parts=parts,
    )
    ctls = [state.new_ctl(i) for i in range(3)]
    install(state)
    warm_up(state)
    stepper = Stepper(state, Exporter(arena, copier_for(arena, target, parts)))
    keys = [f"{device}-{parts}-{seed}-{len(layers_of[1])}-{i}" for i in range(3)]
    for key, layers in zip(keys, layers_of, strict=True):
        envelope = seal(
            LensRequest(capture=CaptureSpec(layers=layers)),
            FACTS,
            reply=collector.address,
            n_prompt=N_PROMPT,
            max_tokens=MOST - N_PROMPT,
        )
        collector.open(key, envelope)
        stepper.add(key, envelope.pack())
    draw = random.Random(seed)
    fed = [0, 0, 0]
    for _ in range(60):
        count = [1, 1, 1]
        if draw.random() < 0.3:
            number = draw.randrange(3)
            count[number] = draw.choice([2, 40, 130, 500, STEP - 2])
            if fed[number] + count[number] > MOST - 70:
                count[number] = 1
        sizes, positions = np.asarray(count), np.asarray(fed)
        stepper.begin(keys, np.cumsum(sizes) - sizes, sizes, positions)
        for layer, ctl in enumerate(ctls):
            parts_of = [rows(i, layer, fed[i], n, device) for i, n in enumerate(count)]
            tap(torch.cat(parts_of), None, ctl)
        stepper.end_step("eager")
        fed = [at + n for at, n in zip(fed, count, strict=True)]
        if draw.random() < 0.05:
            stepper.leave(keys[:1])
    for number, (key, layers) in enumerate(zip(keys, layers_of, strict=True)):
        stepper.remove(key)
        counts = {ROWS: fed[number], SCORES: 0}
        taken = collector.take(key, counts=counts, n_fed=fed[number], timeout_s=60)
        found = taken.tensors[ROWS].to_float32()
        for rank, layer in enumerate(layers):
            expected = rows(number, layer, 0, fed[number], "cpu").float()
            assert torch.equal(torch.from_numpy(found[rank]), expected), (number, layer)
    stepper.close()


@pytest.mark.parametrize("parts", [2, 6, 32])
@pytest.mark.parametrize("seed", range(3))
def test_rows_of_steps_that_overtake_their_copies_are_right(
    collector: Collector, parts: int, seed: int
) -> None:
    run("cuda", parts, seed, collector)


@pytest.mark.parametrize("at_once", [1 << 14, 1 << 19, 32 << 20])
@pytest.mark.parametrize("seed", range(2))
def test_rows_of_requests_that_want_the_same_leave_in_rounds_or_bit_by_bit(
    monkeypatch: pytest.MonkeyPatch, collector: Collector, seed: int, at_once: int
) -> None:
    for name in ("_AT_ONCE", "_PIECE", "_MORE"):
        monkeypatch.setattr(f"inspect_lens._engine.step.exporter.{name}", at_once)
    run("cuda", 32, seed + 10, collector, 3 * [(0, 1, 2)])
