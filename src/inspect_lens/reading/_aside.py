"""Generations that were only compared: which of a sample's calls wrote nothing that stands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, Self

from inspect_ai.event import Event, InfoEvent, SpanBeginEvent
from inspect_ai.log import transcript
from inspect_ai.model import ChatMessage

__all__ = ["Aside", "AsideSpan", "ids_of", "record_standing"]

AsideSpan = Literal["steering_cell", "contrastive", "attempt"]
"""Types of the spans in which solvers of this package generate several answers to choose from."""

_SPANS: Final = frozenset({"steering_cell", "contrastive", "attempt"})
_SOURCE: Final = "inspect_lens/standing"
_KEY: Final = "message_ids"


def record_standing(message_ids: Iterable[str]) -> None:
    """Note in the transcript which of the answers that were compared stand.

    A sample that ends before this note was made has none that does.
    """
    transcript().info({_KEY: list(message_ids)}, source=_SOURCE)


def ids_of(messages: Iterable[ChatMessage]) -> list[str]:
    """Ids of the assistant messages among these."""
    return [m.id for m in messages if m.role == "assistant" and m.id is not None]


@dataclass(frozen=True)
class Aside:
    """Which calls of a sample were made to be compared, and do not stand."""

    parents: dict[str, str | None]
    """Of each span."""
    spans: frozenset[str]
    """In which answers are compared."""
    standing: frozenset[str]
    """Ids of the messages that stand all the same."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> Self:
        """Read the spans and notes of a sample."""
        parents: dict[str, str | None] = {}
        spans: set[str] = set()
        standing: set[str] = set()
        for event in events:
            if isinstance(event, SpanBeginEvent):
                parents[event.id] = event.parent_id
                if event.type in _SPANS:
                    spans.add(event.id)
            elif isinstance(event, InfoEvent) and event.source == _SOURCE:
                ids = event.data.get(_KEY) if isinstance(event.data, dict) else None
                standing |= {str(one) for one in ids} if isinstance(ids, list) else set()
        return cls(parents, frozenset(spans), frozenset(standing))

    def has(self, event: Event, message_id: str | None) -> bool:
        """Whether a call was made to be compared, and what it wrote does not stand."""
        if not self.spans or message_id in self.standing:
            return False
        span = event.span_id
        while span is not None:
            if span in self.spans:
                return True
            span = self.parents.get(span)
        return False
