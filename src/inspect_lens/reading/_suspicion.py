"""From a probe's score to the suspicion of a monitor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Self, get_args

from inspect_lens.errors import SpecError

from ._cut import Cut
from ._reader import ProbeReader

__all__ = ["Scale", "Suspicion"]

Scale = Literal["threshold", "raw"]
"""`threshold`: between 0 and 1, one half at the threshold; `raw`: the probe's own score."""


@dataclass(frozen=True)
class Suspicion:
    """Map from scores to suspicion: larger means more suspicious, in either scale.

    With `threshold` it is sigmoid(score - threshold): a score that the card flags is above 0.5
    and no other is, so protocols that act above one half act at the card's false positive
    rate. It is not a probability. With `raw` it is the score itself.

    Example:
        ```python
        from inspect_lens.reading import ProbeReader, Suspicion

        reader = ProbeReader.of("organism/deception-lr")
        suspicion = Suspicion.of(reader, scale="threshold")
        assert suspicion(reader.threshold.value) == 0.5
        assert suspicion(reader.threshold.value + 3) > 0.9
        ```
    """

    scale: Scale
    threshold: float | None
    """Score that maps to one half; None on the raw scale."""

    @classmethod
    def of(cls, reader: ProbeReader, *, scale: Scale, threshold: Cut = None) -> Self:
        """Settle the scale of a reader.

        Args:
            reader: whose scores come.
            scale: of the suspicion.
            threshold: score that maps to one half, or the operating point that the reader was
                made with; that of the probe's card by default.

        Returns:
            The map.

        Raises:
            SpecError: the scale is unknown, or needs a threshold and there is none, or is `raw` and
                takes none.
        """
        if scale not in get_args(Scale):
            raise SpecError(f"scale={scale!r}; allowed are {', '.join(get_args(Scale))}")
        if scale == "raw" and threshold is not None:
            raise SpecError(
                f"threshold={threshold!r}: with scale='raw' the suspicion is the score itself, and "
                "nothing is compared; allowed is scale='threshold', or no threshold"
            )
        if scale == "raw":
            return cls(scale, None)
        stored = reader.threshold.value if reader.threshold else None
        cut = stored if threshold is None or isinstance(threshold, str) else threshold
        if cut is None:
            raise SpecError(
                f"scale='threshold': probe {reader.probe.name!r} has no threshold for these "
                "settings; pass threshold=, calibrate the probe, or use scale='raw'"
            )
        return cls(scale, cut)

    def __call__(self, score: float) -> float:
        """The suspicion of one score."""
        if self.threshold is None:
            return score
        return 0.5 * (1.0 + math.tanh(0.5 * (score - self.threshold)))
