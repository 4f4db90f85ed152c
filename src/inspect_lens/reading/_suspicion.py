"""From a probe's score to the suspicion of a monitor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Self, get_args

from inspect_lens.errors import SpecError

from ._reader import ProbeReader
from ._threshold import ThresholdLike, acting_value

__all__ = ["Suspicion", "SuspicionUnit"]

SuspicionUnit = Literal["threshold", "raw"]
"""`threshold`: between 0 and 1, one half at the threshold; `raw`: the probe's own score."""


@dataclass(frozen=True)
class Suspicion:
    """Map from scores to suspicion: larger means more suspicious, in either unit.

    With `threshold` it is sigmoid(score - threshold): a score that the card flags is above 0.5
    and no other is, so protocols that act above one half act at the card's false positive
    rate. It is not a probability. With `raw` it is the score itself.

    Example:
        ```python
        from inspect_lens.reading import ProbeReader, Suspicion

        reader = ProbeReader.of("organism/deception-lr")
        suspicion = Suspicion.of(reader, unit="threshold")
        assert suspicion(reader.threshold.value) == 0.5
        assert suspicion(reader.threshold.value + 3) > 0.9
        ```
    """

    unit: SuspicionUnit
    threshold: float | None
    """Score that maps to one half; None on the raw unit."""

    @classmethod
    def of(
        cls, reader: ProbeReader, *, unit: SuspicionUnit, threshold: ThresholdLike = None
    ) -> Self:
        """Settle the unit of a reader.

        Args:
            reader: whose scores come.
            unit: of the suspicion.
            threshold: score that maps to one half, or the operating point that the reader was
                made with; that of the probe's card by default.

        Returns:
            The map.

        Raises:
            SpecError: the unit is unknown, or needs a threshold and there is none, or is `raw` and
                takes none.
        """
        if unit not in get_args(SuspicionUnit):
            raise SpecError(f"unit={unit!r}; allowed are {', '.join(get_args(SuspicionUnit))}")
        if unit == "raw" and threshold is not None:
            raise SpecError(
                f"threshold={threshold!r}: with unit='raw' the suspicion is the score itself, and "
                "nothing is compared; allowed is unit='threshold', or no threshold"
            )
        if unit == "raw":
            return cls(unit, None)
        try:
            return cls(unit, acting_value(reader, threshold))
        except SpecError as error:
            raise SpecError(f"unit='threshold': {error}; or use unit='raw'") from None

    def __call__(self, score: float) -> float:
        """The suspicion of one score."""
        if self.threshold is None:
            return score
        return 0.5 * (1.0 + math.tanh(0.5 * (score - self.threshold)))
