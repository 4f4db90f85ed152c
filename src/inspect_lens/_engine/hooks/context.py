"""What a hook gets beside its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["HookContext"]


class HookContext:
    """One per hook and request; lives as long as the request.

    Attributes:
        saved: what the hook keeps; it comes back with the response as `hook_results`. Tensors,
            arrays, numbers, text, None, and lists and dicts of them.
        layer_idx: layer of this call.
        seq_len: tokens of the request in this step: rows of `h`.
        position: absolute position of the first of them; 0 in the first call at a layer.
        model: the model as vLLM holds it, on this rank.
    """

    __slots__ = ("_parameter", "layer_idx", "model", "position", "saved", "seq_len")

    def __init__(self, model: Any, parameter: Callable[[str], torch.Tensor]) -> None:
        """Start empty.

        Args:
            model: of the worker.
            parameter: finds a parameter by name.
        """
        self.saved: dict[Any, Any] = {}
        self.layer_idx = 0
        self.seq_len = 0
        self.position = 0
        self.model = model
        self._parameter = parameter

    def get_parameter(self, name: str) -> torch.Tensor:
        """A parameter of the model, whole, whatever tensor parallelism made of it.

        Args:
            name: dotted path from the model, such as `lm_head.weight`.

        Returns:
            The parameter; without tensor parallelism it is the model's own memory.

        Raises:
            AttributeError: the model has no such parameter, or another pipeline stage has it
                (prefetch it).
            LensError: the shares of the ranks cannot be put together.
        """
        return self._parameter(name)
