"""What the front-end has to know of the engine to judge a request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal, NamedTuple

__all__ = [
    "BLOCK_SITES",
    "RESID_POST",
    "SITES",
    "SITE_TABLE",
    "EngineFacts",
    "Site",
    "SiteInfo",
    "SiteWidth",
    "TapPoint",
    "in_site_order",
    "result_name",
    "rows_for",
    "tap_order",
    "tap_point",
    "tap_points",
]

Site = Literal[
    "resid_pre",
    "q",
    "k",
    "v",
    "z",
    "attn_out",
    "resid_mid",
    "router_logits",
    "mlp_hidden",
    "mlp_out",
    "resid_post",
]
"""Where a row comes from; `SITE_TABLE` says what each of them is."""

RESID_POST: Site = "resid_post"
"""The residual stream after a layer, the default site."""


class SiteInfo(NamedTuple):
    """What is known of a site without a model."""

    what: str
    """What a row is."""
    is_wide: bool = True
    """Whether its rows are as wide as the residual stream. Edits act at any site; steering
    vectors, probes and gates only where this is so."""
    is_sharded: bool = False
    """Whether each tensor-parallel rank has a part of the row."""
    choice: str = ""
    """Field of an edit that names parts of a row: `heads`, `neurons`, `experts`, or none."""


SITE_TABLE: Mapping[Site, SiteInfo] = MappingProxyType(
    {
        "resid_pre": SiteInfo("residual stream before the block"),
        "q": SiteInfo("queries of all heads, behind rotary embedding", False, True, "heads"),
        "k": SiteInfo("keys of all key heads, behind rotary embedding", False, True, "heads"),
        "v": SiteInfo("values of all key heads", False, True, "heads"),
        "z": SiteInfo("results of all heads, before the output projection", False, True, "heads"),
        "attn_out": SiteInfo("what the attention (or state-space) module returns"),
        "resid_mid": SiteInfo("residual stream between attention and feed-forward module"),
        "router_logits": SiteInfo("logits of the experts, one per expert", False, False, "experts"),
        "mlp_hidden": SiteInfo(
            "neurons: what goes into the down projection", False, True, "neurons"
        ),
        "mlp_out": SiteInfo("what the feed-forward module returns"),
        "resid_post": SiteInfo("residual stream after the block"),
    }
)
"""All sites, in the order in which a block computes them."""

SITES: tuple[Site, ...] = tuple(SITE_TABLE)
"""Names of all sites, in the order in which a block computes them."""

BLOCK_SITES: tuple[Site, ...] = ("resid_pre", "attn_out", "mlp_out", "resid_post")
"""Sites that every supported model has, or nearly so: those of `INSPECT_LENS_SITES=all`."""


class SiteWidth(NamedTuple):
    """How wide the rows of a site are in one model."""

    site: Site
    width: int
    """Numbers of a row, over all ranks."""
    shards: int = 1
    """Equal parts, in order, that different tensor-parallel ranks have; 1: each rank has it all."""
    heads: int = 0
    """Heads of a row, one behind the other; 0: it has none."""


class TapPoint(NamedTuple):
    """One place in the model that has, or may have, a tap."""

    site: Site
    layer: int
    """0-based global layer number."""


def tap_point(site: Site, layer: int) -> TapPoint:
    """The tap that serves a site.

    The stream before a block is the stream after the block below it, so only the first
    block needs a tap for `resid_pre`.
    """
    if site == "resid_pre" and layer > 0:
        return TapPoint("resid_post", layer - 1)
    return TapPoint(site, layer)


def tap_points(sites: Iterable[Site], layers: Iterable[int]) -> tuple[TapPoint, ...]:
    """The taps that serve some sites of some layers."""
    at = tuple(layers)
    return tuple(sorted({tap_point(site, layer) for site in sites for layer in at}, key=tap_order))


def tap_order(tap: TapPoint) -> tuple[int, int]:
    """Key that sorts taps in the order in which a forward pass meets them."""
    return tap.layer, SITES.index(tap.site)


def in_site_order(sites: Iterable[Site]) -> tuple[Site, ...]:
    """Put sites in the order of a block."""
    named = set(sites)
    return tuple(site for site in SITES if site in named)


def result_name(site: Site) -> str:
    """Name of a site's tensor among the activations of a result."""
    return "residual_stream" if site == RESID_POST else site


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """Facts of one engine; equal in the front-end and in its workers."""

    model: str
    """Model name or path that the engine was started with."""
    n_layers: int
    """Decoder layers of the model."""
    hidden: int
    """Width of the residual stream."""
    dtype: str
    """dtype of the residual stream, as `float32`, `float16` or `bfloat16`."""
    layers: tuple[int, ...]
    """Layers that were asked to be served, ascending (INSPECT_LENS_LAYERS)."""
    sites: tuple[Site, ...]
    """Sites that were asked to be served, in the order of a block (INSPECT_LENS_SITES)."""
    taps: tuple[TapPoint, ...]
    """Taps of the engine, in the order in which a forward pass meets them: those that serve
    `sites` at `layers`. On a pipeline each stage has those of its layers."""
    max_step_tokens: int
    """Tokens that one step of the engine can hold."""
    ring_rows: int
    """Rows, as wide as the stream, that the capture buffer holds: one for a token at a tap, and
    more where a site is wider."""
    bank_rows: int
    """Vectors that the steering table holds for all running requests together."""
    vllm_version: str
    """Version of vLLM."""
    least_step_tokens: int = 0
    """Tokens to which a step can be cut so that its rows fit the capture buffer; 0: as many as
    `max_step_tokens`, so that it cannot be."""
    ring_row_bytes: int = 0
    """Bytes of INSPECT_LENS_RING_BYTES that a row of the capture buffer takes; 0: not known."""
    max_positions: int = 0
    """Tokens that a request can have, prompt and completion; 0: not known."""
    is_speculative: bool = False
    """Whether a step may feed draft tokens that are rejected afterwards."""
    allows_code: bool = False
    """Whether requests may bring functions to run (INSPECT_LENS_ALLOW_CODE)."""
    has_latent_attention: bool = False
    """Whether attention keeps no keys per head (MLA)."""
    widths: tuple[SiteWidth, ...] = ()
    """Of the sites that are not as wide as the stream, or that ranks share."""
    ranks: int = 1
    """Tensor-parallel ranks."""
    vocab: int = 0
    """Tokens of the model's vocabulary; 0: not known."""
    no_lens: str = ""
    """Why the engine cannot read rows with its unembedding, or empty where it can."""
    no_steering: str = ""
    """Why the engine's requests must not be steered, or empty where they may be."""

    @cached_property
    def _tapped(self) -> frozenset[TapPoint]:
        return frozenset(self.taps)

    def has_tap(self, tap: TapPoint) -> bool:
        """Whether the engine has a tap."""
        return tap in self._tapped

    @cached_property
    def _widths(self) -> dict[Site, SiteWidth]:
        return {width.site: width for width in self.widths}

    def width_of(self, site: Site) -> SiteWidth:
        """How wide the rows of a site are."""
        return self._widths.get(site) or SiteWidth(site, self.hidden)

    def rows_of(self, taps: Iterable[TapPoint]) -> int:
        """Rows of the capture buffer, as wide as the stream, that a token takes at some taps."""
        return sum(rows_for(self.width_of(tap.site), self.hidden) for tap in taps)


def rows_for(width: SiteWidth, hidden: int) -> int:
    """Rows of the capture buffer that a token of one rank takes at a site."""
    return -(-(width.width // width.shards) // hidden)
