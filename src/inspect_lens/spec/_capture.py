"""What activations a request wants back, what is made of them, and where else they go."""

from __future__ import annotations

from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, StrictStr, field_validator, model_validator

from ._engine import RESID_POST, SITE_TABLE, SITES, Site, in_site_order
from ._positions import Phase, Positions, TokenMatch, is_mask, parse_positions
from ._values import Flag, Name, Value, integers, layer_numbers, shown

if TYPE_CHECKING:
    import torch

__all__ = [
    "QK_NAMES",
    "REDUCTIONS",
    "CaptureSpec",
    "Layers",
    "QKReceipt",
    "QKSpec",
    "Reduce",
    "Reduction",
    "RowDType",
    "SinkReceipt",
    "SinkStatus",
    "SinkUse",
    "SiteChoice",
    "names_heads",
]

Reduce = Literal["none", "mean", "last", "max", "norm"]
"""How the engine reduces the rows of the selected tokens before it returns them."""


class Reduction:
    """One value of `reduce=`.

    To add one, write a subclass here, and put its name into `Reduce`. The tables of the
    documentation and the schemas are made of it.

    Example:
        ```python
        from inspect_lens.spec import REDUCTIONS

        mean = REDUCTIONS["mean"]
        print(mean.combine, mean.columns(256))
        ```
    """

    name: ClassVar[Reduce]
    summary: ClassVar[str]
    """What it is, as a clause."""
    combine: ClassVar[Literal["sum", "max"] | None] = None
    """How the numbers of several tokens become one row: summed in float32 at least, or the largest
    of each; None where each token keeps its own."""
    picks_last: ClassVar[bool] = False
    """Whether the result is that of the last token alone."""
    width: ClassVar[int | None] = None
    """Numbers of a row of the result; None for as many as the site has."""

    @cached_property
    def makes_numbers(self) -> bool:
        """Whether other numbers are made of a row; else the result of a single row is this row."""
        return type(self).on_device is not Reduction.on_device

    @property
    def shape(self) -> str:
        """Shape of the result of a site, in words."""
        is_one = self.combine is not None or self.picks_last
        return f"(layers, {1 if is_one else 'tokens'}, {self.width or 'hidden'})"

    @property
    def has_rows(self) -> bool:
        """Whether the result has rows of the stream as they are."""
        return self.combine is None and not self.makes_numbers

    def columns(self, hidden: int) -> int:
        """How many numbers `on_device` makes of a row of `hidden`."""
        return self.width or hidden

    def on_device(self, torch: Any, rows: torch.Tensor) -> torch.Tensor:
        """Make (…, tokens, `columns(hidden)`) numbers of rows, on the worker's device.

        Args:
            torch: the module, which this package does not import.
            rows: (…, tokens, hidden).
        """
        return rows

    def finish(self, combined: NDArray[Any], n: int) -> NDArray[Any]:
        """Make the result (width,) of what was combined.

        Args:
            combined: (width,), in float64 for a sum.
            n: tokens that it was combined of.
        """
        return combined

    def join(self, parts: NDArray[np.float32]) -> NDArray[np.float32]:
        """Join what a reduction with a `width` made of (layers, parts, tokens, width) of wide rows.

        The result is (layers, tokens, width).
        """
        raise NotImplementedError


class _None(Reduction):
    name = "none"
    summary = "the rows as they are"


class _Mean(Reduction):
    name = "mean"
    summary = "their mean, summed in float32 at least"
    combine = "sum"

    def finish(self, combined: NDArray[Any], n: int) -> NDArray[Any]:
        return combined / n


class _Last(Reduction):
    name = "last"
    summary = "the row of the last token"
    picks_last = True


class _Max(Reduction):
    name = "max"
    summary = "the largest value of each coordinate"
    combine = "max"


