"""More about a ranking: its ROC curve, partial area, precision; and whether probabilities hold."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens._base.arguments import judged_arguments
from inspect_lens.errors import SpecError

from ._compare import draw_samples, draws_of
from ._metrics import check_level, midranks, split_classes

__all__ = [
    "ROCCurve",
    "Reliability",
    "average_precision",
    "brier_score",
    "expected_calibration_error",
    "partial_auroc",
    "recall_draws",
    "reliability_curve",
    "roc_band",
    "roc_curve",
]

Floats = NDArray[np.float64]


class ROCCurve(NamedTuple):
    """Operating points of all thresholds, from none flagged to all flagged."""

    fpr: Floats
    tpr: Floats
    thresholds: Floats
    """A point flags scores at or above its threshold; the first is infinite."""


def roc_curve(labels: ArrayLike, scores: ArrayLike) -> ROCCurve:
    """ROC curve with one point per distinct score.

    Args:
        labels: (samples,) 0 and 1, both.
        scores: (samples,) float.

    Raises:
        SpecError: shapes disagree, a score is NaN, or a class is missing.

    Example:
        ```python
        from inspect_lens.probe import roc_curve

        curve = roc_curve([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8])
        assert curve.tpr.tolist() == [0.0, 0.5, 0.5, 1.0, 1.0]
        ```
    """
    _both(labels, scores)
    y, s = np.asarray(labels).astype(bool), np.asarray(scores, dtype=np.float64)
    order, ends = _falling(s)
    alarms, hits = (_counted(side[order], ends) for side in (~y, y))
    values = np.concatenate([[np.inf], s[order][ends]])
    return ROCCurve(alarms / alarms[-1], hits / hits[-1], values)


@judged_arguments
def roc_band(
    labels: ArrayLike,
    scores: ArrayLike,
    *,
    grid: ArrayLike | None = None,
    groups: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    n_resamples: int = 1000,
    seed: int = 0,
) -> tuple[Floats, Floats, Floats]:
    """Pointwise bootstrap band of the ROC curve: the grid, the lower and the upper recalls there.

    Args:
        labels: (samples,) 0 and 1, both.
        scores: (samples,) float.
        grid: (points,) false positive rates; 101 from 0 to 1 by default.
        groups: (samples,) clusters to draw instead of samples.
        confidence: of each point.
        n_resamples: draws.
        seed: of the generator.

    Raises:
        SpecError: as `roc_curve`, or groups do not fit.

    Example:
        ```python
        import numpy as np

        from inspect_lens.probe import roc_band

        labels = np.arange(80) % 2
        scores = np.random.default_rng(0).standard_normal(80) + labels
        grid, low, high = roc_band(labels, scores, grid=[0.1, 0.5], n_resamples=200)
        assert (low <= high).all()
        ```
    """
    _both(labels, scores)
    level = check_level(confidence)
    y, s = np.asarray(labels).astype(bool), np.asarray(scores, dtype=np.float64)
    at = np.linspace(0.0, 1.0, 101) if grid is None else np.asarray(grid, dtype=np.float64)
    order, ends = _falling(s)
    curves = []
    for weights in draw_samples(y, groups, n_resamples=n_resamples, seed=seed):
        counts = (_counted((weights * side)[:, order], ends) for side in (~y, y))
        for alarms, hits in zip(*counts, strict=True):
            # The last point at or below each rate: the step function that the data say.
            last = np.searchsorted(alarms / alarms[-1], at, side="right") - 1
            curves.append(hits[last] / hits[-1])
    low, high = np.quantile(curves, [(1.0 - level) / 2.0, (1.0 + level) / 2.0], axis=0)
    return at, np.asarray(low), np.asarray(high)


def recall_draws(
    positives: ArrayLike,
    control: ArrayLike,
    fpr: float,
    *,
    groups: Sequence[Hashable] | None = None,
    control_groups: Sequence[Hashable] | None = None,
    n_draws: int = 400,
    seed: int = 0,
) -> Floats:
    """Recalls (n_draws,) at a rate, in bootstrap draws of the positives and of a control set.

    Each draw has the conformal threshold of its own control samples, or their largest score where
    these are too few for the rate. The same seed draws the same samples.

    Args:
        positives: (samples,) scores.
        control: (n,) scores of harmless samples.
        fpr: the rate.
        groups: (samples,) groups to draw instead of positives.
        control_groups: (n,) groups to draw instead of control samples.
        n_draws: of both sets.
        seed: of the generator.

    Raises:
        SpecError: a set is empty or holds NaN, or the rate is not inside (0, 1).

    Example:
        ```python
        import numpy as np

        from inspect_lens.probe import recall_draws

        rng = np.random.default_rng(0)
        found = recall_draws(rng.standard_normal(50) + 3, rng.standard_normal(300), fpr=0.05)
        assert found.shape == (400,)
        assert 0.8 < found.mean() < 1.0
        ```
    """
    rng = np.random.default_rng(seed)
    ranked, high = (np.asarray(s, dtype=np.float64) for s in (control, positives))
    for name, values in (("positives", high), ("control", ranked)):
        if values.ndim != 1 or not values.size or np.isnan(values).any():
            raise SpecError(f"{name}: shape {values.shape}; allowed are (n,) scores without NaN")
    if not 0.0 < fpr < 1.0:
        raise SpecError(f"fpr={fpr}; allowed is a number between 0 and 1")
    order, at_or_below = np.argsort(ranked, kind="stable"), np.argsort(high, kind="stable")
    thresholds = []
    for weights in draws_of(ranked.size, control_groups, n_draws, rng):
        total = np.cumsum(weights[:, order], axis=1)
        n = total[:, -1:]
        rank = np.minimum(np.ceil(round(1.0 - fpr, 12) * (n + 1.0)), n)
        thresholds.append(ranked[order][np.argmax(total >= rank - 1e-9, axis=1)])
    place = np.searchsorted(high[at_or_below], np.concatenate(thresholds), side="right")
    made, first = np.empty(n_draws), 0
    for weights in draws_of(high.size, groups, n_draws, rng):
        last = first + len(weights)
        total = np.cumsum(np.pad(weights[:, at_or_below], ((0, 0), (1, 0))), axis=1)
        made[first:last] = 1.0 - total[np.arange(len(weights)), place[first:last]] / total[:, -1]
        first = last
    return made


def partial_auroc(labels: ArrayLike, scores: ArrayLike, *, max_fpr: float = 0.01) -> float:
    """Area under the ROC curve up to a false positive rate, over that rate; NaN of one class.

    Args:
        labels: (samples,) 0 and 1.
        scores: (samples,) float.
        max_fpr: where to stop, in (0, 1].

    Raises:
        SpecError: shapes disagree, a score is NaN, or the rate is impossible.

    Source:
        McClish 1989; `sklearn.metrics.roc_auc_score(max_fpr=...)` does the arithmetic.

    Example:
        ```python
        from inspect_lens.probe import partial_auroc

        labels, scores = [0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]
        assert round(partial_auroc(labels, scores, max_fpr=0.5), 6) == 0.5  # of at most 1
        ```
    """
    if not 0.0 < max_fpr <= 1.0:
        raise SpecError(f"max_fpr={max_fpr!r}; allowed is above 0 and up to 1; 0.01 is usual")
    positive, negative = split_classes(labels, scores)
    if not positive.size or not negative.size:
        return math.nan
    from sklearn import metrics

    # Ranks, because scikit-learn refuses infinite scores.
    y, ranks = np.asarray(labels).astype(np.int64), midranks(np.asarray(scores, dtype=np.float64))
    area = float(metrics.roc_auc_score(y, ranks, max_fpr=max_fpr))
    # scikit-learn has McClish's form alone for a part, and the area itself for the whole.
    chance = max_fpr**2 / 2.0
    plain = area if max_fpr == 1.0 else chance + (2.0 * area - 1.0) * (max_fpr - chance)
    return plain / max_fpr


def average_precision(labels: ArrayLike, scores: ArrayLike) -> float:
    """Sum of precision times the step in recall, over distinct scores; NaN without a positive.

    Args:
        labels: (samples,) 0 and 1.
        scores: (samples,) float.

    Raises:
        SpecError: shapes disagree, or a score is NaN.

    Source:
        Equals `sklearn.metrics.average_precision_score`.

    Example:
        ```python
        from inspect_lens.probe import average_precision

        assert round(average_precision([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]), 3) == 0.833
        ```
    """
    positive, _ = split_classes(labels, scores)
    if not positive.size:
        return math.nan
    order, ends = _falling(np.asarray(scores, dtype=np.float64))
    hits = _counted(np.asarray(labels).astype(bool)[order], ends)
    return float((np.diff(hits) * hits[1:] / (ends + 1)).sum() / hits[-1])


def _falling(s: Floats) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The order of falling scores, and where in it each distinct score ends."""
    # scikit-learn refuses infinite scores, and is five to ten times slower in each of 1000 draws.
    order = np.argsort(-s, kind="stable")
    return order, np.flatnonzero(np.append(s[order][1:] != s[order][:-1], True))


