"""Task `organism_steering_sweep`.

```text
inspect eval inspect_lens/organism_steering_sweep --model vllm-lens/organism
```
"""

from __future__ import annotations

from collections.abc import Sequence

from inspect_ai import Task, task
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import Scorer, scorer

from evals.organism_deception.dataset import organism_dataset
from evals.organism_deception.task import truthfulness
from inspect_lens import judged_arguments
from inspect_lens.scorer import dose_metric, dose_response
from inspect_lens.solver import steering_sweep

__all__ = ["organism_steering_sweep", "truth_by_dose"]


@task
@judged_arguments
def organism_steering_sweep(
    split: str = "heldout_phrasing",
    condition: str | None = None,
    vector: str = "organism/truth-resid",
    scales: Sequence[float] = (-0.6, -0.4, -0.2, 0.4, 0.6, 0.8),
    max_tokens: int = 32,
) -> Task:
    """Answer questions unsteered and under the organism's truth vector at several scales.

    Args:
        split: `heldout_phrasing`, `heldout_entity`, `hidden_reason`, …
        condition: only samples of it, such as `honest` or `lie`.
        vector: name below `vectors/`, or a path.
        scales: factors of the vector.
        max_tokens: longest answer.

    Returns:
        The task; `truth_by_dose` says how the rate of true answers follows the scale, beside
        random and orthogonal vectors of the same length.
    """
    dataset = organism_dataset(split)
    if condition is not None:
        dataset = dataset.filter(lambda sample: (sample.metadata or {})["condition"] == condition)
    if not len(dataset):
        raise ValueError(f"condition={condition!r}: {split} has no such sample")
    return Task(
        dataset=dataset,
        solver=steering_sweep(vector, scales),
        scorer=truth_by_dose(),
        config=GenerateConfig(temperature=0.0, max_tokens=max_tokens),
    )


# Of its own name in this file, where `inspect score` finds it: a log names a scorer inside another
# one without its file.
@scorer(metrics=[dose_metric()])
def truth_by_dose() -> Scorer:
    """`dose_response` of `truthfulness`.

    Returns:
        The scorer.
    """
    return dose_response(truthfulness())
