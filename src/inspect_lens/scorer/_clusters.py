"""Intervals of metrics where samples come in clusters, such as the answers to one question."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import numpy as np
from inspect_ai.scorer import SampleScore
from numpy.typing import ArrayLike, NDArray

from inspect_lens import probe as arithmetic
from inspect_lens.errors import SpecError
from inspect_lens.probe import Interval

__all__ = ["cluster_of", "drawn_interval", "rate_interval"]

logger = logging.getLogger(__name__)

_RESAMPLES = 1000


def cluster_of(sample: SampleScore, key: str) -> str:
    """The cluster of a sample.

    Args:
        sample: of a metric.
        key: of its metadata.

    Returns:
        The cluster, as text.

    Raises:
        SpecError: the sample has no such metadata.
    """
    found = (sample.sample_metadata or {}).get(key)
    if found is None or found != found:
        raise SpecError(
            f"cluster={key!r}: sample {sample.sample_id} has no such metadata; allowed is a key "
            f"that every sample has, such as {sorted(sample.sample_metadata or {})}"
        )
    return str(found)


def drawn_interval(
    name: str,
    labels: ArrayLike,
    values: ArrayLike,
    statistic: Callable[[NDArray[np.bool_], NDArray[np.float64]], float],
    clusters: Sequence[str] | None,
) -> Interval:
    """95% bootstrap interval of a statistic; NaN, with a warning, where clusters are too few."""
    few = arithmetic.count_groups(labels, clusters).too_few
    try:
        if not few:
            return arithmetic.bootstrap_interval(
                labels, values, statistic=statistic, groups=clusters, n_resamples=_RESAMPLES
            )
    except SpecError as error:
        few = str(error)
    # The samples are paid for; one interval that cannot be told must not fail the eval.
    logger.warning("the interval of %s is NaN: %s", name, few)
    return Interval(low=math.nan, high=math.nan, method=few)


def rate_interval(hits: Sequence[bool], clusters: Sequence[str] | None) -> Interval:
    """Exact 95% interval of a share; each cluster counts as one sample, which is careful."""
    if clusters is None:
        return arithmetic.clopper_pearson(sum(hits), len(hits))
    k = len(set(clusters))
    return arithmetic.clopper_pearson(round(k * sum(hits) / len(hits)), k)
