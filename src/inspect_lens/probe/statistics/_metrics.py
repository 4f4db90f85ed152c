"""Rankings and operating points: how well scores separate labels, and where to put a threshold."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens.errors import SpecError

from ._groups import group_codes

__all__ = [
    "OperatingPoint",
    "auroc",
    "conformal_threshold",
    "midranks",
    "recall_at_fpr",
    "required_negatives",
    "split_classes",
]


class OperatingPoint(NamedTuple):
    """Recall and false positive rate of a threshold on a labelled set."""

    recall: float
    """Share of positives above the threshold."""
    fpr: float
    """Share of negatives above the threshold: the realised false positive rate."""
    threshold: float
    """A score is flagged when it is strictly above this."""
    n_positive: int
    n_negative: int


def split_classes(
    labels: ArrayLike, scores: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Split scores into those of positives and of negatives.

    Args:
        labels: (samples,) 0 and 1, or bools.
        scores: (samples,) float.

    Returns:
        Two arrays (n_positive,) and (n_negative,), order kept.

    Raises:
        SpecError: shapes disagree, a label is neither 0 nor 1, or a score is NaN.

    Example:
        ```python
        from inspect_lens.probe import split_classes

        positives, negatives = split_classes([1, 0, 1], [0.9, 0.2, 0.7])
        assert positives.tolist() == [0.9, 0.7]
        assert negatives.tolist() == [0.2]
        ```
    """
    y, s = np.asarray(labels), np.asarray(scores, dtype=np.float64)
    if y.ndim != 1 or y.shape != s.shape:
        raise SpecError(
            f"labels and scores: shapes {y.shape} and {s.shape}; allowed is one label per score, "
            "both one-dimensional; drop unscored samples from both"
        )
    if y.size and not np.isin(y, (0, 1)).all():
        raise SpecError(
            f"labels: found {sorted({repr(v) for v in y.tolist()})[:5]}; allowed are 0 and 1 "
            "(or bools); map your classes to them first"
        )
    if np.isnan(s).any():
        raise SpecError(
            f"scores: {int(np.isnan(s).sum())} of {s.size} are NaN; allowed are numbers; drop "
            "unscored samples, never replace them by 0"
        )
    positive = y.astype(bool)
    return s[positive], s[~positive]


def midranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """1-based ranks (n,) of values (n,); equal values share the mean of their ranks."""
    from scipy.stats import rankdata

    ranks: NDArray[np.float64] = rankdata(values)
    return ranks


def auroc(labels: ArrayLike, scores: ArrayLike) -> float:
    """Area under the ROC curve: P(positive above negative), ties counted half.

    Args:
        labels: (samples,) 0 and 1, or bools.
        scores: (samples,) float; larger means more positive.

    Returns:
        The area, or NaN when a class is missing.

    Raises:
        SpecError: shapes disagree, a label is neither 0 nor 1, or a score is NaN.

    Source:
        Mann and Whitney 1947; equals `sklearn.metrics.roc_auc_score`.

    Example:
        ```python
        from inspect_lens.probe import auroc

        assert auroc([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]) == 0.75
        ```
    """
    positive, negative = split_classes(labels, scores)
    m, n = positive.size, negative.size
    if m == 0 or n == 0:
        return math.nan
    ranks = midranks(np.concatenate([positive, negative]))
    return float((ranks[:m].sum() - m * (m + 1) / 2.0) / (m * n))


def required_negatives(fpr: float) -> int:
    """Fewest negatives at which a false positive rate can be told: 300 for 1%.

    With none of n above the threshold the 95% upper bound on the rate is about 3 / n, so
    with fewer than 3 / fpr negatives not even a perfect result shows that the rate holds.

    Args:
        fpr: the rate, inside (0, 1).

    Returns:
        3 / fpr, rounded up.

    Example:
        ```python
        from inspect_lens.probe import required_negatives

        assert required_negatives(0.01) == 300
        ```
    """
    return math.ceil(3 / _rate(fpr))


