"""What the front-end has to know of the engine to judge a request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ._sites import Site, SiteWidth, TapPoint

__all__ = ["EngineFacts", "rows_for"]


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
    """Rows of the capture buffer that a token of one rank takes at a site.

    Args:
        width: of the site.
        hidden: width of the buffer's rows.

    Returns:
        Their number; the last one may be filled in part.

    Example:
        ```python
        from inspect_lens.spec import SiteWidth, rows_for

        assert rows_for(SiteWidth("mlp_hidden", 14336), hidden=4096) == 4
        assert rows_for(SiteWidth("mlp_hidden", 14336, shards=2), hidden=4096) == 2
        ```
    """
    return -(-(width.width // width.shards) // hidden)
