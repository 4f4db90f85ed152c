"""A worker without vLLM whose layers run hooks, and how requests with hooks are given to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from inspect_lens import Hook, LensRequest
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.hooks.runner import EAGER_KEY, HookRunner, Part
from inspect_lens._engine.step.request_stepper import RequestStepper
from inspect_lens._vllm.registered.persistent_hooks import packed_hook
from tests.kit.steps import HIDDEN, LAYERS, exporter, sealed
from tests.kit.steps import Worker as PlainWorker

__all__ = ["Worker", "begin", "hook", "note", "take"]


class Worker(PlainWorker):
    """Layers that run hooks on rows that say who they are."""

    def __init__(self, layers: tuple[int, ...] = LAYERS, most: int = 1 << 16) -> None:
        self.exporter = exporter()
        super().__init__(self.exporter)
        self.stepper: RequestStepper = RequestStepper(self.state, self.exporter)
        self.layers = layers
        self.hooks = self.stepper.hooks = HookRunner(
            layers=layers,
            allowed=True,
            most_bytes=most,
            model="the model",
            parameter=lambda name, may_gather: torch.full((2,), float(len(name))),
            send=self.exporter.send_saved,
        )

    def run(self, parts: list[tuple[str, int, int]]) -> dict[int, torch.Tensor]:
        """One step of (key, position, tokens); returns the stream after each layer."""
        step, start = [], 0
        for key, position, n in parts:
            step.append(Part(key, start, n, position))
            start += n
        needs = self.hooks.begin(step)
        stream = torch.cat([self.rows(p.key, p.position, p.n_tokens) for p in step])
        after = {}
        for layer in self.layers:
            need = needs.get(layer)
            for pre in (True, False):
                if need is not None and (need.pre if pre else need.post):
                    now = partial(_part, stream)
                    for a, b, rows in self.hooks.run(layer, pre, now):
                        stream = stream.clone()
                        stream[a:b] = rows
                if pre:
                    stream = stream + 1
            after[layer] = stream
        for key, error in self.hooks.end():
            self.stepper.fail(key, error)
        return after

    @staticmethod
    def rows(key: str, position: int, n: int) -> torch.Tensor:
        """Rows in front of the first layer."""
        return (100 * ord(key[0]) + torch.arange(position, position + n).float())[:, None].expand(
            n, HIDDEN
        )


def _part(stream: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return stream[start:stop].clone()


def begin(
    worker: Worker,
    collector: Collector,
    key: str,
    *hooks: Hook,
    persistent: tuple[str, ...] = (),
    workers: tuple[Worker, ...] = (),
) -> None:
    request = LensRequest(hooks=hooks)
    envelope = sealed(collector, request, 8, 8)
    layers = {layer for hook in hooks for layer in hook.layer_indices}
    eager = {
        "own": [packed_hook(hook) for hook in hooks],
        "persistent": list(persistent),
    }
    collector.open(key, envelope, len(layers | ({LAYERS[0]} if persistent else set())))
    for each in (worker, *workers):
        each.stepper.add(key, envelope.pack() | {EAGER_KEY: eager})


def take(collector: Collector, key: str, n_fed: int) -> Any:
    gathered = collector.take_saved(key, n_fed=n_fed, timeout_s=5)
    if gathered is None:
        collector.take(key, counts={0: 0, 1: 0}, n_fed=n_fed, timeout_s=5)
    return gathered


def hook(function: Callable[..., Any], *layers: int, pre: bool = False) -> Hook:
    return Hook(fn=function, layer_indices=layers or (LAYERS[1],), pre=pre)


def note(ctx: Any, h: Any) -> None:
    ctx.saved.setdefault("rows", []).append(h)
    ctx.saved.setdefault("calls", []).append([ctx.layer_idx, ctx.position, ctx.seq_len])
