r"""Task `refusal_steering`.

```text
inspect eval inspect_lens/refusal_steering -T harmful=<harmful.json> -T harmless=<harmless.json> \
    -T vector=<vector> --model vllm-lens/<model>
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inspect_ai import Task, task
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import Metric, SampleScore, Scorer, Value, metric, scorer

from evals.kit.arguments import required
from evals.refusal_steering.dataset import refusal_dataset
from inspect_lens import judged_arguments
from inspect_lens.scorer import dose_metric, dose_response, refusal_rate
from inspect_lens.solver import steering_sweep

__all__ = ["by_kind", "each_kind", "refusal_steering", "refusals_by_dose"]


@task
@judged_arguments
def refusal_steering(
    vector: str | None = None,
    harmful: str | None = None,
    harmless: str | None = None,
    scales: Sequence[float] = (-1, -0.5, 0.5, 1),
    layers: list[int] | int | None = None,
    limit: int | None = None,
    role: str | None = None,
    max_tokens: int = 64,
) -> Task:
    """Give instructions unsteered and under a refusal vector at several scales.

    Args:
        vector: name below `vectors/`, path or `hf://` address.
        harmful: file of instructions that a model should refuse.
        harmless: file of instructions that it should follow.
        scales: factors of the vector.
        layers: to steer, one at a time; that of the vector's card by default.
        limit: instructions of each kind at most.
        role: model role that judges refusals, such as `grader`; phrases decide by default.
        max_tokens: longest answer.

    Returns:
        The task; `refusals_by_dose` says how the rate of refusals follows the scale, beside
        random and orthogonal vectors of the same length, of harmful and of harmless instructions
        apart: a vector that makes a model refuse both has found no refusal of harm.
    """
    vector = required("vector", vector, "a steering vector, by name, path or hf:// address")
    harmful = required("harmful", harmful, "a file of instructions that a model should refuse")
    return Task(
        dataset=refusal_dataset(harmful, harmless, limit=limit),
        solver=steering_sweep(vector, scales, layers=layers),
        scorer=refusals_by_dose(role),
        config=GenerateConfig(temperature=0.0, max_tokens=max_tokens),
    )


@metric(scores="unreduced")  # as dose_metric: every epoch is an answer of its own
def by_kind() -> Metric:
    """`dose_metric` of harmful and of harmless instructions, each under its own names.

    Returns:
        The metric; `harmful_effect` is that of harmful instructions, and so on. A kind
        that the task has no sample of has no values.
    """
    return each_kind(dose_metric())


def each_kind(of: Metric) -> Metric:
    """A metric with several values, of harmful and of harmless instructions apart.

    Args:
        of: the metric.

    Returns:
        What a metric of both kinds returns; the kind stands in front of each name.
    """
    compute: Any = of

    def each(scores: list[SampleScore]) -> Value:
        found: dict[str, Any] = {}
        for kind in ("harmful", "harmless"):
            own = [s for s in scores if (s.sample_metadata or {}).get("kind") == kind]
            values = compute(own) if own else {}
            found |= {f"{kind}_{name}": value for name, value in values.items()}
        return found

    return each


@scorer(metrics=[by_kind()])
def refusals_by_dose(role: str | None = None) -> Scorer:
    """`dose_response` of refusals, with harmful and harmless instructions apart.

    Args:
        role: model role that judges refusals; phrases decide by default.

    Returns:
        The scorer.
    """
    return dose_response(refusal_rate(role=role))
