"""What a log says of a cascade at every share of samples that the judge could read."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

from inspect_ai.log import EvalLog, EvalSample, read_eval_log
from inspect_ai.scorer import Score

from inspect_lens.errors import SpecError

__all__ = ["CascadeRecord", "read_cascade"]

logger = logging.getLogger(__name__)


class CascadeRecord(NamedTuple):
    """Scores of a probe and of a judge on the same samples, as `cascade_frontier` takes them."""

    labels: list[int]
    probe_scores: list[float]
    judge_scores: list[float]
    """0 to 1."""
    groups: list[str]
    """Clusters, or sample ids: the epochs of one sample are one group."""
    judge_cost: list[float] | None
    """Tokens that the judge read and wrote for each sample; None where it did not count them."""
    probe_threshold: float | None
    """Of the probe's card."""
    judge_threshold: float
    """0.5: above it the judge says that the statement is true."""

    def arguments(self, **other: Any) -> dict[str, Any]:
        """Keyword arguments of `inspect_lens.train.cascade_frontier`.

        Args:
            **other: instead of what the log says, such as `probe_threshold` or `judge_cost`.
        """
        known = {k: v for k, v in self._asdict().items() if v is not None}
        return {**known, **other}


def read_cascade(
    log: str | Path | EvalLog,
    *,
    label: str = "label",
    cluster: str | None = None,
    name: str = "probe_cascade",
) -> CascadeRecord:
    """Read a log in which `probe_cascade` asked the judge about every sample.

    What a cascade would find and cost at another share follows from it, without another call of the
    judge. Ask about every sample with `band=(0.0, 1.0)`, or with
    `band=(-math.inf, math.inf), unit="score"` where the card has no calibration.

    Args:
        log: the log, or its path.
        label: key of the sample metadata that holds 1 or true for positives.
        cluster: key of the sample metadata that says which samples are not independent.
        name: of the scores in the log.

    Returns:
        What `cascade_frontier` takes. Samples without a number of the judge are left out, and a
        warning counts them.

    Raises:
        SpecError: there is no such score, a label is none, or the judge was not asked about a
            sample.

    Example:
        ```python
        import math

        from inspect_ai import score
        from inspect_ai.log import read_eval_log
        from inspect_ai.model import ModelOutput, ModelUsage, get_model

        from inspect_lens.scorer import probe_cascade, read_cascade
        from inspect_lens.train import cascade_frontier

        usage = {"usage": ModelUsage(total_tokens=90)}
        says = [ModelOutput.from_content("m", n).model_copy(update=usage) for n in ("95", "10")] * 4
        log = score(
            read_eval_log("logs/honesty.eval"),
            probe_cascade(
                "organism/deception-lr",
                band=(-math.inf, math.inf),
                unit="score",
                judge=get_model("mockllm/model", custom_outputs=says),  # any model of Inspect
            ),
            action="overwrite",
        )
        found = read_cascade(log)
        alone, *_, judged = cascade_frontier(**found.arguments())
        print(alone.recall, alone.recall_interval, judged.recall)
        ```
    """
    read = log if isinstance(log, EvalLog) else read_eval_log(str(log))
    found = CascadeRecord([], [], [], [], [], None, 0.5)
    threshold: Any = None
    failed = n = 0
    for sample in read.samples or []:
        score = (sample.scores or {}).get(name)
        if score is None:
            continue
        n += 1
        facts = score.metadata or {}
        _check(sample, facts, label)
        threshold = facts.get("probe_threshold", threshold)
        value = _number(score)
        if value is None or "probe_value" not in facts:
            failed += 1
            continue
        found.labels.append(int(sample.metadata[label]))
        found.probe_scores.append(float(facts["probe_value"]))
        found.judge_scores.append(value)
        found.groups.append(_group(sample, cluster))
        assert found.judge_cost is not None
        if "judge_tokens" in facts:
            found.judge_cost.append(float(facts["judge_tokens"]))
    if not found.labels:
        raise SpecError(
            f"log: {n} scores {name!r}, none of them with a number; allowed is a log that "
            "probe_cascade scored, with a judge that answers with numbers"
        )
    if failed:
        logger.warning("%d of %d samples have no number of the judge and are left out", failed, n)
    counted = len(found.judge_cost or []) == len(found.labels)
    return found._replace(
        judge_cost=found.judge_cost if counted else None,
        probe_threshold=None if threshold is None else float(threshold),
    )


def _check(sample: EvalSample, facts: dict[str, Any], label: str) -> None:
    mark = (sample.metadata or {}).get(label)
    if not isinstance(mark, bool | int | float) or mark not in (0, 1):
        raise SpecError(
            f"metadata.{label}={mark!r} of sample {sample.id}; allowed are true, false, 1 and 0; "
            "name the key with label="
        )
    if facts.get("judged") is False:
        raise SpecError(
            f"sample {sample.id}: the judge was not asked; allowed is a log in which it read every "
            "sample; score with band=(0.0, 1.0), or with an endless band in unit='score'"
        )


def _group(sample: EvalSample, cluster: str | None) -> str:
    if cluster is None:
        return str(sample.id)
    if cluster not in (sample.metadata or {}):
        raise SpecError(
            f"metadata.{cluster} of sample {sample.id} is missing; allowed is a key that every "
            "sample has; name it with cluster="
        )
    return str(sample.metadata[cluster])


def _number(score: Score) -> float | None:
    value = score.value
    return float(value) if isinstance(value, int | float) and value == value else None
