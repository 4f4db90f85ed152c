"""`compare`: is one score of a log better than another, on the samples that both have."""

from __future__ import annotations

import math
from pathlib import Path

from inspect_ai.log import EvalLog, EvalSample, read_eval_log
from inspect_ai.scorer import Score

from inspect_lens.errors import SpecError
from inspect_lens.probe import Comparison, compare_auroc
from inspect_lens.reading._shared import shared_parameters

from ._labels import labelled, sample_score


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

    Returns:
        Both areas, their difference with its interval, and the p-value, as `compare_auroc` has it.

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
    read = log if isinstance(log, EvalLog) else read_eval_log(str(log))
    pairs = []
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
