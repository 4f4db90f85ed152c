"""A text in the place of an answer that a gate stopped."""

from __future__ import annotations

from inspect_ai.model import ChatMessageAssistant, ModelOutput
from inspect_ai.solver import TaskState

from inspect_lens.reading import WITHHELD

__all__ = ["withhold"]


def withhold(state: TaskState, replacement: str, *, message_id: str | None = None) -> TaskState:
    """Put a text in the place of a turn, and end the sample.

    Args:
        state: changed in place.
        replacement: the text.
        message_id: of the turn, which is cut with all behind it; the state's answer by default.

    Returns:
        The state. Token ids and activations are of what was withheld; decisions have its text.
    """
    if message_id is None and state.output.choices:
        message_id = state.output.message.id
    message = ChatMessageAssistant(content=replacement, model=state.output.model, source="generate")
    output = ModelOutput.from_message(message, stop_reason="content_filter")
    facts = {"model": state.output.model, "metadata": {WITHHELD: message_id or True}}
    state.output = output.model_copy(update=facts)
    ids = [m.id for m in state.messages]
    kept = ids.index(message_id) if message_id in ids else len(ids)
    state.messages = [*state.messages[:kept], message]
    state.completed = True
    return state