def _counted(one: NDArray[Any], ends: NDArray[np.intp]) -> Floats:
    """Numbers (..., n) added up to each end, and zero before the first."""
    total = np.cumsum(one, axis=-1, dtype=np.float64)[..., ends]
    return np.concatenate([np.zeros_like(total[..., :1]), total], axis=-1)


def _both(labels: ArrayLike, scores: ArrayLike) -> tuple[Floats, Floats]:
    positive, negative = split_classes(labels, scores)
    if not positive.size or not negative.size:
        raise SpecError(
            f"labels: {positive.size} positive and {negative.size} negative; allowed are both "
            "classes; a curve compares them"
        )
    return positive, negative


class Reliability(NamedTuple):
    """Bins of predicted probabilities, empty ones left out."""

    predicted: Floats
    """Mean probability of each bin."""
    observed: Floats
    """Share of positives of each bin."""
    size: NDArray[np.int64]
    """Samples of each bin."""


def reliability_curve(
    labels: ArrayLike, probabilities: ArrayLike, *, n_bins: int = 15, equal_mass: bool = False
) -> Reliability:
    """Compare probabilities with frequencies in bins of equal width, or of equal size.

    Args:
        labels: (samples,) 0 and 1.
        probabilities: (samples,) of the positive class.
        n_bins: over [0, 1]; a bin holds its upper edge and not its lower one, but for 0.
        equal_mass: bins of about as many samples each; equal probabilities share a bin.

    Raises:
        SpecError: shapes disagree, a value is no probability, or there is no bin.

    Source:
        Bins of arXiv:1706.04599; equals `sklearn.calibration.calibration_curve`.

    Example:
        ```python
        from inspect_lens.probe import reliability_curve

        curve = reliability_curve([0, 1, 1, 1], [0.2, 0.2, 0.8, 0.8], n_bins=5)
        assert curve.observed.tolist() == [0.5, 1.0]
        assert curve.size.tolist() == [2, 2]
        ```
    """
    y, p = _check(labels, probabilities)
    if n_bins < 1:
        raise SpecError(f"n_bins={n_bins}; allowed is 1 or more; 15 is usual")
    inner = np.linspace(0.0, 1.0, n_bins + 1)[1:-1]
    bins = np.searchsorted(np.quantile(p, inner) if equal_mass else inner, p, side="left")
    every = np.bincount(bins, minlength=n_bins)
    kept = every > 0
    size = every[kept]
    return Reliability(
        np.bincount(bins, weights=p, minlength=n_bins)[kept] / size,
        np.bincount(bins, weights=y, minlength=n_bins)[kept] / size,
        size,
    )


