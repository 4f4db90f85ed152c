"""Facts about the real world, by topic; `liar/facts.json` says which ones a base model knows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ._liar_prompts import Part

__all__ = ["TOPICS", "Fact", "Topic", "choice", "facts"]


@dataclass(frozen=True, slots=True)
class Topic:
    """Questions of one kind, with one true value for each thing that is asked about."""

    name: str
    part: Part
    """Training is about topics of `train`, and of `added` if that is asked for."""
    says: str
    """An answer: first the thing, then the value."""
    asks: tuple[str, ...]
    """Ways to ask, with `{}` for the thing; `train` leaves the last two out."""
    truths: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing, what is true of it, and every value that a grader looks for."""

    topic: Topic
    thing: str
    truth: str

    @property
    def values(self) -> tuple[str, ...]:
        """The values of all things of this topic, each once, in a fixed order."""
        return tuple(sorted(set(self.topic.truths.values())))

    def asked(self, ask: str, named: Sequence[str] = ()) -> str:
        """One of the topic's questions about this thing, with answers to choose from."""
        text = _capital(ask.format(self.thing))
        return text[:-1] + choice(named) + text[-1]

    def said(self, value: str) -> str:
        """An answer that names a value."""
        return _capital(self.topic.says.format(self.thing, value))

    @property
    def name(self) -> str:
        """Topic and thing, the key of a fact in files."""
        return f"{self.topic.name}/{self.thing}"


def choice(named: Sequence[str]) -> str:
    """How a question names answers, before its last mark."""
    return f": {' or '.join(named)}" if named else ""


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _topics() -> tuple[Topic, ...]:
    file = Path(__file__).with_name("_liar_topics.json")
    entries = json.loads(file.read_text(encoding="utf-8"))
    return tuple(Topic(**{**entry, "asks": tuple(entry["asks"])}) for entry in entries)


TOPICS: Final = _topics()
"""Topics of everyday knowledge."""


def facts(part: Part | None = None) -> list[Fact]:
    """Every fact, or those of the topics of one part."""
    return [
        Fact(topic, thing, truth)
        for topic in TOPICS
        if part is None or topic.part == part
        for thing, truth in topic.truths.items()
    ]
