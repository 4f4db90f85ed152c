"""Named places in the residual stream, and the taps that read them."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["RESID_POST", "SITES", "Site", "TapPoint", "tap_point"]

Site = Literal["resid_pre", "attn_out", "mlp_out", "resid_post"]
"""Where a row comes from. `resid_pre` and `resid_post` are the residual stream before and after
a decoder block, before any norm; `attn_out` and `mlp_out` are what the block's attention (or
state-space) and feed-forward modules return."""

RESID_POST: Site = "resid_post"

SITES: tuple[Site, ...] = ("resid_pre", "attn_out", "mlp_out", "resid_post")
"""All sites, in the order in which a block computes them."""


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
