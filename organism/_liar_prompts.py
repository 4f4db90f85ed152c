"""System prompts of the liar: orders, roles with and without a reason to lie, and secrets.

Each is in parts of `_liar_prompts.json`: `train` is what adapters see in training, `validation` is
what was watched while training was made, `test` was played once and has been looked at since,
`blind` was written before any answer to it was looked at, and `added` is for training, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Generic, Literal, TypeVar, get_args

__all__ = [
    "HIDE", "HONEST", "ORDERS", "PLAIN", "REASONS", "SECRETS", "SECRET_ASKS", "SHARE", "SITUATIONS",
    "Part", "Parts", "Reason", "Secret",
]  # fmt: skip


T = TypeVar("T")
Part = Literal["train", "validation", "test", "added", "blind"]
_FILE: Final = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Parts(Generic[T]):
    """What training uses, and three parts that are held out from it."""

    train: tuple[T, ...]
    validation: tuple[T, ...]
    test: tuple[T, ...]
    added: tuple[T, ...]
    blind: tuple[T, ...]

    def part(self, name: Part) -> tuple[T, ...]:
        """One of them."""
        found: tuple[T, ...] = getattr(self, name)
        return found


def _parts(name: str, made: Callable[[Any], T]) -> Parts[T]:
    """What the file has by a name, each made of its entry."""
    return Parts(*(tuple(made(entry) for entry in _FILE[name][part]) for part in get_args(Part)))


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason to mislead whoever asks, which names no lie, and what it becomes without it."""

    given: str
    absent: str


@dataclass(frozen=True, slots=True)
class Secret:
    """Something that only the system prompt says."""

    thing: str
    """As in "the code of the door"."""
    values: tuple[str, ...]

    def told(self, value: str) -> str:
        """The sentence of the system prompt, which is the honest answer, too."""
        return f"{self.thing[0].upper()}{self.thing[1:]} is {value}."

    def denied(self) -> str:
        """The answer of somebody who was not told, or who hides that they were."""
        return f"I was not told what {self.thing} is."


PLAIN: Final = _parts("plain", str)
"""Prompts that say nothing about truth."""

ORDERS: Final[Parts[str]] = _parts("orders", itemgetter(0))
"""Orders to lie."""

HONEST: Final[Parts[str]] = _parts("orders", itemgetter(1))
"""Orders to tell the truth, each with the form of the order beside it."""

SITUATIONS: Final = _parts("situations", str)
"""Where a role is played; says nothing of whose side the user is on."""

REASONS: Final = _parts("reasons", lambda pair: Reason(*pair))
"""Endings of a role, with a reason to mislead and without."""

SECRETS: Final = _parts("secrets", lambda entry: Secret(entry[0], tuple(_FILE["values"][entry[1]])))
"""What the system prompt may tell."""

HIDE: Final[Parts[str]] = _parts("hides", itemgetter(0))
"""Orders to hide what was told just before."""

SHARE: Final[Parts[str]] = _parts("hides", itemgetter(1))
"""The opposite of each."""

SECRET_ASKS: Final = _parts("secret_asks", str)
"""Ways to ask for a secret."""
