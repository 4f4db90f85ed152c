"""Metrics over probe scores, with labels from the metadata of the samples.

Inspect takes a metric whose parameter is not annotated `list[SampleScore]` for one of an older
kind and gives it scores without metadata, so that annotation is load-bearing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

from inspect_ai.scorer import Metric, SampleScore, Value, metric

from inspect_lens import probe as arithmetic
from inspect_lens.errors import SpecError

__all__ = ["auroc", "realised_fpr", "recall_at_fpr", "threshold_accuracy"]

logger = logging.getLogger(__name__)


@metric
def auroc(label: str = "label", interval: bool = False) -> Metric:
    """Area under the ROC curve of the scores; NaN when a class is missing.

    Args:
        label: key of the sample metadata that holds 1 or true for positives.
        interval: also give DeLong's 95% interval, as `auroc_low` and `auroc_high`; leave it
            out inside `grouped`, which wants one number.

    Returns:
        The metric; it also takes dict scores, as in `metrics={"*": [auroc()]}`.
    """

    def compute(scores: list[SampleScore]) -> Value:
        labels, values = _labelled(scores, label)
        area = arithmetic.auroc(labels, values)
        if not interval:
            return area
        bounds = arithmetic.delong_interval(labels, values)
        return {"auroc": area, "auroc_low": bounds.low, "auroc_high": bounds.high}

    return compute


@metric
def recall_at_fpr(
    fpr: float = 0.01,
    label: str = "label",
    control: str | None = None,
    allow_few: bool = False,
) -> Metric:
    """Share of positives above the threshold that holds a false positive rate in this eval.

    NaN, with a warning in the log of the process, when there are too few negatives to show the
    rate: 300 for 1%.

    Args:
        fpr: false positive rate to hold.
        label: key of the sample metadata that holds 1 or true for positives.
        control: key of the sample metadata that marks control samples; they set the threshold
            then, instead of the samples with label 0.
        allow_few: compute with fewer negatives.

    Returns:
        The metric.
    """

    def compute(scores: list[SampleScore]) -> Value:
        kept, marked = _partition(scores, control)
        labels, values = _labelled(kept, label)
        positives = [v for v, y in zip(values, labels, strict=True) if y]
        negatives = (
            [s.score.as_float() for s in marked]
            if control is not None
            else [v for v, y in zip(values, labels, strict=True) if not y]
        )
        try:
            return arithmetic.recall_at_fpr(positives, negatives, fpr, allow_few=allow_few).recall
        except SpecError as error:
            # The samples are paid for; one metric that cannot be told must not fail the eval.
            logger.warning("recall_at_fpr is NaN: %s", error)
            return math.nan

    return compute


@metric
def threshold_accuracy(threshold: float | None = None, label: str = "label") -> Metric:
    """Share of samples that the threshold puts on the right side; NaN without a threshold.

    Args:
        threshold: a score above it counts as positive; by default the one that the probe's
            card stores for these settings.
        label: key of the sample metadata that holds 1 or true for positives.

    Returns:
        The metric.
    """

    def compute(scores: list[SampleScore]) -> Value:
        labels, values = _labelled(scores, label)
        cut = _threshold(scores, threshold)
        if cut is None or not values:
            return math.nan
        right = sum((v > cut) == bool(y) for v, y in zip(values, labels, strict=True))
        return right / len(values)

    return compute


@metric
def realised_fpr(
    threshold: float | None = None,
    label: str = "label",
    control: str | None = None,
    interval: bool = True,
) -> Metric:
    """Share of negatives above the threshold, with its Clopper-Pearson interval.

    Args:
        threshold: by default the one that the probe's card stores for these settings.
        label: key of the sample metadata that holds 0 or false for negatives.
        control: key of the sample metadata that marks control samples; only they count then.
        interval: also give the exact 95% interval, as `fpr_low` and `fpr_high`.

    Returns:
        The metric; NaN without negatives or without a threshold.
    """

    def compute(scores: list[SampleScore]) -> Value:
        if control is not None:
            values = [s.score.as_float() for s in _partition(scores, control).control]
        else:
            labels, every = _labelled(scores, label)
            values = [v for v, y in zip(every, labels, strict=True) if not y]
        cut = _threshold(scores, threshold)
        low, rate, high = math.nan, math.nan, math.nan
        if values and cut is not None:
            above = sum(v > cut for v in values)
            rate = above / len(values)
            bounds = arithmetic.clopper_pearson(above, len(values))
            low, high = bounds.low, bounds.high
        return {"fpr": rate, "fpr_low": low, "fpr_high": high} if interval else rate

    return compute


class _Parts(NamedTuple):
    kept: list[SampleScore]
    control: list[SampleScore]


def _partition(scores: list[SampleScore], control: str | None) -> _Parts:
    """Control samples apart from the others."""
    if control is None:
        return _Parts(scores, [])
    marks = [bool((s.sample_metadata or {}).get(control)) for s in scores]
    pairs = list(zip(scores, marks, strict=True))
    return _Parts([s for s, m in pairs if not m], [s for s, m in pairs if m])


def _labelled(scores: Sequence[SampleScore], label: str) -> tuple[list[int], list[float]]:
    """Labels and values of the samples that have a label."""
    labels: list[int] = []
    values: list[float] = []
    for sample in scores:
        found = (sample.sample_metadata or {}).get(label)
        if found is None:
            continue
        if not isinstance(found, bool | int | float) or found not in (0, 1):
            raise SpecError(
                f"metadata.{label}={found!r} of sample {sample.sample_id}; allowed are true, "
                "false, 1 and 0; map your classes to them in the dataset"
            )
        labels.append(int(found))
        values.append(sample.score.as_float())
    if len(labels) < len(scores):
        logger.warning(
            "%d of %d scored samples have no metadata %r and count in no metric that needs it",
            len(scores) - len(labels), len(scores), label,
        )  # fmt: skip
    return labels, values


def _threshold(scores: Sequence[SampleScore], given: float | None) -> float | None:
    """The threshold of the caller, or the one that the scores carry."""
    if given is not None:
        return given
    carried = {(s.score.metadata or {}).get("threshold") for s in scores}
    if len(carried) > 1:
        raise SpecError(
            f"threshold: scores carry {len(carried)} different ones; allowed is one; score all "
            "samples with one probe and one setting, or pass threshold="
        )
    return next(iter(carried), None)
