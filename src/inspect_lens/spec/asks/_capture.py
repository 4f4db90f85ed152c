"""What activations a request wants back."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from inspect_lens.spec.engine._facts import RESID_POST, SITES, Site, in_site_order
from inspect_lens.spec.values._strict import integers, shown

from ._positions import Phase, Positions, TokenMatch, is_mask, parse_positions
from ._reductions import REDUCTIONS, Reduce

__all__ = [
    "CaptureSpec",
    "Layers",
    "QKReceipt",
    "QKSpec",
    "RowDType",
    "SiteChoice",
]

Layers = Literal["all"] | tuple[int, ...]
"""`all`, or 0-based global layer numbers."""

SiteChoice = Site | tuple[Site, ...]
"""One site, or several in the order of `SITES`."""

RowDType = Literal["model", "float32", "bfloat16", "float16"]
"""dtype of a result; `model` is that of the residual stream in the engine."""

Transport = Literal["auto", "inline", "binary"]
"""How a result travels: in the response, or beside it."""


def parse_layers(value: Any) -> Any:
    """Layers as users write them: `all` or true, a number, or a list of numbers."""
    if value is True:
        return "all"
    layers = integers(value)
    if not isinstance(layers, tuple):
        return value
    if not layers:
        raise ValueError("is empty; name at least one layer, or 'all'")
    return tuple(sorted(set(layers)))


class CaptureSpec(BaseModel):
    """Capture of one or more sites at some layers for some tokens.

    Example:
        ```python
        from inspect_lens import CaptureSpec, LensRequest

        capture = CaptureSpec(layers=[4, 2], positions="completion", reduce="mean", dtype="float32")
        assert capture.layers == (2, 4)
        request = LensRequest(capture=capture)  # extra_args={"inspect_lens": request}
        ```
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: Layers = "all"
    """`all`, or layer numbers; results are stacked in ascending order."""

    positions: Positions = "all"
    """Tokens to keep. `all` means every token that is fed to the model: prompt plus
    completion without the last sampled token. `last` is the last of these, `last_prompt` the
    last token of the prompt. A list of booleans is a mask over the prompt, of its length; a list
    of integers has absolute positions, negative ones counted from the end of the prompt. A
    `TokenMatch` takes tokens of the prompt by their text or ids."""

    phase: Phase = "both"
    """Keep only those of the positions that are `prefill` (prompt tokens) or `decode` (sampled
    tokens that are fed back)."""

    reduce: Reduce = Field(
        default="none",
        description="What is made of the selected tokens' rows where they are: "
        + "; ".join(f"`{one.name}`: {one.summary}" for one in REDUCTIONS.values())
        + ". Of no token there is no row.",
    )

    dtype: RowDType = "model"
    """dtype of the result; rounded to nearest even, behind the reduction. A value beyond the range
    of `float16` becomes infinite."""

    site: SiteChoice = RESID_POST
    """Place in the block, or a list of places: the same layers and tokens are kept of each.
    The result of `resid_post` is named `residual_stream`, the others as their site."""

    transport: Transport = Field(default="auto")
    """`inline`: base64 in the response; `binary`: a handle to fetch over HTTP. `auto` leaves it to
    the client; to a server it is `inline`."""

    @field_validator("layers", mode="before")
    @classmethod
    def _layers(cls, value: Any) -> Any:
        return parse_layers(value)

    @field_validator("site", mode="before")
    @classmethod
    def _site(cls, value: Any) -> Any:
        sites = [value] if isinstance(value, str) else value
        if not isinstance(sites, list | tuple) or not sites:
            raise ValueError(f"{shown(value)}; allowed are {', '.join(SITES)}, or a list of these")
        for site in sites:
            if not isinstance(site, str) or site not in SITES:
                raise ValueError(f"{shown(site)}; allowed are {', '.join(SITES)}")
        ordered = in_site_order(sites)
        return ordered[0] if len(ordered) == 1 else ordered

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites as a tuple."""
        return (self.site,) if isinstance(self.site, str) else self.site

    @field_validator("positions", mode="before")
    @classmethod
    def _positions(cls, value: Any) -> Any:
        found = parse_positions(value, field="positions", may_match=True)
        if isinstance(found, TokenMatch) and found.among == "completion":
            raise ValueError(
                "among='completion' belongs to edits: how many rows a capture has is known before "
                "tokens are sampled; capture 'completion', and take the rows of the ids you want"
            )
        return found

    @model_validator(mode="after")
    def _check_phase(self) -> Self:
        is_matched = isinstance(self.positions, TokenMatch)
        is_prompt = (
            is_matched or self.positions in ("prompt", "last_prompt") or is_mask(self.positions)
        )
        if (self.phase == "decode" and is_prompt) or (
            self.phase == "prefill" and self.positions == "completion"
        ):
            named = "a mask over the prompt" if is_mask(self.positions) else repr(self.positions)
            named = "tokens of the prompt that match" if is_matched else named
            raise ValueError(
                f"phase={self.phase!r} beside positions={named} selects no token; leave one of "
                "them out"
            )
        return self

    @property
    def is_plain(self) -> bool:
        """Whether vllm-lens has words for it: all tokens of `resid_post` as they are."""
        return (self.positions, self.site, self.phase, self.reduce, self.dtype) == (
            "all", RESID_POST, "both", "none", "model",
        )  # fmt: skip


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
