"""Named places in a decoder block, the taps that read them, and how their results are named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

__all__ = [
    "BLOCK_SITES",
    "RESID_POST",
    "SITES",
    "SITE_TABLE",
    "Site",
    "SiteInfo",
    "SiteWidth",
    "TapPoint",
    "in_site_order",
    "result_name",
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

    Args:
        site: the site.
        layer: 0-based global layer number.

    Returns:
        The tap.

    Example:
        ```python
        from inspect_lens.spec import tap_point

        # The stream before block 3 is the stream after block 2.
        assert tap_point("resid_pre", 3) == ("resid_post", 2)
        ```
    """
    if site == "resid_pre" and layer > 0:
        return TapPoint("resid_post", layer - 1)
    return TapPoint(site, layer)


def tap_points(sites: Iterable[Site], layers: Iterable[int]) -> tuple[TapPoint, ...]:
    """The taps that serve some sites of some layers.

    Args:
        sites: the sites.
        layers: 0-based global layer numbers.

    Returns:
        The taps, each once, in tap order.

    Example:
        ```python
        from inspect_lens.spec import tap_points

        assert len(tap_points(["resid_pre", "resid_post"], [2, 3])) == 3
        ```
    """
    at = tuple(layers)
    return tuple(sorted({tap_point(site, layer) for site in sites for layer in at}, key=tap_order))


def tap_order(tap: TapPoint) -> tuple[int, int]:
    """Key that sorts taps in the order in which a forward pass meets them.

    Args:
        tap: the tap.

    Returns:
        The key.

    Example:
        ```python
        from inspect_lens.spec import TapPoint, tap_order

        taps = [TapPoint("resid_post", 1), TapPoint("mlp_out", 1), TapPoint("resid_post", 0)]
        assert [tap.layer for tap in sorted(taps, key=tap_order)] == [0, 1, 1]
        ```
    """
    return tap.layer, SITES.index(tap.site)


def in_site_order(sites: Iterable[Site]) -> tuple[Site, ...]:
    """Put sites in the order of a block.

    Args:
        sites: some sites.

    Returns:
        The sites without repeats, in the order of `SITES`.

    Example:
        ```python
        from inspect_lens.spec import in_site_order

        assert in_site_order(["resid_post", "attn_out"]) == ("attn_out", "resid_post")
        ```
    """
    named = set(sites)
    return tuple(site for site in SITES if site in named)


def result_name(site: Site) -> str:
    """Name of a site's tensor among the activations of a result.

    Args:
        site: the site.

    Returns:
        The site itself; `residual_stream` for `resid_post`, as in vllm-lens.

    Example:
        ```python
        from inspect_lens.spec import result_name

        assert result_name("resid_post") == "residual_stream"
        assert result_name("attn_out") == "attn_out"
        ```
    """
    return "residual_stream" if site == RESID_POST else site
