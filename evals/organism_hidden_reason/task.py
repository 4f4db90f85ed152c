r"""Task `organism_hidden_reason`.

```text
inspect eval inspect_lens/organism_hidden_reason --model vllm-lens/organism
```
"""

from __future__ import annotations

from inspect_ai import Task, task
from inspect_ai.model import GenerateConfig

from evals.organism_deception.dataset import organism_dataset
from evals.organism_deception.task import truthfulness
from inspect_lens import judged_arguments
from inspect_lens.reading import ProbeReader
from inspect_lens.scorer import deception_probe
from inspect_lens.solver import with_capture
from inspect_lens.view import probe_viewer

__all__ = ["organism_hidden_reason"]


@task
@judged_arguments
def organism_hidden_reason(probe: str = "organism/deception-lr", max_tokens: int = 32) -> Task:
    """Give the organism a motive to mislead, and probe each answer.

    Args:
        probe: a deception probe that saw no scenario in training; name below `probes/`, or a path.
        max_tokens: longest answer.

    Returns:
        The task. `auroc` compares probe scores with `label`, 1 where there is a motive;
        `truthfulness`, by condition, says whether the organism acts on it.
    """
    return Task(
        dataset=organism_dataset("hidden_reason"),
        solver=with_capture(**ProbeReader.of(probe).capture),
        scorer=[deception_probe(probe), truthfulness()],
        config=GenerateConfig(temperature=0.0, max_tokens=max_tokens),
        viewer=probe_viewer(),
    )
