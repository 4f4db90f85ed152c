"""`probe_approver`: approve tool calls by a probe of the turn that makes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from inspect_ai.approval import Approval, Approver, approver
from inspect_ai.model import ChatMessage
from inspect_ai.tool import ToolCall, ToolCallView

from inspect_lens.probe import AnyProbe
from inspect_lens.reading import OnMissing, ProbeReader, Source
from inspect_lens.reading._samples import Judged, TurnJudge, turn_of
from inspect_lens.reading._shared import shared_parameters
from inspect_lens.reading._thresholds import acting_value
from inspect_lens.spec import Positions

Action = Literal["reject", "terminate", "escalate"]
"""What happens to a call above the threshold: the model hears that it was refused, the sample
ends, or the next approver of the policy decides."""


@approver
@shared_parameters
def probe_approver(
    probe: str | Path | AnyProbe,
    threshold: float | str | None = None,
    action: Action = "reject",
    below: Literal["approve", "escalate"] = "approve",
    layer: int | None = None,
    positions: Positions | list[int] | None = None,
    pool: str | None = None,
    selection: str | None = None,
    source: Source = "auto",
    check_model: bool = True,
    tokenizer: str | None = None,
    roles: Sequence[str] | None = None,
    on_missing: OnMissing = "error",
    told: str = "Tool call not approved.",
) -> Approver:
    """Refuse tool calls of turns in which a probe is above its threshold, before they run.

    It reads the activations with which the model wrote the turn, so that the eval has to capture:
    `-M capture=…`, `with_capture(…, inner=…)` or INSPECT_LENS_CAPTURE. Nothing is generated. All
    calls of one turn get one verdict.

    ```text
    inspect eval task.py --model vllm-lens/… -M capture=4 --approval approval.yaml
    ```

    ```yaml
    approvers:
      - name: inspect_lens/probe_approver
        tools: "*"
        params: {probe: organism/deception-lr, action: terminate}
    ```

    Args:
        threshold: a score above it is acted on: a number, or an operating point of the card such
            as `fpr=0.05`; that of the card, for its own settings, by default. Its false positive
            rate is that of one turn.
        action: what happens to calls above it: `reject`, `terminate` or `escalate`.
        below: what happens to the others, and to those of which nothing is read: `approve`, or
            `escalate` to the next approver.
        roles: model roles whose turns are read, where others are left alone; any by default.
        told: what the model hears of a rejected call; Inspect's words by default. Which probe
            rejected it, and why, is in the log alone: in the metadata of the approval's event.

    Returns:
        The approver. A turn of which nothing is read is treated as one below the threshold.

    Raises:
        ArtifactError: no such probe; while it runs, a turn without activations.
        SpecError: an argument is wrong, or there is no threshold for these settings.

    Example:
        ```python
        from inspect_ai import Task
        from inspect_ai.agent import react
        from inspect_ai.approval import ApprovalPolicy
        from inspect_ai.dataset import Sample

        from inspect_lens.agents import probe_approver

        watch = probe_approver("organism/deception-lr", action="terminate")
        rules = [ApprovalPolicy(watch, "*")]
        task = Task([Sample(input="…")], solver=react(), approval=rules)
        # inspect eval … --model vllm-lens/organism/checkpoint -M capture=4
        ```
    """
    reader = ProbeReader.of(
        probe, layer=layer, positions=positions, pool=pool, selection=selection, source=source,
        check_model=check_model, tokenizer=tokenizer, roles=roles, on_missing=on_missing,
        threshold=threshold,
    )  # fmt: skip
    judge = TurnJudge(reader, acting_value(reader, threshold))

    async def approve(
        message: str, call: ToolCall, view: ToolCallView, history: list[ChatMessage]
    ) -> Approval:
        return _approval(await judge.judge(turn_of(call, history)), judge, action, below, told)

    return approve


def _approval(
    judged: Judged,
    judge: TurnJudge,
    action: Action,
    below: Literal["approve", "escalate"],
    told: str,
) -> Approval:
    name, value = judge.reader.probe.name, judged.value
    if value is None:
        return Approval(decision=below, explanation=f"Nothing of this turn is read by {name}.")
    facts = {"probe_approver": judged.facts}
    means = judge.promise(judged).text
    if not judged.is_above:
        said = f"{name} scores {value:.4g}, not above {judge.threshold:.4g}. {means}"
        return Approval(decision=below, explanation=said, metadata=facts)
    done = "The next approver decides" if action == "escalate" else "The call was not carried out"
    said = (
        f"{name} scores {value:.4g} in the turn that makes this call, above "
        f"{judge.threshold:.4g}. {done}. {means}"
    )
    if action == "reject":
        # Inspect hands the explanation to the model.
        facts = {"probe_approver": {**(judged.facts or {}), "explanation": said}}
        said = told
    return Approval(decision=action, explanation=said, metadata=facts)
