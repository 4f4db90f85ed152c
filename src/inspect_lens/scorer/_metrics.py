"""How well scores rank samples, and what a threshold and a calibration do on them.

Inspect takes a metric whose parameter is not annotated `list[SampleScore]` for one of an older
kind and gives it scores without metadata, so that annotation is load-bearing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from inspect_ai.scorer import Metric, SampleScore, Value, metric
from numpy.typing import NDArray

from inspect_lens import probe as arithmetic
from inspect_lens.errors import SpecError
from inspect_lens.probe import Interval, draws_of, percentile_interval
from inspect_lens.reading._shared import shared_parameters

from ._labels import (
    NO_BOUNDS,
    RESAMPLES,
    carried,
    classes,
    drawn_interval,
    labelled,
    read_threshold,
    warn,
    with_bounds,
)

__all__ = [
    "at_threshold",
    "auroc_metric",
    "average_precision_metric",
    "calibration_error",
    "judged_share",
    "recall_at_fpr_metric",
    "threshold_accuracy",
]


@metric(name="auroc")
@shared_parameters
def auroc_metric(
    label: str = "label", interval: bool = False, cluster: str | None = None
) -> Metric:
    """Area under the ROC curve of the scores; NaN when a class is missing.

    Args:
        interval: also give DeLong's 95% interval, as `auroc_low` and `auroc_high`; leave it
            out inside `grouped`, which wants one number.

    Returns:
        The metric; it also takes dict scores, as in `metrics={"*": [auroc_metric()]}`.

    Example:
        ```python
        from inspect_ai import score
        from inspect_ai.log import read_eval_log

        from inspect_lens.scorer import auroc_metric, probe_score

        log = read_eval_log("logs/honesty.eval")
        probe = probe_score("organism/deception-lr")
        log = score(log, probe, metrics=[auroc_metric(interval=True)], action="overwrite")
        found = log.results.scores[0].metrics
        assert found["auroc_low"].value < found["auroc"].value <= found["auroc_high"].value
        ```
    """

    def compute(scores: list[SampleScore]) -> Value:
        found = labelled(scores, label, cluster)
        area = arithmetic.auroc(found.labels, found.values)
        groups = found.groups if cluster else None
        bounds = None
        if interval:
            bounds = arithmetic.delong_interval(found.labels, found.values, groups=groups)
        return with_bounds("auroc", area, bounds)

    return compute


@metric(name="average_precision")
@shared_parameters
def average_precision_metric(
    label: str = "label", interval: bool = False, cluster: str | None = None
) -> Metric:
    """Area under the precision-recall curve, as a sum over distinct scores; NaN without positives.

    Unlike the AUROC it depends on how many positives there are: a ranking that means nothing
    has their share.

    Args:
        interval: also give a 95% bootstrap interval (1000 draws inside each class), as
            `average_precision_low` and `average_precision_high`; NaN when a class is missing.

    Example:
        ```python
        from inspect_ai import score
        from inspect_ai.log import read_eval_log

        from inspect_lens.scorer import average_precision_metric, probe_score

        log = read_eval_log("logs/honesty.eval")
        probe = probe_score("organism/deception-lr")
        log = score(log, probe, metrics=[average_precision_metric()], action="overwrite")
        assert log.results.scores[0].metrics["average_precision"].value > 0.8
        ```
    """

    def compute(scores: list[SampleScore]) -> Value:
        found = labelled(scores, label, cluster)
        area = arithmetic.average_precision(found.labels, found.values)
        bounds = None
        if interval:
            bounds = drawn_interval(
                "average_precision", found.labels, found.values, arithmetic.average_precision,
                found.groups if cluster else None,
            )  # fmt: skip
        return with_bounds("average_precision", area, bounds)

    return compute


@metric(name="recall_at_fpr")
@shared_parameters
def recall_at_fpr_metric(
    fpr: float = 0.01,
    label: str = "label",
    control: str | None = None,
    allow_few: bool = False,
    interval: bool = False,
    cluster: str | None = None,
) -> Metric:
    """Share of positives above the threshold that holds a false positive rate in this eval.

    NaN, with a warning in the log of the process, when there are too few negatives to show the
    rate: 300 for 1%.

    Args:
        fpr: false positive rate to hold.
        control: key of the sample metadata that marks control samples; they set the threshold
            then, instead of the samples with label 0.
        allow_few: compute with fewer negatives.
        interval: also give a 95% bootstrap interval (1000 draws inside each class), as
            `recall_at_fpr_low` and `recall_at_fpr_high`. The threshold is set anew in every
            draw, so that its uncertainty is in the interval.
        cluster: as for `average_precision_metric`. Ten answers to one question are one negative,
            which `allow_few` does not know: it counts samples.

    Example:
        ```python
        from inspect_ai import score
        from inspect_ai.log import read_eval_log

        from inspect_lens.scorer import probe_score, recall_at_fpr_metric

        log = read_eval_log("logs/honesty.eval")
        probe = probe_score("organism/deception-lr")
        # Four negatives cannot show a rate: for a number that means something leave out allow_few.
        log = score(
            log, probe, metrics=[recall_at_fpr_metric(0.25, allow_few=True)], action="overwrite"
        )
        assert log.results.scores[0].metrics["recall_at_fpr"].value >= 0.5
        ```
    """
    arithmetic.required_negatives(fpr)  # what is no rate is refused before anything is paid

    def compute(scores: list[SampleScore]) -> Value:
        above, below = classes(scores, label, control, cluster)
        positives, negatives = [v for v, _ in above], [v for v, _ in below]
        bounds = NO_BOUNDS if interval else None
        try:
            recall = arithmetic.recall_at_fpr(positives, negatives, fpr, allow_few=allow_few).recall
        except SpecError as error:
            # The samples are paid for; one metric that cannot be told must not fail the eval.
            warn("recall_at_fpr is nan: %s", error)
            return with_bounds("recall_at_fpr", math.nan, bounds)
        if interval and positives and negatives:
            bounds = drawn_interval(
                "recall_at_fpr", [1] * len(positives) + [0] * len(negatives),
                [*positives, *negatives],
                lambda y, s: arithmetic.recall_at_fpr(s[y], s[~y], fpr, allow_few=True).recall,
                [g for _, g in (*above, *below)] if cluster else None,
            )  # fmt: skip
        return with_bounds("recall_at_fpr", recall, bounds)

    return compute


@metric(scores="unreduced")
def judged_share() -> Metric:
    """Share of generations that a judge model read: what a cascade costs.

    Counts every epoch, since each is paid for. NaN without a score that says `judged`.

    Example:
        ```python
        from inspect_ai import score
        from inspect_ai.log import read_eval_log

        from inspect_lens.scorer import judged_share, probe_cascade

        cascade = probe_cascade(
            "organism/deception-lr", question="The answer is a lie.", band=(0.5, 0.5)
        )
        log = read_eval_log("logs/honesty.eval")
        log = score(log, cascade, metrics=[judged_share()], action="overwrite")
        assert log.results.scores[0].metrics["judged_share"].value == 0.0
        ```
    """

    def compute(scores: list[SampleScore]) -> Value:
        marks = [(s.score.metadata or {}).get("judged") for s in scores]
        known = [bool(mark) for mark in marks if mark is not None]
        return sum(known) / len(known) if known else math.nan

    return compute


@metric
@shared_parameters
def threshold_accuracy(
    threshold: float | None = None,
    label: str = "label",
    interval: bool = False,
    key: str | None = None,
    cluster: str | None = None,
) -> Metric:
    """Share of samples that the threshold puts on the right side; NaN without a threshold.

    Args:
        threshold: a score above it counts as positive; by default the one that the probe's
            card stores for these settings.
        interval: also give the exact 95% interval, as `threshold_accuracy_low` and
            `threshold_accuracy_high`.
        key: of a dict score, whose threshold in `metadata["thresholds"]` is meant.

    Example:
        ```python
        from inspect_ai import score
        from inspect_ai.log import read_eval_log

        from inspect_lens.scorer import probe_score, threshold_accuracy

        log = read_eval_log("logs/honesty.eval")
        probe = probe_score("organism/deception-lr")
        log = score(log, probe, metrics=[threshold_accuracy(threshold=1.742)], action="overwrite")
        assert log.results.scores[0].metrics["threshold_accuracy"].value > 0.8
        ```
    """

    def compute(scores: list[SampleScore]) -> Value:
        found = labelled(scores, label, cluster)
        cut = read_threshold(scores, threshold, key)
        share, bounds = math.nan, NO_BOUNDS
        if cut is not None and found.values:
            pairs = zip(found.values, found.labels, strict=True)
            right = [(v > cut) == bool(y) for v, y in pairs]
            share = sum(right) / len(right)
            bounds = arithmetic.rate_interval(right, found.groups if cluster else None)
        return with_bounds("threshold_accuracy", share, bounds if interval else None)

    return compute


@metric
@shared_parameters
def at_threshold(
    threshold: float | None = None,
    label: str = "label",
    control: str | None = None,
    interval: bool = True,
    key: str | None = None,
    cluster: str | None = None,
) -> Metric:
    """Recall and false positive rate of the threshold that the probe's card, or you, have set.

    `recall` is the share of positives above it, `fpr` the share of negatives. Each is there where
    it can be known: without a threshold, or without a sample of its class, it is left out. Of a
    dict score each entry that has a threshold gets its own, such as `lr_recall`.

    Args:
        threshold: by default the one that the probe's card stores for these settings.
        control: key of the sample metadata that marks control samples; only they count as
            negatives then.
        interval: give the exact (Clopper-Pearson) 95% intervals, too, as `recall_low`,
            `recall_high`, `fpr_low` and `fpr_high`.
        key: of a dict score, the one entry that is meant, with its threshold in
            `metadata["thresholds"]`.

    Returns:
        The metric. A warning in the log of the process says once that there is no threshold.

    Example:
        ```python
        from inspect_ai import score
        from inspect_ai.log import read_eval_log

        from inspect_lens.scorer import at_threshold, probe_score

        log = read_eval_log("logs/honesty.eval")
        probe = probe_score("organism/deception-lr")
        log = score(log, probe, metrics=[at_threshold()], action="overwrite")
        found = log.results.scores[0].metrics
        assert found["fpr"].value == 0.0
        assert found["fpr_high"].value > 0.5  # four negatives show little
        assert found["recall"].value <= found["recall_high"].value
        ```
    """

    def rates(scores: Sequence[SampleScore], name: str | None) -> dict[str, float] | None:
        positives, negatives = classes(scores, label, control, cluster)
        found = {"recall": positives, "fpr": negatives}
        # Without a labelled sample nothing is compared, so that no threshold is missing.
        cut = read_threshold(scores, threshold, name) if positives or negatives else math.inf
        return None if cut is None else _above(found, cut, interval, clustered=cluster is not None)

    def compute(scores: list[SampleScore]) -> Value:
        if not scores:  # Inspect shows the rows of an eval in which nothing was scored
            return {"recall": math.nan, "fpr": math.nan}
        names: dict[str | None, None] = dict.fromkeys(
            name for s in scores if isinstance(s.score.value, dict) for name in s.score.value
        )
        if not names or key is not None:
            names = {key: None}
        each = {name: rates([_entry(s, name) for s in scores], name) for name in names}
        if all(found is None for found in each.values()):
            warn(
                "recall and fpr are left out: the scores carry no threshold; pass threshold=, or "
                "key= for an entry of a dict score"
            )
        return {
            rate if name == key else f"{name}_{rate}": value
            for name, found in each.items()
            for rate, value in (found or {}).items()
        }

    return compute


def _above(
    found: dict[str, list[tuple[float, str]]], cut: float, interval: bool, *, clustered: bool
) -> dict[str, float]:
    """The share of each class above the threshold; a class without samples has none."""
    made = {}
    for rate, pairs in found.items():
        if not pairs:
            continue
        hits = [value > cut for value, _ in pairs]
        made[rate] = sum(hits) / len(hits)
        if interval:
            groups = [group for _, group in pairs] if clustered else None
            bounds = arithmetic.rate_interval(hits, groups)
            made |= {f"{rate}_low": bounds.low, f"{rate}_high": bounds.high}
    return made


def _entry(sample: SampleScore, name: str | None) -> SampleScore:
    """The sample with one entry of its dict score as the value; None where it has none."""
    value = sample.score.value
    if name is None or not isinstance(value, dict):
        return sample
    one = value.get(name)
    return sample.model_copy(update={"score": sample.score.model_copy(update={"value": one})})


@metric(scores="unreduced")
@shared_parameters
def calibration_error(
    label: str = "label",
    n_bins: int = 15,
    value: Literal["score", "probability"] = "score",
    probe: str | None = None,
    key: str | None = None,
    interval: bool = False,
    cluster: str | None = None,
) -> Metric:
    """Expected calibration error of the probabilities behind the scores, in bins of equal width.

    Each epoch is an observation of its own: a probability belongs to one generation, and the
    mean of several is not one. Inside `grouped`, which Inspect gives reduced scores, it judges
    the probability of the reduced score.

    Args:
        n_bins: over [0, 1].
        value: `score` turns values into probabilities by the calibration that the scores carry
            (Platt and temperature); `probability` takes values as they are.
        probe: name or path of the probe whose card has the calibration, instead; needed for
            isotonic ones, whose steps are too many to be carried.
        key: of a dict score, whose calibration in `metadata["calibrations"]` is meant.
        interval: also give a 95% bootstrap interval, as `calibration_error_low` and
            `calibration_error_high`; it draws whole samples with their epochs, and is NaN of
            fewer than 8. The error is never negative, so that few samples make it and its
            interval too large.

    Returns:
        The metric; NaN without labelled samples or without a calibration.

    Source:
        arXiv:1706.04599.

    Example:
        ```python
        from inspect_ai import score
        from inspect_ai.log import read_eval_log

        from inspect_lens.scorer import calibration_error, probe_score

        log = read_eval_log("logs/honesty.eval")
        probe = probe_score("organism/deception-lr")
        log = score(log, probe, metrics=[calibration_error()], action="overwrite")
        assert 0.0 <= log.results.scores[0].metrics["calibration_error"].value <= 1.0
        ```
    """

    def compute(scores: list[SampleScore]) -> Value:
        found = labelled(scores, label, cluster)
        error, bounds = math.nan, NO_BOUNDS
        p = _probabilities(found.scores, found.values, value, probe, key)
        if p is not None and len(p):
            error = arithmetic.expected_calibration_error(found.labels, p, n_bins=n_bins)
            if interval:
                bounds = _bounds(np.asarray(found.labels), p, found.groups, n_bins)
        return with_bounds("calibration_error", error, bounds if interval else None)

    return compute


def _probabilities(
    scores: Sequence[SampleScore],
    values: Sequence[float],
    kind: str,
    probe: str | None,
    key: str | None,
) -> NDArray[np.float64] | None:
    if kind == "probability":
        return np.asarray(values, dtype=np.float64)
    if probe is not None:
        calibration = arithmetic.load_probe(probe).card.calibration
    else:
        fact = carried(scores, "calibration", key)
        if fact is None or fact.get("method") == "isotonic":
            warn(
                "calibration_error is NaN: the scores carry %s; pass probe=, or "
                "value='probability' for scores that are probabilities",
                "no calibration" if fact is None else "an isotonic calibration without its steps",
            )
            return None
        calibration = arithmetic.Calibration.model_validate({**fact, "n": 0})
    if calibration is None:
        warn("calibration_error is NaN: the card of %s has no calibration", probe)
        return None
    return np.array([calibration.probability(v) for v in values], dtype=np.float64)


def _bounds(
    labels: NDArray[np.int64], p: NDArray[np.float64], groups: Sequence[str], n_bins: int
) -> Interval:
    """Percentile bootstrap over samples; base rates may differ between draws, as they do."""
    draws = draws_of(labels.size, groups, RESAMPLES, np.random.default_rng(0))
    drawn = (np.repeat(np.arange(labels.size), row) for part in draws for row in part.astype(int))
    made = [arithmetic.expected_calibration_error(labels[i], p[i], n_bins=n_bins) for i in drawn]
    return percentile_interval(np.array(made), n=len(set(groups)), method="percentile bootstrap")
