"""Labels, numbers and carried facts of the scores that a metric gets, or that a log has.

Inspect reduces the epochs of a sample before it calls a metric, and keeps the metadata of the
first epoch whatever the reducer. So a metric here takes from metadata only what is the same in
all epochs (threshold, calibration), never what belongs to a value. `length_auroc` is the
exception, and says so: its tokens are those of the first epoch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import numpy as np
from inspect_ai.log import EvalLog, EvalSample
from inspect_ai.scorer import SampleScore, Score, Value
from numpy.typing import ArrayLike, NDArray

from inspect_lens import probe as arithmetic
from inspect_lens._base.labels import LABELS, label_of
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model._host import is_interim
from inspect_lens.model._places import read_log
from inspect_lens.probe import Comparison, Interval, compare_auroc
from inspect_lens.reading._shared import shared_parameters

__all__ = ["compare"]

logger = logging.getLogger(__name__)

RESAMPLES = 1000


_warned: ContextVar[frozenset[str]] = ContextVar("_warned", default=frozenset())
"""What was said in this task, in which Inspect computes all metrics of an eval."""


def warn(text: str, *values: object) -> None:
    """Warn of what metrics are of: once for all of them, and not each time the display asks."""
    said = text % values
    if not is_interim() and said not in _warned.get():
        with suppress(RuntimeError):  # outside of a task nothing ends what was said
            anyio.get_current_task()
            _warned.set(_warned.get() | {said})
        logger.warning("%s", said)


def cluster_of(sample: SampleScore, key: str, *, argument: str = "cluster") -> str:
    """The cluster of a sample."""
    found = (sample.sample_metadata or {}).get(key)
    if found is None or found != found:
        raise SpecError(
            f"{argument}={key!r}: sample {sample.sample_id} has no such metadata; allowed is a key "
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
            made = arithmetic.bootstrap_interval(
                labels, values, statistic=statistic, groups=clusters, n_resamples=RESAMPLES
            )
            if not math.isnan(made.low):
                return made
            few = made.method
    except SpecError as error:
        few = str(error)
    # The samples are paid for; one interval that cannot be told must not fail the eval.
    warn("the interval of %s is NaN: %s", name, few)
    return Interval(low=math.nan, high=math.nan, method=few)


def with_bounds(name: str, value: float, bounds: Interval | None) -> Value:
    """What a metric gives: a number, or with an interval three of them."""
    if bounds is None:
        return value
    return {name: value, f"{name}_low": bounds.low, f"{name}_high": bounds.high}


NO_BOUNDS = Interval(low=math.nan, high=math.nan, method="nothing to draw from")


class Labelled(NamedTuple):
    """The samples that have a label and a number."""

    labels: list[int]
    values: list[float]
    groups: list[str]
    """Clusters, or sample ids: the epochs of one sample are one group."""
    scores: list[SampleScore]


def sample_score(sample: EvalSample, score: Score) -> SampleScore:
    """A score of a log as a metric would get it."""
    return SampleScore(score=score, sample_id=sample.id, sample_metadata=sample.metadata)


def logged_scores(
    log: EvalLog | str | Path,
    name: str | None,
    *,
    default: str,
    is_one: Callable[[Score], bool],
    make: str,
) -> list[SampleScore]:
    """The scores of a log that have a name, as a metric would get them.

    Without a name it is `default`, or else the first of those that `is_one` knows.
    """
    found = read_log(log)
    samples = found.samples or []
    every = [(key, score) for sample in samples for key, score in (sample.scores or {}).items()]
    if name is None:
        names = [key for key, score in every if is_one(score)]
        name = default if default in names or not names else names[0]
    made = [
        sample_score(sample, sample.scores[name])
        for sample in samples
        if sample.scores and name in sample.scores
    ]
    if not made:
        there = ", ".join(sorted({key for key, _ in every})) or "none"
        raise ArtifactError(
            f"{found.location or 'log'}: has no score {name!r}, only {there}; score it with "
            f"{make}, or name another"
        )
    return made


def labelled(scores: Sequence[SampleScore], label: str, cluster: str | None = None) -> Labelled:
    """Labels and values of the samples that have both."""
    found = Labelled([], [], [], [])
    unscored = unlabelled = 0
    for sample in scores:
        mark = (sample.sample_metadata or {}).get(label)
        value = _number(sample)
        unlabelled += mark is None
        unscored += value is None
        if mark is None or value is None:
            continue
        if (kind := label_of(mark)) is None:
            raise SpecError(
                f"metadata.{label}={mark!r} of sample {sample.sample_id}; allowed are {LABELS}; "
                "map your classes to them in the dataset"
            )
        found.labels.append(int(kind))
        found.values.append(value)
        found.groups.append(cluster_of(sample, cluster) if cluster else str(sample.sample_id))
        found.scores.append(sample)
    if unlabelled:
        warn(
            "%d of %d scored samples have no %r in their metadata, so metrics of it leave them out",
            unlabelled, len(scores), label,
        )  # fmt: skip
    if unscored:
        warn("%d of %d samples have no number and are left out", unscored, len(scores))
    return found


def classes(
    scores: Sequence[SampleScore], label: str, control: str | None, cluster: str | None
) -> tuple[list[tuple[float, str]], list[tuple[float, str]]]:
    """Values and groups of positives and of negatives, which are the control samples if any are."""

    def is_control(sample: SampleScore) -> bool:
        return control is not None and bool((sample.sample_metadata or {}).get(control))

    found = labelled([s for s in scores if not is_control(s)], label, cluster)
    rows = list(zip(found.values, found.groups, found.labels, strict=True))
    positives, negatives = (
        [(v, g) for v, g, y in rows if bool(y) is kind] for kind in (True, False)
    )
    if control is not None:
        pairs = [(s, v) for s in scores if is_control(s) and (v := _number(s)) is not None]
        negatives = [(v, cluster_of(s, cluster) if cluster else str(s.sample_id)) for s, v in pairs]
    return positives, negatives


def carried(scores: Sequence[SampleScore], name: str, key: str | None) -> Any:
    """A fact that all scores carry alike in their metadata, as far as they carry it."""
    found: list[Any] = []
    for sample in scores:
        metadata = sample.score.metadata or {}
        each = metadata.get(name) if key is None else (metadata.get(f"{name}s") or {}).get(key)
        # What a person has edited has metadata of its own, and says nothing of settings.
        if each is not None and each not in found:
            found.append(each)
    if len(found) > 1:
        raise SpecError(
            f"{name}: scores carry {len(found)} different ones; allowed is one; score all "
            f"samples with one probe and one setting, or pass {name}="
        )
    return found[0] if found else None


def read_threshold(
    scores: Sequence[SampleScore], given: float | None, key: str | None
) -> float | None:
    """The threshold of the caller, or the one that the scores carry."""
    found = given if given is not None else carried(scores, "threshold", key)
    return None if found is None else float(found)


def _number(sample: SampleScore) -> float | None:
    """The value, or None where there is none to use."""
    value: object = sample.score.value
    if value is None:  # an entry of a dict score
        return None
    if not isinstance(value, str | int | float | bool):
        raise SpecError(
            f"value of sample {sample.sample_id} is a {type(value).__name__}; allowed is a number; "
            'for dict scores use metrics={"*": [...]}, and no reducer that collects'
        )
    try:
        number = float(value)
    except ValueError:
        raise SpecError(
            f"value={value!r} of sample {sample.sample_id}; allowed is a number; these metrics "
            "are for scores that are numbers"
        ) from None
    return None if math.isnan(number) else number


@shared_parameters
def compare(
    log: EvalLog | str | Path,
    a: str,
    b: str,
    *,
    label: str = "label",
    cluster: str | None = None,
    confidence: float = 0.95,
) -> Comparison:
    """Test whether two scores of a log differ in AUROC.

    Samples that lack one of the two scores, or a label, are left out of both. The epochs of a
    sample are one group, as they are not independent; with `cluster` so are samples that share it.

    Args:
        log: with its samples, or its path.
        a: name of a score: its key in the log, such as `probe_score1`, or its `name`, such as
            `organism/deception-lr max`.
        b: name of the other.
        confidence: of the interval.

    Raises:
        SpecError: no score, or more than one, has the name; a value is no number; or a class has
            fewer than two samples.

    Source:
        DeLong, DeLong and Clarke-Pearson 1988; Obuchowski 1997, Biometrics 53, 567-578.

    Example:
        ```python
        from inspect_ai import score
        from inspect_ai.log import read_eval_log

        from inspect_lens.scorer import compare, probe_score

        pools = [probe_score("organism/deception-lr", pool=pool) for pool in ("max", "mean")]
        log = score(read_eval_log("logs/honesty.eval"), pools, action="overwrite")
        found = compare(log, "organism/deception-lr max", "organism/deception-lr mean")
        print(found.auroc_a, found.auroc_b, found.interval, found.too_few)
        ```
    """
    pairs, read = [], read_log(log)
    for sample in read.samples or []:
        both = [_score_of(sample, name) for name in (a, b)]
        values = [None if one is None else one.value for one in both]
        if not any(v is None or (isinstance(v, float) and math.isnan(v)) for v in values):
            pairs.append([sample_score(sample, one) for one in both if one is not None])
    if not pairs:
        known = {key for sample in read.samples or [] for key in _named(sample)}
        raise SpecError(f"a={a!r}, b={b!r}: no sample has both; scores here are {sorted(known)}")
    first, second = (labelled([pair[i] for pair in pairs], label, cluster) for i in (0, 1))
    groups = first.groups if cluster or len(set(first.groups)) < len(first.groups) else None
    return compare_auroc(
        first.labels, first.values, second.values, groups=groups, confidence=confidence
    )


def _named(sample: EvalSample) -> dict[str, list[Score]]:
    """Scores of a sample by key, and by the name that they have."""
    found: dict[str, list[Score]] = {}
    for key, score in (sample.scores or {}).items():
        for name in {key, str((score.metadata or {}).get("name", key))}:
            found.setdefault(name, []).append(score)
    return found


def _score_of(sample: EvalSample, name: str) -> Score | None:
    found = _named(sample).get(name, [])
    if len(found) > 1:
        raise SpecError(
            f"{name!r}: {len(found)} scores of sample {sample.id} have this name; allowed is one; "
            f"name it by its key, one of {sorted(sample.scores or {})}"
        )
    return found[0] if found else None
