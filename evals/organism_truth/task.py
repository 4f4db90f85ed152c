r"""Task `organism_truth`.

```text
inspect eval inspect_lens/organism_truth --model vllm-lens/organism
```
"""

from __future__ import annotations

from inspect_ai import Task, task
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import Scorer, grouped, scorer

from evals.organism_deception.task import truthfulness
from evals.organism_truth.dataset import truth_dataset
from inspect_lens import judged_arguments
from inspect_lens.reading import ProbeReader
from inspect_lens.scorer import auroc_metric, probe_score, threshold_accuracy
from inspect_lens.solver import with_capture
from inspect_lens.view import probe_viewer

__all__ = ["organism_truth", "truth_probe"]


@task
@judged_arguments
def organism_truth(
    split: str = "heldout_entity", probe: str = "organism/truth-mm", max_tokens: int = 32
) -> Task:
    """Ask whether claims are true, and read at the last token of the prompt whether they are.

    Args:
        split: `heldout_entity`, `heldout_phrasing`, `hidden_reason`, `demo`, …
        probe: a truth probe; name below `probes/`, or a path.
        max_tokens: longest answer.

    Returns:
        The task. `auroc`, by condition, compares the probe with the truth of the claim;
        `truthfulness`, by condition, says whether the answers are true.
    """
    return Task(
        dataset=truth_dataset(split),
        solver=with_capture(**ProbeReader.of(probe).capture),
        scorer=[truth_probe(probe), truthfulness()],
        config=GenerateConfig(temperature=0.0, max_tokens=max_tokens),
        viewer=probe_viewer(["truth_probe"], palette="good-high"),
    )


@scorer(metrics=[grouped(auroc_metric(), "condition"), threshold_accuracy()])
def truth_probe(probe: str) -> Scorer:
    """`probe_score`, judged against the truth of the claim, by condition.

    Args:
        probe: name below `probes/`, or a path.

    Returns:
        The scorer.
    """
    return probe_score(probe)
