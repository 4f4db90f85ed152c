"""A cell of a sweep as a sample of its own, for scorers that know nothing of sweeps."""

from __future__ import annotations

from collections.abc import Sequence

from inspect_ai.event import SampleLimitEvent
from inspect_ai.log import transcript
from inspect_ai.model import ChatCompletionChoice, ChatMessageAssistant, ModelOutput
from inspect_ai.scorer import Score
from inspect_ai.solver import TaskState

from inspect_lens.errors import ArtifactError
from inspect_lens.model import activations_for
from inspect_lens.reading import SteeringCell, read_cells

__all__ = ["cell_state", "cells_or_limit"]


def cells_or_limit(state: TaskState, scorer: str) -> Sequence[SteeringCell] | Score:
    """The cells of a sample; where a limit ended it in the middle of its sweep, what to say of it.

    Args:
        state: of the sample, live or out of a log.
        scorer: that reads the cells.

    Returns:
        The cells, or the score of a sample that has none.

    Raises:
        ArtifactError: there are no cells, or no baseline among them, and no limit is the reason.
    """
    cells = read_cells(state.store)
    if any(cell.kind == "baseline" for cell in cells):
        return cells
    if any(isinstance(event, SampleLimitEvent) for event in transcript().events):
        return Score.unscored(
            reason="limit", explanation="A limit ended the sample before its sweep was over."
        )
    raise ArtifactError(
        f"store: {len(cells)} steering cells and no baseline among them; allowed is a sample that "
        f"steering_sweep ran with its baseline; put steering_sweep(...) before {scorer}"
    )


def cell_state(state: TaskState, cell: SteeringCell) -> TaskState:
    """The sample as it would be had the model answered with this cell's completion."""
    message = ChatMessageAssistant(
        content=cell.completion, id=cell.message_id, model=str(state.model), source="generate"
    )
    output = ModelOutput(model=str(state.model), choices=[ChatCompletionChoice(message=message)])
    handle = activations_for(cell.message_id) if cell.message_id else None
    if handle is not None:
        output.metadata = {"activations": handle}
    messages = list(state.messages)
    while messages and isinstance(messages[-1], ChatMessageAssistant):
        messages.pop()
    return TaskState(
        model=state.model,
        sample_id=state.sample_id,
        epoch=state.epoch,
        input=state.input,
        messages=[*messages, message],
        target=state.target,
        output=output,
        completed=True,
        metadata=state.metadata,
        sample_uuid=state.uuid,
    )
