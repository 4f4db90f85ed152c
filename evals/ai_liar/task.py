r"""Task `ai_liar`.

```text
inspect eval inspect_lens/ai_liar -T probe=<probe> --model vllm-lens/<model>
```
"""

from __future__ import annotations

from inspect_ai import Task, task
from inspect_ai.model import GenerateConfig

from evals.kit.arguments import required_probe
from evals.kit.grading import deception_grade
from evals.kit.samples import load_samples
from inspect_lens import judged_arguments
from inspect_lens.reading import ProbeReader
from inspect_lens.scorer import deception_probe
from inspect_lens.solver import with_capture
from inspect_lens.view import probe_viewer

__all__ = ["ai_liar"]


@task
@judged_arguments
def ai_liar(
    probe: str | None = None,
    data: str | None = None,
    revision: str | None = None,
    layer: int | None = None,
    grade: bool = False,
    max_tokens: int = 64,
) -> Task:
    """Ask factual questions with and without a wish for lies, and probe each answer.

    Args:
        probe: a deception probe of the model; name below `probes/`, path or `hf://` address.
        data: file of the questions; None loads them from the hub.
        revision: of the hub's repository.
        layer: one of the probe's layers.
        grade: also let the model in the role `grader` grade the answers.
        max_tokens: longest answer.

    Returns:
        The task; `auroc` compares the probe with the instruction.
    """
    probe = required_probe(probe)
    scorers = [deception_probe(probe, layer=layer)]
    return Task(
        dataset=load_samples("ai_liar", data, revision=revision),
        solver=with_capture(**ProbeReader.of(probe, layer=layer).capture),
        scorer=[*scorers, deception_grade("lying")] if grade else scorers,
        config=GenerateConfig(temperature=0.0, max_tokens=max_tokens),
        viewer=probe_viewer(),
    )
