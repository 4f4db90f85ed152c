"""Capture of queries and keys: what attention layers are called with."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ._capture import Layers, Transport, parse_layers

__all__ = ["QKReceipt", "QKSpec"]


class QKSpec(BaseModel):
    """Queries and keys of some layers, for all tokens that are fed.

    They are captured at the sites `q` and `k`, which the engine has to serve
    (`INSPECT_LENS_SITES`).

    They are those that the attention kernel gets: after the rotary embedding and any
    normalisation. The result has `attn_q` (layers ascending, tokens, query heads, head size),
    `attn_k` (layers ascending, tokens, key heads, head size), `qk_layers`, and `qk_meta`: per
    layer what else the pattern depends on (`scale`, `logits_soft_cap`, `sliding_window` as
    (left, right) with -1 for no limit, `attention_chunk_size`, `alibi_slopes`, `sinks`,
    `num_heads`, `num_kv_heads`, `head_size`). `inspect_lens.attention` makes patterns of them.

    Source:
        Names and meaning are those of vllm-lens 1.3.0.

    Example:
        ```python
        from inspect_lens import LensRequest
        from inspect_lens.spec import QKSpec

        request = LensRequest(qk=QKSpec(layers=[2]))
        assert request.qk.layers == (2,)
        ```
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: Layers = "all"
    """`all` layers with softmax attention, or layer numbers."""

    transport: Transport = Field(default="auto")
    """As in `CaptureSpec`."""

    @field_validator("layers", mode="before")
    @classmethod
    def _layers(cls, value: Any) -> Any:
        return parse_layers(value)


class QKReceipt(BaseModel):
    """Part of the receipt about captured queries and keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: tuple[int, ...]
    """Layers, ascending."""
    n_positions: int
    """Tokens, from position 0."""
    dtype: str
