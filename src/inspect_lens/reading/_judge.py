"""A probe's verdict on a turn that is about to act: what approvers and gates have in common."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from inspect_ai.model import ChatMessage, ChatMessageAssistant, ModelOutput
from inspect_ai.tool import ToolCall

from inspect_lens.errors import ArtifactError

from ._reader import ProbeReader
from ._samples import read_message
from ._thresholds import verdict_facts

KEPT = 1024
"""Verdicts that are remembered, the latest ones; parallel calls of one turn ask for the same."""


class Judged(NamedTuple):
    """What a probe says of one turn; small, as many of them are kept."""

    completion: str
    """Text of the turn."""
    functions: tuple[str, ...]
    """Names of the tools that it calls."""
    call_ids: frozenset[str]
    """Of these calls."""
    value: float | None
    """Score; None for a turn without a token to read."""
    is_above: bool
    """Whether the score is above the threshold."""
    facts: Mapping[str, Any] | None = None
    """Small facts of the reading, for a log."""

    @property
    def n_tokens(self) -> int | None:
        """Tokens that the probe read; None where it read none."""
        return None if self.facts is None else self.facts["n_tokens"]


class TurnJudge:
    """Judges turns by a probe, before what they ask for is done."""

    def __init__(self, reader: ProbeReader, threshold: float) -> None:
        self.reader = reader
        self.threshold = threshold
        self.judged: OrderedDict[str, Judged] = OrderedDict()
        """By message id, in the order of the turns; the latest 1024."""

    async def judge(
        self, message: ChatMessageAssistant, output: ModelOutput | None = None
    ) -> Judged:
        """Read the probe on the call that wrote a message."""
        key = message.id or ""
        if key in self.judged:
            return self.judged[key]
        reading = await read_message(self.reader, message, output=output)
        calls = message.tool_calls or []
        made = Judged(
            completion=message.text,
            functions=tuple(call.function for call in calls),
            call_ids=frozenset(call.id for call in calls),
            value=None if reading is None else reading.value,
            is_above=reading is not None and reading.value > self.threshold,
            facts=None if reading is None else verdict_facts(self.reader, self.threshold, reading),
        )
        if key:
            self.judged[key] = made
            while len(self.judged) > KEPT:
                self.judged.popitem(last=False)
        return made


def turn_of(call: ToolCall, history: Sequence[ChatMessage]) -> ChatMessageAssistant:
    """The message that makes a tool call."""
    for message in reversed(history):
        calls = message.tool_calls if isinstance(message, ChatMessageAssistant) else None
        if isinstance(message, ChatMessageAssistant) and any(c.id == call.id for c in calls or ()):
            return message
    raise ArtifactError(
        f"tool call {call.id} of {call.function}: no message of the conversation makes it, so its "
        "turn cannot be read; allowed are calls that stand in an assistant message"
    )
