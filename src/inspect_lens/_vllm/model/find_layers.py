"""Finding a model's decoder layers and reading their outputs; refuses what it does not know."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from inspect_lens.errors import UnsupportedError

from .residual_layout import Layout

__all__ = ["as_rows", "decoder_layers", "describe", "has_mixer", "split_output"]

_HINT = "set INSPECT_LENS_DISABLE=1 to run this model without the lens"


def decoder_layers(model: nn.Module, n_layers: int) -> list[nn.Module | None]:
    """Find the decoder layers of a loaded model.

    They are the one list of modules with `n_layers` entries in which the entries of this
    pipeline stage hold attention or state-space layers. In some hybrids a part of the entries
    has a feed-forward module only; a list where all have one is preferred. Lists of the same
    layers, as Gemma 4 has them, are one list.

    Args:
        model: the model as the runner holds it.
        n_layers: decoder layers that its configuration names.

    Returns:
        One entry per layer, in order; None for a layer of another pipeline stage.

    Raises:
        UnsupportedError: no list fits, or more than one does.
    """
    found: dict[str, list[nn.Module | None]] = {}
    mixed: dict[str, list[nn.Module | None]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == n_layers:
            layers = [None if _is_elsewhere(layer) else layer for layer in module]
            mixers = [has_mixer(layer) for layer in layers if layer is not None]
            kind = found if all(mixers) else mixed
            # Modules are equal only to themselves.
            if any(mixers) and layers not in kind.values():
                kind[name] = layers
    found = found or mixed
    if len(found) != 1:
        raise UnsupportedError(
            f"inspect_lens cannot tell the decoder layers of {type(model).__name__}: "
            f"{len(found)} lists of {n_layers} layers with attention ({sorted(found)}); {_HINT}"
        )
    return next(iter(found.values()))


def _is_elsewhere(layer: nn.Module) -> bool:
    from vllm.model_executor.models.utils import PPMissingLayer

    return isinstance(layer, PPMissingLayer)


def has_mixer(layer: nn.Module) -> bool:
    """Whether a module is or holds an attention or state-space layer."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    return any(
        isinstance(module, AttentionLayerBase) or _is_served_elsewhere(module)
        for module in layer.modules()
    )


def _is_served_elsewhere(module: nn.Module) -> bool:
    """Whether a module of transformers is the attention of a layer that vLLM's own stands in for.

    Up to vLLM 0.26 the layers that do its work lie in a dict beside the model.
    """
    return (
        type(module).__module__.startswith("transformers.")
        and getattr(module, "is_causal", False) is True
        and isinstance(getattr(module, "layer_idx", None), int)
    )


def split_output(
    layer: nn.Module, output: Any, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Read a decoder layer's output as the two halves of the residual stream.

    Args:
        layer: the layer, for the message.
        output: what its forward returned.
        layout: what its source says.

    Returns:
        `(hidden, residual)`: the stream is their sum, or `hidden` alone when residual is None.

    Raises:
        UnsupportedError: another layout. This happens while the engine starts, when the first
            forward pass is traced.
    """
    if isinstance(output, tuple) and len(output) == 2:
        hidden, residual = as_rows(output[0]), output[1]
    else:
        hidden, residual = as_rows(output), None
    if hidden is not None:
        if residual is None or layout == "stale":
            return hidden, None
        added = as_rows(residual)
        if added is not None and added.shape == hidden.shape and layout == "fused":
            return hidden, added
    raise UnsupportedError(
        f"inspect_lens does not know the output of {type(layer).__name__}: {describe(output)}, and "
        f"its source reads as {layout!r}; known are a (tokens, hidden) tensor, (hidden, None), and "
        f"(hidden, residual) where the source shows whether their sum is the stream; {_HINT}"
    )


def as_rows(value: Any) -> torch.Tensor | None:
    """A value as (tokens, hidden), sharing its memory; None when it is something else.

    Models that vLLM takes over from transformers keep a batch axis of one.
    """
    if isinstance(value, torch.Tensor):
        if value.dim() == 2:
            return value
        if value.dim() == 3 and value.shape[0] == 1:
            return value[0]
    return None


def describe(output: Any) -> str:
    """Types, and shapes of tensors, for messages."""
    if isinstance(output, tuple):
        return "(" + ", ".join(describe(item) for item in output) + ")"
    if isinstance(output, torch.Tensor):
        return f"{output.dim()}-dimensional tensor"
    return type(output).__name__
