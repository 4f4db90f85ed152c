"""Tiny random models of transformers whose eager attention says what it was called with."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["Twin", "alibi_twin", "eager_twin"]


class Twin(NamedTuple):
    """One forward pass: queries and keys of each layer, facts, and patterns."""

    q: list[np.ndarray[Any, Any]]
    """(tokens, heads, size) per layer."""
    k: list[np.ndarray[Any, Any]]
    metas: list[dict[str, Any]]
    """As the engine would say them, from transformers' own modules."""
    patterns: list[np.ndarray[Any, Any]]
    """(heads, tokens, tokens) per layer: what transformers returns."""


def eager_twin(family: str, n_tokens: int, **config: Any) -> Twin:
    """Run a model whose file has `eager_attention_forward`.

    Args:
        family: module of transformers, such as `llama`.
        n_tokens: of the prompt.
        **config: of the model, over sizes that make it tiny.
    """
    model = _model(family, config)
    calls: list[tuple[Any, Any, Any, dict[str, Any]]] = []
    with _listening(family, calls):
        patterns = _patterns(model, n_tokens)
    metas = [_meta(module, q, k, more) for module, q, k, more in calls]
    return Twin(
        [_rows(q) for _, q, _, _ in calls], [_rows(k) for _, _, k, _ in calls], metas, patterns
    )


def alibi_twin(family: str, n_tokens: int, **config: Any) -> Twin:
    """Run BLOOM or MPT, whose one projection makes queries, keys and values.

    Args:
        family: `bloom` or `mpt`.
        n_tokens: of the prompt.
        **config: of the model.
    """
    model = _model(family, config)
    modules = [m for m in model.modules() if type(m).__name__.endswith("Attention")]
    name = {"bloom": "query_key_value", "mpt": "Wqkv"}[family]
    outputs: list[torch.Tensor] = []
    for module in modules:
        child = getattr(module, name)
        child.register_forward_hook(lambda _m, _a, out: outputs.append(out.detach()[0]))
    patterns = _patterns(model, n_tokens)
    home = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    q, k, metas = [], [], []
    for module, fused in zip(modules, outputs, strict=True):
        heads = int(getattr(module, "num_heads", 0) or module.n_heads)
        if family == "bloom":
            alibi = home.build_alibi_tensor(torch.ones(1, 4), heads, torch.float32)
            slopes, scale = alibi[:, 0, 1], module.inv_norm_factor
            each = fused.view(n_tokens, heads, 3, -1).unbind(2)
        else:
            alibi = home.build_mpt_alibi_tensor(heads, 4)[:, 0]
            slopes, scale = alibi[:, -1] - alibi[:, -2], module.softmax_scale
            each = fused.view(n_tokens, 3, heads, -1).unbind(1)
        q.append(each[0].numpy())
        k.append(each[1].numpy())
        metas.append({
            "scale": float(scale), "num_heads": heads, "num_kv_heads": heads,
            "head_size": q[-1].shape[-1], "alibi_slopes": slopes.tolist(),
        })  # fmt: skip
    return Twin(q, k, metas, patterns)


def _model(family: str, config: dict[str, Any]) -> Any:
    transformers: Any = importlib.import_module("transformers")
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
    torch.manual_seed(0)
    made = transformers.AutoModel.from_config(
        kind(vocab_size=64, **config), attn_implementation="eager"
    )
    made = made.to(torch.float32).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            # Wide enough that patterns are far from flat, and caps and sinks are felt.
            parameter.normal_(0, 2.0 / parameter.shape[-1] ** 0.5)
    return made


def _patterns(model: Any, n_tokens: int) -> list[np.ndarray[Any, Any]]:
    ids = torch.randint(0, 64, (1, n_tokens), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = model(input_ids=ids, output_attentions=True, use_cache=False)
    return [layer[0].numpy() for layer in out.attentions]


@contextmanager
def _listening(family: str, calls: list[Any]) -> Iterator[None]:
    home: Any = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    eager = home.eager_attention_forward

    def spy(module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((module, query.detach(), key.detach(), kwargs))
        return eager(module, query, key, *args, **kwargs)

    home.eager_attention_forward = spy
    try:
        yield
    finally:
        home.eager_attention_forward = eager


def _rows(value: torch.Tensor) -> np.ndarray[Any, Any]:
    """(1, heads, tokens, size) as (tokens, heads, size)."""
    rows: np.ndarray[Any, Any] = value[0].transpose(0, 1).numpy()
    return rows


def _meta(module: Any, q: Any, k: Any, more: dict[str, Any]) -> dict[str, Any]:
    window = more.get("sliding_window", getattr(module, "sliding_window", None))
    sinks = getattr(module, "sinks", None)
    return {
        "scale": float(more["scaling"]),
        "num_heads": q.shape[1],
        "num_kv_heads": k.shape[1],
        "head_size": q.shape[-1],
        "logits_soft_cap": float(more.get("softcap") or 0.0),
        "sliding_window": [-1, -1] if window is None else [window - 1, 0],
        "sinks": None if sinks is None else sinks.detach().tolist(),
    }
