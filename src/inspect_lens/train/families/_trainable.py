"""What every family has, so that it can be fitted, chosen by name and frozen into a probe."""

from __future__ import annotations

from typing import Any, Literal, Protocol, Self

from inspect_lens.probe import AnyProbe, ProbeCard

__all__ = ["Rows", "TrainableProbe"]

Rows = Literal["tokens", "mean", "last"]
"""What one row of a fit is: a token, or the mean or the last token of a sample."""


class TrainableProbe(Protocol):
    """Interface of every probe family: `fit`, and `to_probe`."""

    reads: Literal["tokens", "sequences"]

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Fit the classifier to activations and labels.

        Args:
            X: rows (rows, hidden), or sequences (tokens, hidden), as `reads` says.
            y: one of two classes for each.
            groups: what must not straddle a split of the family's own.

        Returns:
            self.
        """

    def to_probe(self, card: ProbeCard) -> AnyProbe:
        """Make a `Probe` of the fitted weights."""
