"""A cheap probe, and a judge where the probe is unsure: what it finds, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens.errors import SpecError
from inspect_lens.probe import Interval, rate_interval, split_classes


class CascadePoint(NamedTuple):
    """One setting of a probe-then-judge cascade: share sent to the judge, accuracy and cost."""

    share: float
    """Of samples that the judge reads: those nearest to the probe's threshold."""
    cost: float
    """Per sample, in the units given."""
    recall: float
    fpr: float
    balanced_accuracy: float
    recall_interval: Interval
    """Of the recall, two-sided, by group where groups are given."""
    fpr_interval: Interval
    """Of the false positive rate, likewise."""


def cascade_frontier(
    labels: ArrayLike,
    probe_scores: ArrayLike,
    judge_scores: ArrayLike,
    *,
    probe_threshold: float,
    judge_threshold: float,
    groups: Sequence[Hashable] | None = None,
    probe_cost: float = 0.0,
    judge_cost: float | ArrayLike = 1.0,
    shares: Sequence[float] = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0),
    confidence: float = 0.95,
) -> tuple[CascadePoint, ...]:
    """Find what a probe costs and catches if a judge decides the unsure samples.

    Scores of a real judge come from a log (`inspect_lens.scorer.read_cascade`), with what each of
    its answers cost. `inspect_lens.view.draw_cascade` draws the points.

    Args:
        labels: (samples,) 0 and 1, both.
        probe_scores: (samples,) float.
        judge_scores: (samples,) float.
        probe_threshold: flagged strictly above it.
        judge_threshold: of the judge.
        groups: (samples,) what is independent, such as the scenario; None takes samples.
        probe_cost: of a sample.
        judge_cost: of a sample that the judge reads; one number, or (samples,) such as the tokens
            that it read and wrote.
        shares: of samples that go to the judge.
        confidence: of the intervals.

    Returns:
        One point per share, ascending; the first is the probe alone, the last the judge alone
        where shares reach from 0 to 1. Distance to the threshold counts in ranks, so that the
        scale of the scores does not matter.

    Raises:
        SpecError: shapes disagree, a class is missing, a score is NaN, a share is none, or a cost
            is negative or not finite.

    Source:
        arXiv:2506.10805 and arXiv:2601.11516: probe, then language model.

    Example:
        ```python
        import numpy as np

        from inspect_lens.train import cascade_frontier

        rng = np.random.default_rng(0)
        labels = np.arange(200) % 2
        probe, judge = (rng.standard_normal(200) + strength * labels for strength in (1.0, 4.0))
        alone, *_, judged = cascade_frontier(
            labels, probe, judge, probe_threshold=0.5, judge_threshold=2.0
        )
        assert judged.balanced_accuracy > alone.balanced_accuracy
        assert judged.recall_interval.low < judged.recall < judged.recall_interval.high
        assert (alone.cost, judged.cost) == (0.0, 1.0)
        ```
    """
    positive, negative = split_classes(labels, probe_scores)
    split_classes(labels, judge_scores)
    if not positive.size or not negative.size or not all(0.0 <= s <= 1.0 for s in shares):
        raise SpecError(
            f"{positive.size} positive, {negative.size} negative samples, shares {list(shares)}; "
            "allowed are both classes, and shares from 0 to 1"
        )
    y = np.asarray(labels).astype(bool)
    names: Sequence[Hashable] = range(y.size) if groups is None else list(groups)
    cheap = np.asarray(probe_scores, dtype=np.float64)
    judged = np.asarray(judge_scores, dtype=np.float64) > judge_threshold
    spent = _costs(judge_cost, probe_cost, y.size)
    if len(names) != y.size:
        raise SpecError(f"groups: {len(names)} for {y.size} samples; allowed is one each")
    order = np.argsort(_distance(cheap, probe_threshold), kind="stable")
    points = []
    for share in sorted(shares):
        flagged = cheap > probe_threshold
        read = order[: math.ceil(share * y.size)]
        flagged[read] = judged[read]
        recall, fpr = float(flagged[y].mean()), float(flagged[~y].mean())
        by_class = [
            rate_interval(flagged[side], [names[i] for i in np.flatnonzero(side)],
                          confidence=confidence)
            for side in (y, ~y)
        ]  # fmt: skip
        points.append(
            CascadePoint(
                share=share,
                cost=probe_cost + float(spent[read].sum()) / y.size,
                recall=recall,
                fpr=fpr,
                balanced_accuracy=(recall + 1.0 - fpr) / 2.0,
                recall_interval=by_class[0],
                fpr_interval=by_class[1],
            )
        )
    return tuple(points)


def _costs(judge_cost: float | ArrayLike, probe_cost: float, n: int) -> NDArray[np.float64]:
    """What the judge costs for each sample, (samples,)."""
    given = np.asarray(judge_cost, dtype=np.float64)
    if given.shape not in ((), (n,)) or not (np.isfinite(given).all() and given.min() >= 0.0):
        raise SpecError(
            f"judge_cost: shape {given.shape} for {n} samples; allowed is one number or one per "
            "sample, each finite and 0 or more"
        )
    if not math.isfinite(probe_cost) or probe_cost < 0.0:
        raise SpecError(f"probe_cost={probe_cost!r}; allowed is a finite number, 0 or more")
    return np.broadcast_to(given, (n,))


def _distance(scores: NDArray[np.float64], threshold: float) -> NDArray[np.float64]:
    """How many samples lie between each score and the threshold."""
    ranked = np.sort(scores)
    edge = np.searchsorted(ranked, threshold, side="right")
    rank = np.searchsorted(ranked, scores, side="left")
    made: NDArray[np.float64] = np.abs(rank + 0.5 - edge)
    return made
