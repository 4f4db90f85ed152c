"""Edits of heads and neurons in an engine, against hooks on the same modules of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from inspect_lens.spec import Ablate, Add, EditBase, Replace, Scale, Zero
from tests.kit.reference import HuggingFace

__all__ = ["LAYER", "Case", "edited_stream", "head_cases"]

LAYER = 1
Edited = Callable[[torch.Tensor], torch.Tensor]
"""Of (tokens, numbers) of the chosen part, what they are afterwards."""
Case = tuple[EditBase, str, slice, Edited]
"""The edit, the site, the numbers that it is to change, and how."""


def head_cases(model: Any) -> list[Case]:
    """An edit of the first head, of the last one, of values, and of neurons."""
    config = model.config
    n, size = config.num_attention_heads, model.model.layers[0].self_attn.head_dim
    v = torch.randn(size, generator=torch.Generator().manual_seed(4))
    u = v / v.norm()
    at: dict[str, Any] = {"layers": [LAYER], "site": "z"}
    first, last = slice(0, size), slice((n - 1) * size, n * size)
    on_key: dict[str, Any] = {"layers": [LAYER], "site": "v", "heads": [0]}
    neuron: dict[str, Any] = {"layers": [LAYER], "site": "mlp_hidden", "neurons": [3]}
    return [
        (Zero(heads=[0], **at), "z", first, lambda h: 0 * h),
        (Zero(heads=[n - 1], **at), "z", last, lambda h: 0 * h),
        (Replace(rows=v, heads=[n - 1], **at), "z", last, lambda h: v.expand_as(h)),
        (Ablate(direction=v, heads=[0], **at), "z", first, lambda h: h - (h @ u)[:, None] * u),
        (Scale(factor=3.0, **on_key), "v", first, lambda h: 3 * h),
        (Add(vector=[5.0], **neuron), "mlp_hidden", slice(3, 4), lambda h: h + 5),
    ]


def edited_stream(reference: HuggingFace, tokens: Sequence[int], case: Case) -> torch.Tensor:
    """(layers, tokens, hidden); the stream of a model with a hook that does what the edit does."""
    _, site, part, change = case
    block = reference.model.model.layers[LAYER]

    def changed(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.clone()
        rows[0, :, part] = change(rows[0, :, part])
        return rows

    def before(_module: Any, args: Any) -> Any:
        return (changed(args[0]), *args[1:])

    if site == "v":
        after = lambda _module, _args, output: changed(output)  # noqa: E731
        handle = block.self_attn.v_proj.register_forward_hook(after)
    else:
        module = block.self_attn.o_proj if site == "z" else block.mlp.down_proj
        handle = module.register_forward_pre_hook(before)
    try:
        return reference.residual_stream(tokens)
    finally:
        handle.remove()
