"""What the front-end has to know of the engine to judge a request."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ._sites import Site, TapPoint

__all__ = ["EngineFacts"]


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
    """Rows (one token at one layer) that the capture buffer holds."""
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

    @cached_property
    def _tapped(self) -> frozenset[TapPoint]:
        return frozenset(self.taps)

    def has_tap(self, tap: TapPoint) -> bool:
        """Whether the engine has a tap."""
        return tap in self._tapped
