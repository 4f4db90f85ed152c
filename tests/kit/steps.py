"""A worker without vLLM: three taps over rows that name themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from inspect_lens import CaptureSpec, LensRequest
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.export.transport import Copier, Exporter
from inspect_lens._engine.protocol.messages import ArenaWriter, Envelope, seal
from inspect_lens._engine.step.stepper import Stepper
from inspect_lens._engine.tap.buffers import TapState, install
from inspect_lens._engine.tap.op import tap
from inspect_lens.spec import EngineFacts, tap_points
from tests.kit.facts import engine_facts

__all__ = [
    "CAPTURE",
    "FACTS",
    "HIDDEN",
    "LAYERS",
    "TAPS",
    "Worker",
    "begin",
    "bf16_facts",
    "exporter",
    "rows",
    "sealed",
]

HIDDEN = 8
LAYERS = (0, 2, 5)
TAPS = tap_points(["resid_post"], LAYERS)
FACTS = engine_facts(
    n_layers=6,
    hidden=HIDDEN,
    layers=LAYERS,
    taps=TAPS,
    max_step_tokens=32,
    ring_rows=96,
    bank_rows=12,
)


def bf16_facts(hidden: int, max_step_tokens: int) -> EngineFacts:
    """Of an engine with three layers, all tapped, whose steps of any size fit its ring."""
    taps = tap_points(["resid_post"], range(3))
    return replace(
        FACTS,
        n_layers=3,
        hidden=hidden,
        dtype="bfloat16",
        layers=(0, 1, 2),
        taps=taps,
        max_step_tokens=max_step_tokens,
        ring_rows=len(taps) * max_step_tokens,
        bank_rows=4,
    )


class Worker:
    """A worker without vLLM: taps in a row over rows that say who they are.

    Args:
        exporter: where results go.
        dtype: of the stream.
        make: rows of (number of the request, layer, first position, tokens).
        sum_rows: of the table in which reductions of sampled tokens grow.
        parts: of the ring.
        layers: whose streams it has taps at.
    """

    def __init__(
        self,
        exporter: Exporter,
        dtype: torch.dtype = torch.float32,
        make: Callable[[int, int, int, int], torch.Tensor] | None = None,
        sum_rows: int = 0,
        parts: int = 1,
        layers: tuple[int, ...] = LAYERS,
    ) -> None:
        self._make = make or rows
        self._layers = layers
        self.state = TapState(
            taps=tap_points(["resid_post"], layers),
            hidden=HIDDEN,
            dtype=dtype,
            max_tokens=32,
            max_groups=8,
            ring_rows=96,
            bank_rows=12,
            device=torch.device("cpu"),
            sum_rows=sum_rows,
            parts=parts,
        )
        self.ctls = [self.state.new_ctl(i) for i in range(len(layers))]
        install(self.state)
        self.stepper = Stepper(self.state, exporter)

    def step(self, parts: list[tuple[str, int, int, int]]) -> None:
        """Run one step of (key, number of the request, first position, tokens)."""
        counts = np.asarray([p[3] for p in parts], dtype=np.int64)
        positions = np.asarray([p[2] for p in parts], dtype=np.int64)
        keys = [p[0] for p in parts]
        stepper = self.stepper
        stepper.begin(keys, np.cumsum(counts) - counts, counts, positions)
        for site, layer in enumerate(self._layers):
            hidden = torch.cat([self._make(number, layer, p, n) for _, number, p, n in parts])
            tap(hidden, None, self.ctls[site])
        self.stepper.end_step("eager")


def rows(number: int, layer: int, first: int, count: int) -> torch.Tensor:
    """Rows that name request, layer and position."""
    out = torch.zeros(count, HIDDEN)
    out[:, 0], out[:, 1] = number, layer
    out[:, 2] = torch.arange(first, first + count)
    return out


def exporter(nbytes: int = 1 << 20) -> Exporter:
    arena = ArenaWriter(nbytes)
    return Exporter(arena, Copier(arena))


def sealed(collector: Collector, request: LensRequest, n_prompt: int, max_tokens: int) -> Envelope:
    return seal(request, FACTS, reply=collector.address, n_prompt=n_prompt, max_tokens=max_tokens)


def begin(worker: Worker, collector: Collector, key: str, envelope: Envelope) -> None:
    collector.open(key, envelope)
    # As it comes from another process.
    worker.stepper.add(key, dict(envelope.pack()))


CAPTURE = LensRequest(capture=CaptureSpec(layers=(0, 5)))
