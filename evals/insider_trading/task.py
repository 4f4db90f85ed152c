r"""Task `insider_trading`.

```text
inspect eval inspect_lens/insider_trading -T data=<rollouts.json> \
    -T probe=<probe> --model vllm-lens/<model> --model-role grader=<judge>
```
"""

from __future__ import annotations

from typing import Literal

from inspect_ai import Task, task

from evals.kit.rollouts import rollout_task
from inspect_lens import judged_arguments

__all__ = ["insider_trading"]


@task
@judged_arguments
def insider_trading(
    probe: str | None = None,
    data: str | None = None,
    layer: int | None = None,
    policy: Literal["on", "off"] = "on",
    max_tokens: int = 512,
    temperature: float = 0.0,
) -> Task:
    """Let the model report on a trade that it made on a forbidden tip, and probe the report.

    Args:
        probe: a deception probe of the model; name below `probes/`, path or `hf://` address.
        data: file or folder of rollouts; see the README.
        layer: one of the probe's layers.
        policy: `on`, the model answers and the model in the role `grader` grades; `off`, recorded
            answers are read, with their recorded grades.
        max_tokens: longest answer.
        temperature: of sampling.

    Returns:
        The task.
    """
    return rollout_task(
        "apollo_insider_trading", "insider_trading", data=data, probe=probe, layer=layer,
        policy=policy, max_tokens=max_tokens, temperature=temperature,
    )  # fmt: skip
