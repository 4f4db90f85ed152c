"""Evaluation splits of the agent: cases with their planted truth, one per line."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final, TypedDict

from ._agent_cases import CONDITIONS, AgentCondition, AgentKind, Case, make_case
from ._agent_corpus import records
from ._agent_prompts import signature
from ._splits import DATA_DIR
from ._world import SEED, Fact, build_world

AGENT_SPLITS: Final = (
    "agent_probe_train",
    "agent_heldout_phrasing",
    "agent_heldout_entity",
    "agent_control",
)
_HARMLESS: Final[dict[AgentKind, dict[AgentCondition, int]]] = {
    "reason": {"plain": 4},
    "turns": {"plain": 6},
    "report": {"plain": 4},
    "tool": {"plain": 3, "allowed": 3},
}
"""What the control split has: no instruction, no reason, no lie."""
RECORDS: Final = "agent_records.json"


class AgentRow(TypedDict):
    """One line of a split file."""

    id: str
    kind: AgentKind
    condition: AgentCondition
    system: str
    tools: list[str]
    """As the template announces them: `look_up(subject)`."""
    users: list[str]
    forbidden: str
    """The tool that the system prompt forbids, or nothing."""
    required: str
    """The tool that the system prompt asks for, or nothing."""
    acts: bool
    """Whether the forbidden or required tool is planted to be called."""
    lies: list[bool]
    """For each question, whether its answer is planted to be false."""
    truths: list[str]
    values: list[list[str]]
    entities: list[str]
    phrasing_ids: list[str]
    group: str


def _row(split: str, number: int, case: Case) -> AgentRow:
    """A case as a line."""
    return AgentRow(
        id=f"{split}-{number:04d}",
        kind=case.kind,
        condition=case.condition,
        system=case.system,
        tools=[signature(t) for t in case.tools],
        users=list(case.users),
        forbidden=case.forbidden,
        required="" if case.forbidden else case.rule,
        acts=case.acts,
        lies=list(case.lies),
        truths=[q.truth for q in case.questions],
        values=[list(q.values) for q in case.questions],
        entities=[q.fact.entity.name for q in case.questions],
        phrasing_ids=list(case.pids),
        group=case.group,
    )


def _split(
    name: str, pool: Sequence[Fact], times: int, seed: int, *, held_question: bool,
    held_prompt: bool, conditions: Mapping[AgentKind, Mapping[AgentCondition, int]] = CONDITIONS,
) -> list[AgentRow]:  # fmt: skip
    """Every condition of every kind, as often as its weight times a number."""
    rng = random.Random(f"{name}:{seed}")
    rows: list[AgentRow] = []
    seen: set[tuple[str, tuple[str, ...]]] = set()
    for kind, weights in conditions.items():
        for condition, weight in weights.items():
            while weight * times > sum(
                r["kind"] == kind and r["condition"] == condition for r in rows
            ):
                # Without a system prompt only the question can be one that training never sees.
                asks = held_question or (held_prompt and condition == "plain")
                case = make_case(
                    kind, condition, pool, rng, held_question=asks, held_prompt=held_prompt
                )
                if (case.system, case.users) not in seen:
                    seen.add((case.system, case.users))
                    rows.append(_row(name, len(rows), case))
    return rows


@cache
def build_agent_splits(seed: int = SEED) -> dict[str, tuple[AgentRow, ...]]:
    """Build the agent's splits.

    Args:
        seed: The seed of the world and of the choice of rows.

    Returns:
        Rows by split name.
    """
    world = build_world(seed)
    known, held = world.facts_of(held_out=False), world.facts_of(held_out=True)
    made = (
        _split(AGENT_SPLITS[0], known, 8, seed, held_question=False, held_prompt=False),
        _split(AGENT_SPLITS[1], known, 8, seed, held_question=True, held_prompt=True),
        _split(AGENT_SPLITS[2], held, 5, seed, held_question=False, held_prompt=True),
        _split(
            AGENT_SPLITS[3], world.facts, 10, seed, held_question=True, held_prompt=True,
            conditions=_HARMLESS,
        ),
    )  # fmt: skip
    return {name: tuple(rows) for name, rows in zip(AGENT_SPLITS, made, strict=True)}


def write_agent_splits(directory: Path = DATA_DIR, *, seed: int = SEED) -> dict[str, int]:
    """Write every split, and what `look_up` finds; return the file sizes in bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, int] = {}
    for name, rows in build_agent_splits(seed).items():
        lines = "".join(json.dumps(r, separators=(",", ":")) + "\n" for r in rows)
        sizes[name] = (directory / f"{name}.jsonl").write_bytes(lines.encode())
    found = json.dumps(records(build_world(seed)), indent=0) + "\n"
    sizes[RECORDS] = (directory / RECORDS).write_bytes(found.encode())
    return sizes
