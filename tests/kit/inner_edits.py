"""Edits inside of blocks, in an engine and as hooks on the same numbers of Hugging Face."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from inspect_lens.spec import Ablate, Add, EditBase, Replace, Scale, Zero

from .reference import HuggingFace

__all__ = ["LAYER", "Case", "edited_stream", "expert_cases", "head_cases"]

LAYER = 1
Change = Callable[[torch.Tensor], torch.Tensor]


class Case(NamedTuple):
    """An edit, and what it is to do."""

    edit: EditBase
    part: slice
    """The numbers of the row that change."""
    change: Change
    """Of (tokens, numbers of the part), what they are afterwards."""


def head_cases(model: Any) -> list[Case]:
    """Edits of the first and of the last head at each site that has heads, and of a neuron."""
    attention, config = model.model.layers[0].self_attn, model.config
    size, n = attention.head_dim, config.num_attention_heads
    v = torch.randn(size, generator=torch.Generator().manual_seed(4))
    u = v / v.norm()
    neuron: dict[str, Any] = {"layers": [LAYER], "site": "mlp_hidden", "neurons": [3]}
    cases = []
    for site, heads in (("q", n), ("k", config.num_key_value_heads), ("z", n)):
        at: dict[str, Any] = {"layers": [LAYER], "site": site}
        first, last = slice(0, size), slice((heads - 1) * size, heads * size)
        cases += [
            Case(Ablate(direction=v, heads=[0], **at), first, lambda h: h - (h @ u)[:, None] * u),
            # What is added to all keys alike moves no weight of attention.
            Case(Scale(factor=-1.5, heads=[heads - 1], **at), last, lambda h: -1.5 * h),
        ]
    at = {"layers": [LAYER], "site": "z"}
    cases += [
        Case(Zero(heads=[0], **at), slice(0, size), lambda h: 0 * h),
        Case(Add(vector=v, heads=[0], **at), slice(0, size), lambda h: h + v),
        Case(
            Replace(rows=v, heads=[n - 1], **at),
            slice((n - 1) * size, n * size),
            lambda h: v.expand_as(h),
        ),
        Case(
            Scale(factor=3.0, layers=[LAYER], site="v", heads=[0]),
            slice(0, size),
            lambda h: 3 * h,
        ),
    ]
    if hasattr(model.model.layers[0].mlp, "down_proj"):
        cases.append(Case(Add(vector=[5.0], **neuron), slice(3, 4), lambda h: h + 5))
    return cases


def expert_cases(n: int) -> list[Case]:
    """Edits of router logits: an expert that nobody gets, one that all get, and softer choices."""
    at: dict[str, Any] = {"layers": [LAYER], "site": "router_logits"}
    row = torch.linspace(-1, 1, n)
    return [
        Case(Add(vector=[-1e4], experts=[2], **at), slice(2, 3), lambda h: h - 1e4),
        Case(Add(vector=[1e2], experts=[n - 1], **at), slice(n - 1, n), lambda h: h + 1e2),
        Case(Scale(factor=0.25, **at), slice(0, n), lambda h: h / 4),
        Case(Replace(rows=row, alpha=0.5, **at), slice(0, n), lambda h: (h + row) / 2),
    ]


def edited_stream(reference: HuggingFace, tokens: Sequence[int], case: Case) -> torch.Tensor:
    """(layers, tokens, hidden); the stream of a model in which a hook does what the edit does."""
    block = reference.model.model.layers[LAYER]
    with _EDITED[case.edit.site](block, case):
        return reference.residual_stream(tokens)


def _changed(rows: torch.Tensor, case: Case) -> torch.Tensor:
    """Rows whose last axis is that of the site."""
    flat = rows.reshape(-1, rows.shape[-1]).clone()
    flat[:, case.part] = case.change(flat[:, case.part])
    return flat.reshape(rows.shape)


@contextmanager
def _given(module: Any, case: Case) -> Iterator[None]:
    handle = module.register_forward_pre_hook(lambda _, args: (_changed(args[0], case), *args[1:]))
    yield
    handle.remove()


@contextmanager
def _returned(module: Any, case: Case) -> Iterator[None]:
    handle = module.register_forward_hook(lambda _, args, output: _changed(output, case))
    yield
    handle.remove()


@contextmanager
def _rotated(block: Any, case: Case) -> Iterator[None]:
    """Queries or keys behind rotary embedding, (1, heads, tokens, size)."""
    home = sys.modules[type(block).__module__]
    rotate: Any = home.apply_rotary_pos_emb
    layers: list[int] = []

    def rotated(*args: Any, **kwargs: Any) -> Any:
        made = dict(zip("qk", rotate(*args, **kwargs), strict=True))
        layers.append(len(layers))
        if layers[-1] == LAYER:
            by_token = made[case.edit.site].transpose(1, 2)
            rows = _changed(by_token.flatten(2), case)
            made[case.edit.site] = rows.reshape(by_token.shape).transpose(1, 2)
        return made["q"], made["k"]

    with patch.object(home, "apply_rotary_pos_emb", rotated):
        yield


@contextmanager
def _routed(block: Any, case: Case) -> Iterator[None]:
    """What a router makes of its input, before it chooses."""
    home, weight = sys.modules[type(block).__module__], block.mlp.gate.weight
    linear = torch.nn.functional.linear

    def routed(x: torch.Tensor, w: torch.Tensor, *args: Any) -> torch.Tensor:
        made = linear(x, w, *args)
        return _changed(made, case) if w is weight else made

    with patch.object(home, "F", SimpleNamespace(linear=routed)):
        yield


_EDITED: dict[str, Any] = {
    "q": _rotated,
    "k": _rotated,
    "v": lambda block, case: _returned(block.self_attn.v_proj, case),
    "z": lambda block, case: _given(block.self_attn.o_proj, case),
    "mlp_hidden": lambda block, case: _given(block.mlp.down_proj, case),
    "router_logits": _routed,
}
