"""What an attention pattern depends on besides its queries and keys."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from inspect_lens.errors import SpecError, UnsupportedError

__all__ = ["AttentionFacts"]

_LATENT: Final = ("kv_lora_rank", "use_mla")
"""What a configuration with multi-head latent attention has."""


@dataclass(frozen=True, kw_only=True)
class AttentionFacts:
    """Settings of one attention layer that its pattern needs beside queries and keys.

    Example:
        ```python
        from inspect_lens.attention import AttentionFacts

        meta = {"scale": 0.125, "num_heads": 4, "num_kv_heads": 2, "head_size": 64}
        facts = AttentionFacts.of(meta | {"sliding_window": [4095, 0]})
        assert facts.window == (4095, 0)
        assert facts.kv_head(3) == 1
        ```
    """

    scale: float
    """Factor of the products of queries and keys."""
    num_heads: int
    """Query heads, over all tensor-parallel ranks."""
    num_kv_heads: int
    """Key heads; each serves `num_heads // num_kv_heads` query heads."""
    head_size: int
    """Width of one head."""
    soft_cap: float = 0.0
    """Logits become `cap * tanh(logits / cap)`; 0 for no cap."""
    window: tuple[int, int] = (-1, -1)
    """Tokens to the left and right that a query sees besides its own; -1 for no limit."""
    chunk: int = 0
    """A query sees only keys of its own chunk of so many tokens; 0 for no chunks."""
    alibi_slopes: tuple[float, ...] | None = None
    """By query head: what the logit loses per token of distance."""
    alibi_sqrt: bool = False
    """The slope multiplies the root of the distance."""
    sinks: tuple[float, ...] | None = None
    """By query head: a logit that takes part in the softmax and belongs to no token."""

    @classmethod
    def of(cls, meta: Mapping[str, Any] | AttentionFacts) -> AttentionFacts:
        """Read one entry of `qk_meta`.

        Args:
            meta: as a capture of queries and keys brings it for each layer, or facts.

        Returns:
            The facts.

        Raises:
            UnsupportedError: the layer has multi-head latent attention.
            SpecError: a number is missing or out of range.
        """
        if isinstance(meta, AttentionFacts):
            return meta
        if any(meta.get(key) for key in _LATENT):
            raise UnsupportedError(
                "qk_meta: this layer has multi-head latent attention (MLA), which keeps no keys "
                "per head, so that queries and keys make no pattern; capture the stream instead"
            )
        needed = ("scale", "num_heads", "num_kv_heads", "head_size")
        if missing := [key for key in needed if key not in meta]:
            raise SpecError(
                f"qk_meta: has no {', '.join(missing)}; needed is an entry of `qk_meta` as "
                "output_qk returns it"
            )
        try:
            made = cls(
                scale=float(meta["scale"]),
                num_heads=int(meta["num_heads"]),
                num_kv_heads=int(meta["num_kv_heads"]),
                head_size=int(meta["head_size"]),
                soft_cap=float(meta.get("logits_soft_cap") or 0.0),
                window=_window(meta.get("sliding_window")),
                chunk=int(meta.get("attention_chunk_size") or 0),
                alibi_slopes=_numbers(meta.get("alibi_slopes")),
                alibi_sqrt=bool(meta.get("use_alibi_sqrt")),
                sinks=_numbers(meta.get("sinks")),
            )
        except (TypeError, ValueError) as error:
            raise SpecError(f"qk_meta: {error}; needed is what output_qk returns") from None
        made._check()
        return made

    def kv_head(self, head: int) -> int:
        """Number of the key head that a query head reads."""
        return head // (self.num_heads // self.num_kv_heads)

    def _check(self) -> None:
        if min(self.num_heads, self.num_kv_heads, self.head_size) < 1 or (
            self.num_heads % self.num_kv_heads
        ):
            raise SpecError(
                f"qk_meta: num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
                f"head_size={self.head_size}; query heads have to be a multiple of key heads"
            )
        numbers = [self.scale, self.soft_cap]
        for name, values in (("alibi_slopes", self.alibi_slopes), ("sinks", self.sinks)):
            if values is not None and len(values) != self.num_heads:
                raise SpecError(
                    f"qk_meta: {len(values)} {name} for {self.num_heads} query heads; needed is "
                    "one per head"
                )
            numbers += values or ()
        if not all(map(math.isfinite, numbers)) or self.soft_cap < 0:
            raise SpecError("qk_meta: a number is NaN, infinite, or a soft-cap below 0")


def _window(value: Sequence[int] | None) -> tuple[int, int]:
    if value is None:
        return (-1, -1)
    left, right = (int(n) for n in value)
    return (left, right)


def _numbers(value: Sequence[float] | None) -> tuple[float, ...] | None:
    return None if value is None else tuple(float(n) for n in value)
