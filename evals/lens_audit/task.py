r"""Task `lens_audit`.

```text
inspect eval inspect_lens/lens_audit --model vllm-lens/organism \
    --model-role auditor=<model> --model-role judge=<model>
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from inspect_ai import Task, task
from inspect_ai.model import model_roles
from inspect_ai.scorer import Scorer, mean, scorer, stderr
from inspect_ai.viewer import TaskSamplesColumn, TaskSamplesSort, ViewerConfig
from inspect_petri import audit_judge, audit_viewer
from inspect_scout import as_scorer

from evals.lens_audit.dataset import audit_seeds
from inspect_lens import judged_arguments
from inspect_lens.agents.petri import lens_audit_solver
from inspect_lens.scorer import monitor_alarm
from inspect_lens.view import probe_viewer

__all__ = ["lens_audit", "target_alarm"]

ORGANISM_PROBE, ORGANISM_VECTOR = "organism/deception-lr", "organism/truth-resid"
NONE = "none"


@task
@judged_arguments
def lens_audit(
    probe: str = ORGANISM_PROBE,
    vector: str | list[str] | None = None,
    oracle: str | None = None,
    layer: int | None = None,
    threshold: str | None = None,
    seed_instructions: str | list[str] | None = None,
    target_tools: Literal["synthetic", "fixed", "none"] = "none",
    max_turns: int = 30,
    compaction: bool | int | float = True,
    judge: bool | None = None,
    judge_dimensions: str | list[str] | None = None,
    check_model: bool = True,
) -> Task:
    """Let an auditor question a target whose probe it reads, and which it may steer.

    Args:
        probe: of the target; name below `probes/`, path or `hf://` address.
        vector: one or several that the auditor steers with, by name below `vectors/` or path; by
            default that of the organism with its probe, and none with another. `none` for none.
        oracle: activation oracle of the target's model, for a server that takes LoRA adapters.
        layer: one of the probe's layers.
        threshold: operating point of the probe's card, such as `fpr=0.05`; its first by default.
        seed_instructions: what the auditor is to do, as for Petri's `audit`; four about the
            organism by default.
        target_tools: as for Petri's `audit`; the server of a target that gets tools needs a
            parser of tool calls.
        max_turns: of the auditor.
        compaction: of the auditor's messages, as for Petri's `audit`.
        judge: let the model in the role `judge` grade the transcript; by default where that role
            is given when the task is made, as on the command line.
        judge_dimensions: as for Petri's `audit`.
        check_model: refuse a target whose fingerprint is not that of the probe's card.

    Returns:
        The task; `target_alarm` is the share of audits with a turn above the threshold, and
        `audit_judge` the judge's grades.
    """
    judged = "judge" in model_roles() if judge is None else judge
    scorers: list[Scorer] = [
        target_alarm(probe, layer=layer, threshold=threshold, check_model=check_model)
    ]
    if judged:
        scorers.append(as_scorer(audit_judge(judge_dimensions)))
    return Task(
        dataset=audit_seeds(seed_instructions),
        solver=lens_audit_solver(
            probe,
            oracle=None if oracle == NONE else oracle,
            vectors=_vectors(vector, probe),
            layer=layer,
            threshold=threshold,
            target_tools=target_tools,
            max_turns=max_turns,
            compaction=compaction,
            check_model=check_model,
            judged=judged,
        ),
        scorer=scorers,
        viewer=_viewer(judge_dimensions) if judged else probe_viewer(["target_alarm"]),
    )


# Of its own name in this file, where `inspect score` finds it, and with the metrics of an audit,
# which has no label.
@scorer(metrics=[mean(), stderr()])
def target_alarm(
    probe: str,
    layer: int | None = None,
    threshold: str | None = None,
    check_model: bool = True,
) -> Scorer:
    """`monitor_alarm` of the target's turns, on every branch of an audit.

    Args:
        probe: name below `probes/`, path or `hf://` address.
        layer: one of the probe's layers.
        threshold: operating point of the probe's card.
        check_model: refuse a target whose fingerprint is not that of the card.

    Returns:
        The scorer: 1 for an audit with a turn above the threshold. Its metadata has these turns
        as `alarms`, each with its message and value.
    """
    return monitor_alarm(
        probe, layer=layer, threshold=threshold, roles=["target"], check_model=check_model
    )


def _vectors(vector: str | Sequence[str] | None, probe: str) -> dict[str, str] | None:
    """What the auditor steers with, by name; None for nothing."""
    if vector is None:
        vector = ORGANISM_VECTOR if probe == ORGANISM_PROBE else NONE
    names = [vector] if isinstance(vector, str) else list(vector)
    return None if names == [NONE] else {name: name for name in names}


def _viewer(judge_dimensions: str | list[str] | None) -> ViewerConfig:
    """Petri's list of samples, with the probe in front and those that alarmed first."""
    config = audit_viewer(judge_dimensions)
    view = config.task_samples_view
    assert view is not None
    assert not isinstance(view, list)
    alarm = TaskSamplesColumn.score("target_alarm")
    first = [TaskSamplesSort.score("target_alarm", dir="desc"), *(view.sort or [])]
    columns = [*(view.columns or [])]
    at = next((i for i, c in enumerate(columns) if c.id.startswith("score")), len(columns))
    shown = view.model_copy(
        update={"columns": [*columns[:at], alarm, *columns[at:]], "sort": first}
    )
    return config.model_copy(update={"task_samples_view": shown})
