"""The slow twin: a Hugging Face forward pass, plain or with the same edits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["HuggingFace", "max_relative_error"]

Edit = Callable[[torch.Tensor], torch.Tensor]
"""Maps the residual stream after a layer, (tokens, hidden), to the edited one."""


class HuggingFace:
    """A checkpoint in float32, run by transformers."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def residual_stream(
        self, tokens: Sequence[int], edits: dict[int, Edit] | None = None
    ) -> torch.Tensor:
        """Residual stream after every decoder layer, (layers, tokens, hidden) float32.

        Args:
            tokens: what is fed to the model.
            edits: by layer; rows returned for that layer are the edited ones.
        """
        rows: dict[int, torch.Tensor] = {}

        def hook(index: int) -> Any:
            def record(_module: Any, _args: Any, output: Any) -> Any:
                hidden = output[0] if isinstance(output, tuple) else output
                stream = hidden.reshape(-1, hidden.shape[-1])
                if edits and index in edits:
                    stream = edits[index](stream)
                rows[index] = stream.detach().clone()
                edited = stream.reshape(hidden.shape)
                return (edited, *output[1:]) if isinstance(output, tuple) else edited

            return record

        layers = self._model.model.layers
        handles = [layer.register_forward_hook(hook(i)) for i, layer in enumerate(layers)]
        try:
            with torch.no_grad():
                self._model(torch.tensor([list(tokens)]), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return torch.stack([rows[i] for i in range(len(layers))])


def max_relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest norm of a row's difference over the norm of the expected row."""
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(error.max())
