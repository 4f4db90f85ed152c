"""What a page shows: series of token scores, and samples with their calls, turns and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["CallView", "Origin", "SampleView", "Series", "TurnView"]

Origin = Literal["activations", "kept", "none"]
"""Computed here from activations; read from the files in which scorers kept them; or nowhere,
because the call's activations are not here and no scorer kept its scores."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One number per token: a probe at one of its layers, or over all of them."""

    probe: str
    layer: int | None
    """None: all layers of the probe, as it scores samples."""
    layers: tuple[int, ...]
    sha256: str
    pool: str
    positions: str
    threshold: float | None
    """Of the pooled value, in the unit of the token scores; None at a single layer of several."""
    fpr: float | None
    description: str
    finds: str = ""
    """How many positives the threshold finds, in a sentence; empty where its card does not say."""
    neural: bool = False
    """Token values of a probe that weighs tokens are those before the weights."""


@dataclass(frozen=True)
class TurnView:
    """A run of tokens of one speaker."""

    role: str
    start: int
    """First token, in the sample's own numbering."""
    stop: int
    generated: bool
    """Written by the model in this call."""


@dataclass(frozen=True, kw_only=True)
class CallView:
    """One model call; tokens that the call before ended with are not repeated."""

    start: int
    """First of its tokens, in the sample's own numbering."""
    folded: int
    """Tokens at the beginning of the prompt that stand in the call before."""
    n_prompt: int
    n_completion: int
    values: tuple[float | None, ...]
    """Pooled score by series; None where the call has not all that the probe reads."""
    turns: tuple[TurnView, ...]
    origin: Origin = "activations"
    """Where its token scores come from."""
    positions: tuple[int, ...] = ()
    """Position of each token in the call, -1 for text without one; empty where its tokens are
    shown in order from `folded` on."""


@dataclass(frozen=True, kw_only=True)
class SampleView:
    """One sample of the log."""

    id: str
    epoch: int
    label: Any
    target: str
    preview: str
    scores: dict[str, Any]
    """Every score of the log, dict scores as `scorer.key`; numbers, text or None."""
    calls: Sequence[CallView]
    token_ids: NDArray[np.int64]
    """(tokens,) of all calls, one after the other."""
    tokens: Sequence[str]
    """(tokens,) their texts."""
    special: NDArray[np.bool_]
    """(tokens,) marks of the template."""
    token_scores: NDArray[np.float32] = field(repr=False)
    """(series, tokens); NaN where a token was not captured."""
    kept_by: tuple[str, ...] = ()
    """Scorers whose files gave token scores to calls without activations."""
    lost: str = ""
    """Address of the first file of token scores that the log refers to and that is not here."""

    @property
    def values(self) -> tuple[float | None, ...]:
        """Pooled score by series, of the last call, as scorers read it."""
        return self.calls[-1].values if self.calls else ()