class _Norm(Reduction):
    name = "norm"
    summary = "the Euclidean norm of each row, computed in float32"
    width = 1

    def on_device(self, torch: Any, rows: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float32)  # type: ignore[no-any-return]

    def join(self, parts: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.asarray(np.linalg.norm(parts, axis=1))


REDUCTIONS: Final = MappingProxyType({one.name: one() for one in Reduction.__subclasses__()})
"""By name."""

SiteChoice = Site | tuple[Site, ...]
"""One site, or several in the order of `SITES`."""

RowDType = Literal["model", "float32", "bfloat16", "float16"]
"""dtype of a result; `model` is that of the residual stream in the engine."""

Transport = Literal["auto", "inline", "binary"]
"""How a result travels: in the response, or beside it."""


def _parse_layers(value: Any) -> Any:
    """Layers as users write them: `all` or true, a number, or a list of numbers."""
    return "all" if value is True else layer_numbers(value)


Layers = Annotated[Literal["all"] | tuple[int, ...], BeforeValidator(_parse_layers)]
"""`all`, or 0-based global layer numbers."""


class CaptureSpec(Value):
    """Capture of one or more sites at some layers for some tokens.

    Example:
        ```python
        from inspect_lens import CaptureSpec, LensRequest

        capture = CaptureSpec(layers=[4, 2], positions="completion", reduce="mean", dtype="float32")
        assert capture.layers == (2, 4)
        request = LensRequest(capture=capture)  # extra_args={"inspect_lens": request}
        ```
    """

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
        + "; ".join(f"`{one.name}`: {one.summary}, {one.shape}" for one in REDUCTIONS.values())
        + ". Of no token there is no row.",
    )

    dtype: RowDType = "model"
    """dtype of the result; rounded to nearest even, behind the reduction. A value beyond the range
    of `float16` becomes infinite."""

    site: SiteChoice = RESID_POST
    """Place in the block, or a list of places: the same layers and tokens are kept of each.
    The result of `resid_post` is named `residual_stream`, the others as their site."""

    heads: tuple[int, ...] | None = None
    """Heads to return, 0-based, at `q`, `k`, `v` or `z`, where `k` and `v` count key heads; None
    returns all of the row. Only their numbers leave the device. The result is as wide as these
    heads together, in the order in which they are named."""

    transport: Transport = Field(default="auto")
    """`inline`: base64 in the response; `binary`: a handle to fetch over HTTP. `auto` leaves it to
    the request's other tensors, since all travel alike, and then to the client; to a server it is
    `inline`."""

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

    @field_validator("heads", mode="before")
    @classmethod
    def _heads(cls, value: Any) -> Any:
        heads = integers(value)
        if heads is None or (isinstance(heads, tuple) and heads and len({*heads}) == len(heads)):
            return heads
        raise ValueError(f"{shown(value)}; name at least one head, such as [3], and each once")

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        whole = [site for site in self.sites if SITE_TABLE[site].choice != "heads"]
        if self.heads is not None and whole:
            raise ValueError(
                f"heads beside site={whole[0]!r}, whose rows have no heads; capture q, k, v or z, "
                "or leave heads out"
            )
        return self

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
        named = repr(self.positions)
        if isinstance(self.positions, TokenMatch):
            named = "tokens of the prompt that match"
        elif is_mask(self.positions):
            named = "a mask over the prompt"
        elif self.positions not in ("prompt", "last_prompt", "completion"):
            return self
        if self.phase == ("prefill" if self.positions == "completion" else "decode"):
            raise ValueError(
                f"phase={self.phase!r} beside positions={named} selects no token; leave one of "
                "them out"
            )
        return self

    @property
    def made_of_all(self) -> str | None:
        """What makes its result one row of several tokens, in words; None where each has a row."""
        reduction = REDUCTIONS[self.reduce]
        if reduction.combine is not None or reduction.picks_last:
            return f"reduce={self.reduce!r}"
        return "positions='last'" if self.positions == "last" else None

    @property
    def is_plain(self) -> bool:
        """Whether vllm-lens has words for it: all tokens of `resid_post` as they are."""
        return (self.positions, self.site, self.phase, self.reduce, self.dtype, self.heads) == (
            "all", RESID_POST, "both", "none", "model", None,
        )  # fmt: skip


QK_NAMES: Final = ("attn_q", "attn_k")
"""Names of queries and keys among the activations of a result."""

_LISTS: Final = (list, tuple, np.ndarray)


def names_heads(value: object) -> bool:
    """Whether what asks for queries and keys lists heads, as (layer, head), and not layers.

    Args:
        value: `True`, layers, or heads.
    """
    return isinstance(value, _LISTS) and any(isinstance(one, _LISTS) for one in value)


