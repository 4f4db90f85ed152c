"""Rankings and operating points: how well scores separate labels, and where to put a threshold."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from fractions import Fraction
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens.errors import SpecError

from ._measured import (
    MIN_EFFECTIVE,
    MIN_GROUPS_PER_CLASS,
    Interval,
    count_groups,
    group_codes,
    kish,
)

__all__ = [
    "OperatingPoint",
    "auroc",
    "clopper_pearson",
    "conformal_threshold",
    "delong_interval",
    "rate_interval",
    "recall_at_fpr",
    "required_negatives",
    "smallest_rate",
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
    """Split scores into those of positives and of negatives, order kept.

    Args:
        labels: (samples,) 0 and 1, or bools.
        scores: (samples,) float.

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
    return s[y == 1], s[y == 0]


def midranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """1-based ranks (n,) of values (n,); equal values share the mean of their ranks."""
    from scipy.stats import rankdata

    return np.asarray(rankdata(values))


def auroc(labels: ArrayLike, scores: ArrayLike) -> float:
    """Area under the ROC curve: P(positive above negative), ties counted half; NaN of one class.

    Args:
        labels: (samples,) 0 and 1, or bools.
        scores: (samples,) float; larger means more positive.

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
    """Fewest negatives at which a false positive rate can be told, 3 / fpr: 300 for 1%.

    With none of n above the threshold the 95% upper bound on the rate is about 3 / n, so
    with fewer than 3 / fpr negatives not even a perfect result shows that the rate holds.

    Args:
        fpr: the rate, inside (0, 1).

    Example:
        ```python
        from inspect_lens.probe import required_negatives

        assert required_negatives(0.01) == 300
        ```
    """
    return math.ceil(3 / _rate(fpr))


def smallest_rate(n: int) -> float:
    """The smallest false positive rate that so many negatives can show, rounded up to two digits.

    Args:
        n: independent negatives, 4 or more.

    Example:
        ```python
        from inspect_lens.probe import required_negatives, smallest_rate

        assert smallest_rate(300) == 0.01
        assert required_negatives(smallest_rate(124)) <= 124
        ```
    """
    if n < _FEWEST:
        raise SpecError(f"n={n}: so few negatives show no rate; allowed are {_FEWEST} or more")
    digits = 1 - math.floor(math.log10(3 / n))
    scale = 10.0**digits
    return math.ceil(round(3 / n * scale, 6)) / scale


_FEWEST: Final = 4


def conformal_threshold(
    control: ArrayLike, fpr: float, *, groups: Sequence[Hashable] | None = None
) -> float:
    """Threshold that a new control score is strictly above with probability at most `fpr`.

    The ceil((1 - fpr)(n + 1))-th smallest of n control scores. The guarantee needs only that the
    new score is exchangeable with these, and is about the average over control sets: of 300 scores
    and a rate of 0.01, the true rate of a threshold exceeds 0.01 in 42 of 100 sets.

    With `groups` of several samples the new score is that of a sample of a new group. Each of the
    k groups then counts 1 / (k + 1), shared among its samples, and so does the new one; the
    threshold is the least score below or at which 1 - fpr of this lies.

    Args:
        control: (n,) scores of the control set, any order.
        fpr: false positive rate to allow, inside (0, 1).
        groups: (n,) what is independent, such as the scenario; None takes samples.

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
    n = scores.size
    codes, k = (np.arange(n), n) if groups is None else group_codes(n, groups)
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
    """Recall at the threshold that holds a rate on the given negatives; NaN without any.

    Args:
        positives: (n_positive,) scores.
        negatives: (n_negative,) scores of a control set or of in-domain negatives.
        fpr: false positive rate to allow.
        allow_few: compute with fewer negatives than `required_negatives(fpr)`.

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
    need = required_negatives(fpr)
    if pos.size == 0 or neg.size == 0:
        return OperatingPoint(math.nan, math.nan, math.nan, pos.size, neg.size)
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


def clopper_pearson(successes: int, n: int, *, confidence: float = 0.95) -> Interval:
    """Exact interval of a proportion.

    Coverage is never below `confidence`. For the threshold of `conformal_threshold`, with
    `successes` of `n` calibration scores above it and no ties, the upper bound is also the exact
    quantile of the true false positive rate, which then follows Beta(successes + 1, n - successes).

    Args:
        successes: how often it happened.
        n: how often it could have; positive.
        confidence: two-sided level.

    Raises:
        SpecError: the counts are impossible, or the level is not inside (0, 1).

    Source:
        Clopper and Pearson 1934.

    Example:
        ```python
        from inspect_lens.probe import clopper_pearson

        interval = clopper_pearson(0, 300)  # none of 300 flagged
        assert interval.low == 0.0
        assert round(interval.high, 4) == 0.0122
        ```
    """
    if n < 1 or not 0 <= successes <= n:
        raise SpecError(
            f"clopper_pearson: {successes} of {n}; allowed are 0 <= successes <= n with n >= 1; "
            "count the samples before asking for an interval"
        )
    low, high = _beta_bounds(successes, n, check_level(confidence))
    return Interval(low=low, high=high, confidence=confidence, method="clopper-pearson")


def _beta_bounds(hits: float, n: float, confidence: float) -> tuple[float, float]:
    """Bounds of a proportion by quantiles of beta distributions; counts need not be whole."""
    # A thousand times as fast as `scipy.stats.binomtest`, and a running eval's display shows them.
    from scipy.special import betaincinv

    tail = (1.0 - confidence) / 2.0
    low = float(betaincinv(hits, n - hits + 1.0, tail)) if hits > 0 else 0.0
    high = float(betaincinv(hits + 1.0, n - hits, 1.0 - tail)) if hits < n else 1.0
    return low, high


def rate_interval(
    hits: ArrayLike, groups: Sequence[Hashable] | None, *, confidence: float = 0.95
) -> Interval:
    """Interval of a share of samples that come in groups, such as recall at a threshold.

    It is Clopper and Pearson's, of as many samples as the groups are worth: the variance between
    groups says how many independent samples would vary as much, and a factor of t quantiles, whose
    degrees of freedom are the effective number of groups, allows for its own error. Where fewer
    than 5 groups have a hit, or a miss, each effective group counts as one sample.

    Args:
        hits: (samples,) bool, whether it happened.
        groups: (samples,) what is independent, such as the scenario; None takes samples.
        confidence: two-sided level.

    Raises:
        SpecError: lengths disagree, or there is no sample.

    Source:
        Korn and Graubard 1998, Survey Methodology 24, 193-201.

    Example:
        ```python
        from inspect_lens.probe import clopper_pearson, rate_interval

        hits = [True, False] * 50
        assert rate_interval(hits, None) == clopper_pearson(50, 100)
        by_group = rate_interval(hits, groups=[i // 5 for i in range(100)])
        assert by_group.method == "korn-graubard, 20 groups"
        ```
    """
    from scipy.stats import t

    hits = np.asarray(hits, dtype=bool)
    n = hits.size
    codes, k = (np.arange(n), n) if groups is None else group_codes(n, groups)
    if k == n:
        return clopper_pearson(int(hits.sum()), n, confidence=confidence)
    share, size = float(hits.mean()), np.bincount(codes)
    equal = kish(size)
    of_group = [np.bincount(codes, weights=side, minlength=k) for side in (hits, ~hits)]
    held = min(int((side > 0).sum()) for side in of_group)
    if held < MIN_GROUPS_PER_CLASS or equal < MIN_EFFECTIVE:
        trials = max(1, math.floor(equal))
        low, high = _beta_bounds(share * trials, trials, check_level(confidence))
        few = f"; too few groups ({k})" if min(k, equal) < MIN_GROUPS_PER_CLASS else ""
        worth_of = "" if trials == k else f", worth {trials} of equal size"
        method = f"clopper-pearson, n = {k} groups{worth_of}{few}"
        return Interval(low=low, high=high, confidence=confidence, method=method)
    away = np.bincount(codes, weights=hits - share, minlength=k)
    variance = float((away**2 / (1.0 - size / n)).sum()) / n**2
    tail = (1.0 - check_level(confidence)) / 2.0
    worth = float(n) if variance == 0 else min(share * (1.0 - share) / variance, float(n))
    worth *= float(t.ppf(tail, n - 1) / t.ppf(tail, equal - 1.0)) ** 2
    low, high = _beta_bounds(share * worth, worth, confidence)
    method = f"korn-graubard, {k} groups"
    return Interval(low=low, high=high, confidence=confidence, method=method)


def delong_interval(
    labels: ArrayLike,
    scores: ArrayLike,
    *,
    groups: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
) -> Interval:
    """DeLong's interval of the AUROC, on the logit scale so as to stay in [0, 1]; NaN of one class.

    Its variance is DeLong's or Hanley and McNeil's, whichever is larger: DeLong's is too small
    where a class has few samples or the area is near 1. The quantile is Student's t, with the
    degrees of freedom of Welch and Satterthwaite.

    With `groups` of several samples the variance is Obuchowski's, in the CR2 form. The degrees of
    freedom are the effective number of groups (Kish) of the class that has fewer, less one.

    The interval is never wider than the exact one of as many Bernoulli trials as the smaller class
    has samples, or effective groups: A (1 - A) / trials bounds the variance of every AUROC A
    (Birnbaum and Klose 1957). That one stands in for perfect separation, a class of one sample, and
    groups that are too few (`count_groups`), whose variance nothing shows; `method` says so.

    Args:
        labels: (samples,) 0 and 1, or bools.
        scores: (samples,) float; larger means more positive.
        groups: (samples,) what is independent, such as the scenario; None takes samples.
        confidence: two-sided level.

    Raises:
        SpecError: shapes disagree, or a score is NaN.

    Source:
        DeLong et al. 1988 with the midranks of Sun and Xu 2014; Hanley and McNeil 1982; logit
        scale as in Pepe 2003; Obuchowski 1997, Biometrics 53, 567-578, for groups; CR2: Bell and
        McCaffrey 2002; effective number: Kish 1965. The combination is ours:
        `benchmarks/probe_statistics.py` has its coverage, 0.93 or more (within the error of
        400 sets) for 8 samples or 5 groups of a class and more, AUROC 0.6 to 0.99, equal and
        unequal groups.

    Example:
        ```python
        import numpy as np

        from inspect_lens.probe import auroc, delong_interval

        labels = np.arange(80) % 2
        scores = np.random.default_rng(0).standard_normal(80) + labels
        interval = delong_interval(labels, scores)
        assert interval.low < auroc(labels, scores) < interval.high
        ```
    """
    level = check_level(confidence)
    positive, negative = split_classes(labels, scores)
    m, n = positive.size, negative.size
    if m == 0 or n == 0:
        return Interval(low=math.nan, high=math.nan, confidence=confidence, method="delong")
    above, below = placements(positive, negative)
    area = float(above.mean())
    counts = count_groups(labels, groups)
    (spread, free), name = independent(above, below), "delong"
    # Their form is of exponential scores, where positives vary more; either class may.
    least = max(_hanley_mcneil(area, m, n), _hanley_mcneil(area, n, m))
    if groups is not None and counts.several and not counts.too_few:
        grouped = between_groups(labels, groups, above - area, below - area)
        # A design effect above 1 makes samples worth fewer, in Hanley and McNeil's form as well;
        # none is larger than if all samples of a group were one.
        most = max(1.0, max(m, n) / counts.effective)
        least *= min(max(1.0, grouped / spread), most) if spread else 1.0
        spread, free = grouped, counts.effective - 1.0
        name = f"obuchowski, {counts.total} groups"
    if spread <= 0.0 or area in (0.0, 1.0) or counts.too_few:
        k = max(1, math.floor(counts.effective))
        low, high = _beta_bounds(area * k, k, level)
        name = "clopper-pearson, n = "
        name += "groups of the smaller class" if counts.several else "smaller class"
        name += f"; {counts.too_few}" if counts.too_few else ""
        return Interval(low=low, high=high, confidence=confidence, method=name)
    from scipy.special import expit
    from scipy.stats import t

    wide = float(t.ppf(0.5 + level / 2.0, free)) * math.sqrt(max(spread, least))
    logit, step = math.log(area / (1.0 - area)), wide / (area * (1.0 - area))
    # On the logit scale the bound near 1 runs away; that of the largest variance does not.
    bottom, top = _beta_bounds(area * counts.effective, counts.effective, level)
    return Interval(
        low=max(float(expit(logit - step)), bottom),
        high=min(float(expit(logit + step)), top),
        confidence=confidence,
        method=name,
    )


def independent(above: NDArray[np.float64], below: NDArray[np.float64]) -> tuple[float, float]:
    """DeLong's variance of the mean placement, and Welch and Satterthwaite's degrees of freedom."""
    if min(above.size, below.size) < 2:
        # One sample has a variance too, and leaving it out would be too sure.
        return 0.0, 1.0
    sides = [float(v.var(ddof=1)) / v.size for v in (above, below)]
    parts = sum(v**2 / (k.size - 1) for v, k in zip(sides, (above, below), strict=True))
    return sum(sides), sum(sides) ** 2 / parts if parts else 1.0


def _hanley_mcneil(area: float, m: int, n: int) -> float:
    """Variance of an AUROC of m positives and n negatives under exponential scores."""
    # Hanley and McNeil 1982, Radiology 143, 29-36.
    q1, q2, square = area / (2.0 - area), 2.0 * area**2 / (1.0 + area), area**2
    return (area * (1.0 - area) + (m - 1) * (q1 - square) + (n - 1) * (q2 - square)) / (m * n)


def between_groups(
    labels: ArrayLike, groups: Sequence[Hashable], above: NDArray[Any], below: NDArray[Any]
) -> float:
    """Obuchowski's variance of the AUROC, of placements about it, in the CR2 form."""
    # For groups of one size, all of both classes or each of one, this is k / (k - 1) of the sum of
    # squares, as in the source.
    y = np.asarray(labels).astype(bool)
    codes, k = group_codes(y.size, groups)
    total = np.zeros(k)
    for side, values in ((codes[y], above), (codes[~y], below)):
        share = np.bincount(side, minlength=k) / values.size
        in_group = np.bincount(side, weights=values, minlength=k) / values.size
        total += in_group / np.sqrt(np.maximum(1.0 - share, 1e-12))
    return float((total**2).sum())


def placements(
    positive: NDArray[np.float64], negative: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Structural components of the AUROC, ties counted half."""
    m, n = positive.size, negative.size
    ranks = midranks(np.concatenate([positive, negative]))
    above: NDArray[np.float64] = (ranks[:m] - midranks(positive)) / n
    below: NDArray[np.float64] = 1.0 - (ranks[m:] - midranks(negative)) / m
    return above, below


def check_level(confidence: float) -> float:
    """The level, or SpecError when it is not inside (0, 1)."""
    if not 0.0 < confidence < 1.0:
        raise SpecError(
            f"confidence={confidence!r}; allowed is a number between 0 and 1; 0.95 is usual"
        )
    return confidence
