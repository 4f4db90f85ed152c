"""How well scores rank samples, with labels from the metadata of the samples.

Inspect takes a metric whose parameter is not annotated `list[SampleScore]` for one of an older
kind and gives it scores without metadata, so that annotation is load-bearing.
"""

from __future__ import annotations

import logging
import math
import re

import numpy as np
from inspect_ai.scorer import Metric, SampleScore, Value, metric
from numpy.typing import NDArray

from inspect_lens import probe as arithmetic
from inspect_lens.errors import SpecError
from inspect_lens.reading._shared import shared_parameters

from ._labels import (
    NO_BOUNDS,
    classes,
    drawn_interval,
    labelled,
    with_bounds,
)

logger = logging.getLogger(__name__)


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
        bounds = (
            arithmetic.delong_interval(found.labels, found.values, groups=groups)
            if interval
            else None
        )
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

    Returns:
        The metric.

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

    Returns:
        The metric.

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
    told: set[str] = set()

    def compute(scores: list[SampleScore]) -> Value:
        above, below = classes(scores, label, control, cluster)
        positives, negatives = [v for v, _ in above], [v for v, _ in below]
        bounds = NO_BOUNDS if interval else None
        try:
            recall = arithmetic.recall_at_fpr(positives, negatives, fpr, allow_few=allow_few).recall
        except SpecError as error:
            # The samples are paid for; one metric that cannot be told must not fail the eval.
            # Inspect asks while samples come in; the count of the moment would mislead.
            reason = re.sub(
                r"^negatives: \d+ scores for recall at", "too few scores for", str(error)
            )
            if reason not in told:
                told.add(reason)
                logger.warning("recall_at_fpr is nan: %s", reason)
            return with_bounds("recall_at_fpr", math.nan, bounds)
        if interval and positives and negatives:
            bounds = drawn_interval(
                "recall_at_fpr",
                [1] * len(positives) + [0] * len(negatives),
                [*positives, *negatives],
                lambda y, s: _recall(y, s, fpr),
                [g for _, g in (*above, *below)] if cluster else None,
            )
        return with_bounds("recall_at_fpr", recall, bounds)

    return compute


def _recall(y: NDArray[np.bool_], s: NDArray[np.float64], fpr: float) -> float:
    return arithmetic.recall_at_fpr(s[y], s[~y], fpr, allow_few=True).recall


@metric(scores="unreduced")
def judged_share() -> Metric:
    """Share of generations that a judge model read: what a cascade costs.

    Counts every epoch, since each is paid for. NaN without a score that says `judged`.

    Returns:
        The metric.

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