class QKSpec(Value):
    """Queries and keys of some layers, or of some heads, for all tokens that are fed.

    They are captured at the sites `q` and `k`, which the engine has to serve
    (`INSPECT_LENS_SITES`).

    They are those that the attention kernel gets: after the rotary embedding and any
    normalisation. The result has `attn_q` (layers ascending, tokens, query heads, head size),
    `attn_k` (layers ascending, tokens, key heads, head size), `qk_layers`, and `qk_meta`: per
    layer what else the pattern depends on (`scale`, `logits_soft_cap`, `sliding_window` as
    (left, right) with -1 for no limit, `attention_chunk_size`, `alibi_slopes`, `sinks`,
    `num_heads`, `num_kv_heads`, `head_size`). `inspect_lens.attention` makes patterns of them.

    With `heads`, only these leave the device: `attn_q` is (heads, tokens, head size) and `attn_k`
    (key heads, tokens, head size). `qk_heads` and `qk_key_heads` say which they are, as (layer,
    head) ascending. A key head that serves several of the query heads comes once.

    Source:
        Names and meaning are those of vllm-lens 1.3.0, which returns all heads.

    Example:
        ```python
        from inspect_lens import LensRequest
        from inspect_lens.spec import QKSpec

        request = LensRequest(qk=QKSpec(layers=[2]))
        assert request.qk.layers == (2,)
        few = LensRequest(qk=QKSpec(heads=[(5, 18), (2, 7)]))
        assert few.qk.heads == ((2, 7), (5, 18))
        ```
    """

    layers: Layers = "all"
    """`all` layers with softmax attention, or layer numbers."""

    heads: tuple[tuple[int, int], ...] | None = None
    """Query heads as (layer, head), both 0-based; with each comes the key head that it reads. None
    returns all heads of `layers`, which has to be left out beside them."""

    transport: Transport = Field(default="auto")
    """As in `CaptureSpec`."""

    @field_validator("heads", mode="before")
    @classmethod
    def _heads(cls, value: Any) -> Any:
        if value is None:
            return None
        listed = [integers(pair) for pair in value] if isinstance(value, _LISTS) else []
        pairs = [pair for pair in listed if isinstance(pair, tuple) and len(pair) == 2]
        if not pairs or len(pairs) < len(listed):
            raise ValueError(
                f"{shown(value)}; name at least one head as (layer, head), such as [[5, 18]]"
            )
        return tuple(sorted(set(pairs)))

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        if self.heads is not None and self.layers != "all":
            raise ValueError("layers beside heads: each head names its layer; leave layers out")
        return self

    def layers_of(self, served: tuple[int, ...]) -> tuple[int, ...]:
        """The layers that are read of those that an engine serves, ascending."""
        if self.heads is not None:
            return tuple(sorted({layer for layer, _ in self.heads}))
        return served if self.layers == "all" else self.layers


class QKReceipt(Value):
    """Part of the receipt about captured queries and keys."""

    layers: tuple[int, ...]
    """Layers, ascending."""
    heads: tuple[tuple[int, int], ...] | None = None
    """Query heads that came, as (layer, head) ascending; None for all of `layers`."""
    n_positions: int
    """Tokens, from position 0."""
    dtype: str


SinkStatus = Literal["written", "queued", "spilled", "sampled_out", "dropped", "failed"]
"""What became of a request's rows at a sink.

`written`: a finished shard has them, or the function has returned. `queued`: in memory, in the
next shard. `spilled`: on a disk of the server, and to be written later, also after a restart.
`sampled_out` and `dropped`: the sink was slow, and they are gone. `failed`: it could not take them.
"""

_Text = Annotated[StrictStr, Field(max_length=256)]


class SinkUse(Value):
    """How one request uses a sink: a store or a function on the server's side.

    The operator of the server says what a sink records (layers, site, tokens) and where to. A
    request gives the sink's name, and what a training set has to know of the sample.

    Example:
        ```python
        from inspect_lens import LensRequest

        request = LensRequest(sink={"name": "recorded", "label": True, "group": "town-3"})
        assert request.sink.wait
        ```
    """

    name: Name
    """Name of the sink, as `GET /v1/inspect_lens` lists it."""
    id: _Text | None = Field(default=None, min_length=1)
    """Id of the sample; without it that of the request."""
    label: Flag | None = None
    """Label of the sample, for training."""
    group: _Text | None = Field(default=None, min_length=1)
    """Samples that belong together, such as those of one question; without it the id."""
    columns: dict[_Text, _Text] = Field(default_factory=dict, max_length=16)
    """Further columns of the sample, at most 16; names and texts of at most 256 characters."""
    wait: Flag = True
    """Answer when the rows are written or lost, so that the receipt says which. Otherwise the
    answer comes at once, and rows that wait for the next shard are `queued`."""


class SinkReceipt(Value):
    """Part of the receipt about a sink: what became of the request's rows there."""

    name: str
    """Of the sink."""
    status: SinkStatus
    rows: int = 0
    """Tokens that were handed over."""
    shard: str | None = None
    """File that has them, relative to the store; None where none has."""
    reason: str | None = None
    """Why they are not `written`."""