def expected_calibration_error(
    labels: ArrayLike, probabilities: ArrayLike, *, n_bins: int = 15
) -> float:
    """Mean gap between probability and frequency, 0 to 1, bins weighted by their samples.

    Args:
        labels: (samples,) 0 and 1.
        probabilities: (samples,) of the positive class.
        n_bins: over [0, 1].

    Raises:
        SpecError: shapes disagree, or a value is no probability.

    Source:
        arXiv:1706.04599.

    Example:
        ```python
        from inspect_lens.probe import expected_calibration_error

        assert expected_calibration_error([1, 1, 0, 0], [1.0, 1.0, 0.0, 0.0]) == 0.0
        assert expected_calibration_error([0, 0], [0.8, 0.8]) == 0.8
        ```
    """
    curve = reliability_curve(labels, probabilities, n_bins=n_bins)
    gaps = np.abs(curve.predicted - curve.observed)
    return float((gaps * curve.size).sum() / curve.size.sum())


def brier_score(labels: ArrayLike, probabilities: ArrayLike) -> float:
    """Mean squared distance of probability and label, 0 to 1; smaller is better.

    Args:
        labels: (samples,) 0 and 1.
        probabilities: (samples,) of the positive class.

    Raises:
        SpecError: shapes disagree, or a value is no probability.

    Source:
        Brier 1950; equals `sklearn.metrics.brier_score_loss`.

    Example:
        ```python
        from inspect_lens.probe import brier_score

        assert round(brier_score([1, 0, 1], [0.9, 0.2, 0.6]), 3) == 0.07
        ```
    """
    y, p = _check(labels, probabilities)
    return float(((p - y) ** 2).mean())


def _check(labels: ArrayLike, probabilities: ArrayLike) -> tuple[Floats, Floats]:
    try:
        split_classes(labels, probabilities)
    except SpecError as error:
        raise SpecError(str(error).replace("scores", "probabilities")) from None
    y, p = np.asarray(labels), np.asarray(probabilities, dtype=np.float64)
    if not y.size:
        raise SpecError("probabilities: there are none; allowed is one at least")
    if p.min() < 0.0 or p.max() > 1.0:
        raise SpecError(
            f"probabilities: from {p.min():.3g} to {p.max():.3g}; allowed are 0 to 1; calibrate "
            "scores first, as train.calibrate does"
        )
    return y.astype(np.float64), p
