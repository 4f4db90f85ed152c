"""How long a monitor takes to raise the alarm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens.errors import SpecError
from inspect_lens.probe.statistics._intervals import clopper_pearson
from inspect_lens.probe.statistics._measured import Interval

from ._pool import Pool
from ._streaming import first_crossing

__all__ = ["AlarmDelays", "alarm_delays"]


class AlarmDelays(NamedTuple):
    """How many tokens after the onset a monitor raised its alarm, for a set of samples."""

    tokens: NDArray[np.float64]
    """(samples,) tokens from the onset to the alarm; NaN without an alarm."""
    detected: float
    """Share of samples with an alarm at or after the onset."""
    interval: Interval
    """Of that share."""
    early: float
    """Share of samples with an alarm before the onset: false alarms."""
    median: float
    """Of the delays of the detected; NaN when there are none."""


def alarm_delays(
    token_scores: Sequence[ArrayLike],
    threshold: float,
    *,
    onsets: Sequence[int] | None = None,
    pool: str | Pool = "last",
) -> AlarmDelays:
    """Count the tokens between the onset of the behaviour and the first alarm.

    Args:
        token_scores: per sample (tokens,) float, in the order of the tokens.
        threshold: the alarm is raised strictly above it.
        onsets: per sample, the token from which an alarm is right; 0 by default.
        pool: what the monitor compares, as in `first_crossing`.

    Returns:
        Delays in tokens; 0 means at the onset itself.

    Raises:
        SpecError: no sample, a sample without tokens, or an onset that is outside its sample.

    Example:
        ```python
        from inspect_lens.probe import alarm_delays

        scores = [[0.0, 0.2, 0.9, 1.5], [0.0, 0.1, 0.0, 0.2]]
        delays = alarm_delays(scores, threshold=0.5, onsets=[1, 1])
        assert delays.detected == 0.5  # the first, one token behind its onset
        ```
    """
    starts = [0] * len(token_scores) if onsets is None else list(onsets)
    if len(starts) != len(token_scores) or not starts:
        raise SpecError(
            f"onsets: {len(starts)} for {len(token_scores)} samples; allowed is one each, and at "
            "least one sample"
        )
    delays = np.full(len(starts), math.nan)
    early = 0
    for i, (scores, onset) in enumerate(zip(token_scores, starts, strict=True)):
        if not 0 <= onset < max(np.size(scores), 1):
            raise SpecError(
                f"onsets[{i}]={onset}; allowed is 0 to {np.size(scores) - 1}; an onset is a token "
                "of its sample"
            )
        alarm = first_crossing(scores, threshold, pool=pool)
        if alarm is None:
            continue
        if alarm >= onset:
            delays[i] = alarm - onset
        else:
            early += 1
    found = delays[~np.isnan(delays)]
    return AlarmDelays(
        tokens=delays,
        detected=found.size / len(starts),
        interval=clopper_pearson(found.size, len(starts)),
        early=early / len(starts),
        median=float(np.median(found)) if found.size else math.nan,
    )
