"""The way many papers do it: transformers, a forward hook at one layer, static batches."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from tests.kit.process_tree import cpu_clock

from .loads import LOADS, requests
from .shapes import Shape

__all__ = ["HuggingFace"]


class HuggingFace:
    """A random model of a shape with a hook behind one layer; rows go to the CPU step by step."""

    def __init__(self, shape: Shape, *, batch: int) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        values = dict(shape.config)
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = getattr(torch, shape.dtype)
        with torch.device(device):
            self._model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        self._shape, self._batch, self._device = shape, batch, device
        self._parts: list[torch.Tensor] = []
        self._layer().register_forward_hook(self._hook)

    def _layer(self) -> Any:
        inner = self._model.model
        layers = inner.layers if hasattr(inner, "layers") else inner.decoder.layers
        return layers[self._shape.layer]

    def _hook(self, _module: Any, _args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        self._parts.append(hidden.detach().to("cpu"))

    @torch.inference_mode()
    def run(self, arm: str, load: str, seed: int, limit_s: float) -> dict[str, Any]:
        """All requests in batches of equal size and in order, padded on the left.

        Raises:
            TimeoutError: not finished within the limit; nothing is scaled up from a part.
        """
        drawn = requests(LOADS[load], vocab=self._shape.vocab, seed=seed)
        used, started = cpu_clock({os.getpid(): "client"}), time.perf_counter()
        tensors: list[torch.Tensor] = []
        for first in range(0, len(drawn), self._batch):
            tensors += self._generate(drawn[first : first + self._batch], started + limit_s)
        seconds, cpu_s = time.perf_counter() - started, used()
        for tensor, (prompt, sampled) in zip(tensors, drawn, strict=True):
            assert tensor.shape == (len(prompt) + sampled - 1, self._shape.hidden)
        return {
            "seconds": seconds,
            "tokens": sum(sampled for _, sampled in drawn),
            "preemptions": 0,
            "shared_bytes": 0,
            "cpu_s": cpu_s,
        }

    def _generate(self, batch: list[tuple[list[int], int]], deadline: float) -> list[torch.Tensor]:
        width = max(len(prompt) for prompt, _ in batch)
        steps = max(sampled for _, sampled in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, (prompt, _) in enumerate(batch):
            ids[i, width - len(prompt) :] = torch.tensor(prompt)
            mask[i, width - len(prompt) :] = 1

        def is_late(_ids: Any, _scores: Any, **_: Any) -> Any:
            if time.perf_counter() > deadline:
                raise TimeoutError
            return torch.zeros(len(batch), dtype=torch.bool, device=self._device)

        self._parts = []
        self._model.generate(
            ids.to(self._device),
            attention_mask=mask.to(self._device),
            min_new_tokens=steps,
            max_new_tokens=steps,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[is_late],
        )
        rows = torch.cat(self._parts, dim=1)
        self._parts = []
        return [
            rows[i, width - len(prompt) : width + sampled - 1]
            for i, (prompt, sampled) in enumerate(batch)
        ]

    def close(self) -> None:
        """Nothing to end."""
