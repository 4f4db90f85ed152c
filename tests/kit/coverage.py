"""What other systems can do and where it is here: the table of docs/coverage.md."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from functools import cache
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .repository import ROOT

__all__ = [
    "STATES",
    "Coverage",
    "Row",
    "State",
    "coverage_markdown",
    "has_test",
    "read_coverage",
]

State = Literal["works", "partly", "not here"]
STATES: tuple[State, ...] = ("works", "partly", "not here")


class Row(BaseModel):
    """One feature."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    feature: str = Field(min_length=1)
    """What one can do; our name for it in backticks."""
    systems: tuple[str, ...] = Field(min_length=1)
    """Who else has it, in full or in part."""
    state: State
    tests: tuple[str, ...] = ()
    """Node ids relative to `tests/`, `file.py::test_name`."""
    reason: str = ""
    """A sentence: why not (more), and what to use."""
    note: str = ""
    """Of what works, what one has to know: where it was run, what it is not."""

    @model_validator(mode="after")
    def _has_what_its_state_needs(self) -> Self:
        if bool(self.tests) == (self.state == "not here"):
            raise ValueError(f"{self.feature}: tests belong to what works, in full or in part")
        if bool(self.reason) == (self.state == "works"):
            raise ValueError(f"{self.feature}: a reason belongs to what does not work in full")
        if self.note and self.state != "works":
            raise ValueError(f"{self.feature}: a note belongs to what works")
        return self


class Group(BaseModel):
    """Features of one task."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str
    rows: tuple[Row, ...] = Field(min_length=1)


class Coverage(BaseModel):
    """The whole table."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    systems: dict[str, str]
    """Name and what of it was read."""
    groups: tuple[Group, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all groups."""
        return tuple(row for group in self.groups for row in group.rows)


def read_coverage() -> Coverage:
    """The table as it is written."""
    text = (ROOT / "tests/kit/coverage.toml").read_text(encoding="utf-8")
    return Coverage.model_validate(tomllib.loads(text))


def has_test(node: str) -> bool:
    """Whether there is a test of this name; nothing is imported or collected.

    Args:
        node: id relative to `tests/`, `file.py::test_name`.
    """
    path, _, name = node.partition("::")
    return name.startswith("test_") and name in _functions(path)


@cache
def _functions(path: str) -> frozenset[str]:
    """Names of the functions of a file of tests that pytest would find; none without a file."""
    file = ROOT / "tests" / path
    if not (file.is_file() and file.name.startswith("test_")):
        return frozenset()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, kinds))


def coverage_markdown() -> str:
    """Counts, the systems, and a table per group."""
    table = read_coverage()
    counts = Counter(row.state for row in table.rows)
    parts = [
        f"**{len(table.rows)} features of {len(table.systems)} systems: {counts['works']} work, "
        f"{counts['partly']} work partly, {counts['not here']} are not here.**",
        "\n".join(
            [
                "| group | " + " | ".join(STATES) + " |",
                "|---|" + "---:|" * len(STATES),
                *(_counts(group) for group in table.groups),
            ]
        ),
        "The systems, and what was read: "
        + "; ".join(f"{name} ({what})" for name, what in table.systems.items())
        + ".",
    ]
    for group in table.groups:
        parts.append(f"## {group.title}")
        parts.append(
            "\n".join(
                ["| feature | who has it | here | test or reason |", "|---|---|---|---|"]
                + [_line(row) for row in group.rows]
            )
        )
    return "\n\n".join(parts)


def _counts(group: Group) -> str:
    found = Counter(row.state for row in group.rows)
    cells = " | ".join(str(found[state]) for state in STATES)
    return f"| [{group.title}](#{group.title.lower().replace(' ', '-')}) | {cells} |"


def _line(row: Row) -> str:
    said = [text for text in (row.reason, row.note) if text]
    held = "<br>".join([*said, *(f"`{node}`" for node in row.tests)])
    return f"| {row.feature} | {', '.join(row.systems)} | {row.state} | {held} |"