def conformal_threshold(
    control: ArrayLike, fpr: float, *, groups: Sequence[Hashable] | None = None
) -> float:
    """Threshold that a new control score exceeds with probability at most `fpr`.

    The ceil((1 - fpr)(n + 1))-th smallest of n control scores. The guarantee needs only that
    the new score is exchangeable with the control scores; it holds for every n. It is one about
    the average over control sets: of 300 scores and a rate of 0.01, the true rate of a threshold
    exceeds 0.01 in 42 of 100 sets.

    With `groups` of several samples the new score is that of a sample of a new group. Each of the
    k groups then counts 1 / (k + 1), shared among its samples, and so does the new one; the
    threshold is the least score below or at which 1 - fpr of this lies.

    Args:
        control: (n,) scores of the control set, any order.
        fpr: false positive rate to allow, inside (0, 1).
        groups: (n,) what is independent, such as the scenario; None takes samples.

    Returns:
        The threshold; flag a score that is strictly above it.

    Raises:
        SpecError: a score is NaN or infinite, or there are too few scores, or groups, for this
            rate at all.

    Source:
        Split conformal prediction, Vovk et al. 2005; with groups, hierarchical conformal
        prediction, arXiv:2306.06342.

    Example:
        ```python
        import numpy as np

        from inspect_lens.probe import conformal_threshold

        control = np.random.default_rng(0).standard_normal(999)
        threshold = conformal_threshold(control, fpr=0.01)
        assert (
            control > threshold
        ).sum() == 9  # a new one is above it with probability 0.01 at most
        ```
    """
    scores = np.asarray(control, dtype=np.float64).ravel()
    rate = _rate(fpr)
    if not np.isfinite(scores).all():
        raise SpecError(
            "control: holds NaN or infinite scores; allowed are finite numbers; drop unscored "
            "samples"
        )
    codes, k = (np.arange(scores.size), scores.size)
    if groups is not None:
        codes, k = group_codes(scores.size, groups)
    if math.ceil((1 - rate) * (k + 1)) > k:
        several = k < scores.size
        unit = f"{scores.size} scores of {k} groups" if several else f"{k} scores"
        raise SpecError(
            f"control: {unit} for a false positive rate of {fpr:g}; allowed are at least "
            f"{math.ceil((1 - rate) / rate)} {'groups ' if several else ''}"
            f"({required_negatives(fpr)} to verify it); score more "
            "control samples or ask for a larger rate"
        )
    order = np.argsort(scores, kind="stable")
    if k == scores.size:
        return float(scores[order[math.ceil((1 - rate) * (k + 1)) - 1]])
    # In groups: of k groups and the new one, how many lie at or below each score.
    below = np.cumsum((1.0 / np.bincount(codes))[codes[order]])
    place = int(np.searchsorted(below, float((1 - rate) * (k + 1)) - 1e-9, side="left"))
    return float(scores[order[min(place, scores.size - 1)]])


def recall_at_fpr(
    positives: ArrayLike, negatives: ArrayLike, fpr: float = 0.01, *, allow_few: bool = False
) -> OperatingPoint:
    """Recall at the threshold that holds a false positive rate on the given negatives.

    Args:
        positives: (n_positive,) scores.
        negatives: (n_negative,) scores of a control set or of in-domain negatives.
        fpr: false positive rate to allow.
        allow_few: compute with fewer negatives than `required_negatives(fpr)`.

    Returns:
        The operating point; NaN fields when there are no positives or no negatives.

    Raises:
        SpecError: too few negatives, or a score is NaN.

    Example:
        ```python
        import numpy as np

        from inspect_lens.probe import recall_at_fpr

        rng = np.random.default_rng(0)
        point = recall_at_fpr(rng.standard_normal(50) + 4, rng.standard_normal(300), fpr=0.01)
        assert point.recall > 0.9
        assert point.fpr <= 0.01
        ```
    """
    pos = np.asarray(positives, dtype=np.float64).ravel()
    neg = np.asarray(negatives, dtype=np.float64).ravel()
    if pos.size == 0 or neg.size == 0:
        return OperatingPoint(math.nan, math.nan, math.nan, pos.size, neg.size)
    need = required_negatives(fpr)
    if neg.size < need and not allow_few:
        raise SpecError(
            f"negatives: {neg.size} scores for recall at a false positive rate of {fpr:g}; "
            f"{need} negatives or more can show that rate; score more of them, ask for a larger "
            "rate, or pass allow_few=True and report the interval"
        )
    if np.isnan(pos).any():
        raise SpecError(
            "positives: holds NaN; allowed are numbers; drop unscored samples, never replace "
            "them by 0"
        )
    threshold = conformal_threshold(neg, fpr)
    return OperatingPoint(
        recall=float((pos > threshold).mean()),
        fpr=float((neg > threshold).mean()),
        threshold=threshold,
        n_positive=pos.size,
        n_negative=neg.size,
    )


def _rate(fpr: float) -> Fraction:
    """The rate as the decimal that the user wrote, so that 0.99 * 300 is exactly 297."""
    if not 0.0 < fpr < 1.0:
        raise SpecError(f"fpr={fpr!r}; allowed is a number between 0 and 1; 0.01 is usual")
    return Fraction(str(fpr))
