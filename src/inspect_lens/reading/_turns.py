"""The model calls of a sample in order: what a monitor watches over a whole transcript."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from inspect_ai.event import Event, ModelEvent, SpanBeginEvent, SpanEndEvent
from inspect_ai.model import ModelOutput

from inspect_lens.model.from_logs._given import given_output
from inspect_lens.model.request._instrument import is_instrument_call

from ._aside import Aside

__all__ = ["Turn", "read_turns"]


class Turn(NamedTuple):
    """One call that wrote an assistant message."""

    number: int
    """0-based, in the order of the calls."""
    message_id: str | None
    output: ModelOutput
    role: str | None
    """Model role of the call; None for the model of the eval."""
    model: str
    """That made the call, as Inspect names it, such as `vllm-lens/organism/checkpoint`."""
    choice: int = 0
    """0-based, where a call has several answers and each is read by itself."""


def read_turns(
    events: Iterable[Event], *, model: str | None = None, roles: Sequence[str] | None = None
) -> list[Turn]:
    """List the calls that wrote an assistant message; those of scorers and oracles are left out.

    Calls that failed, and were tried again, wrote none. What `read_given` read is a turn as well,
    of the model that read it. Generations that were only compared are no turns: steered cells of
    a sweep, the other sides of `contrastive_pairs`, and attempts that a gate did not keep.

    Args:
        events: of a sample, live (`transcript().events`) or out of a log.
        model: name of the model whose calls are wanted, such as `str(state.model)`; calls in a
            role are then left out unless the role is listed. None takes every model.
        roles: model roles whose calls are wanted too, or alone when `model` is None.

    Returns:
        The turns.

    Example:
        ```python
        from inspect_ai.log import read_eval_log

        from inspect_lens.reading import read_turns

        sample = read_eval_log("logs/honesty.eval").samples[0]
        (turn,) = read_turns(sample.events)
        assert turn.output.completion == sample.output.completion
        ```
    """
    turns: list[Turn] = []
    scorers: set[str] = set()
    events = list(events)
    aside = Aside.of(events)
    for event in events:
        if isinstance(event, SpanBeginEvent) and event.type in ("scorer", "scorers"):
            scorers.add(event.id)
        elif isinstance(event, SpanEndEvent):
            scorers.discard(event.id)
        elif isinstance(event, ModelEvent) and not scorers and _is_wanted(event, model, roles):
            output = event.output
            if event.error is not None or not output.choices or is_instrument_call(event.input):
                continue
            message_id = output.message.id
            if aside.has(event, message_id):
                continue
            turns.append(Turn(len(turns), message_id, output, event.role, event.model))
        elif not scorers and (given := given_output(event)) is not None:
            # Read by the model that reads; it plays no role.
            is_wanted = roles is None if model is None else given.model == model
            if is_wanted:
                turns.append(Turn(len(turns), given.message.id, given, None, given.model))
    return turns


def _is_wanted(event: ModelEvent, model: str | None, roles: Sequence[str] | None) -> bool:
    if event.role is not None and roles is not None:
        return event.role in roles
    if model is None:
        return roles is None
    return event.role is None and event.model == model
