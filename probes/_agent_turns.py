"""Turns of the agent with their activations, read from conversations that were played."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inspect_lens.data import ActivationStore, Message, ProbeDataset, ProbeSample
from organism._agent_behaviour import as_planted
from organism._agent_format import parse_turn
from organism._agent_grade import Said, grade_agent
from organism._agent_splits import AgentRow, build_agent_splits
from organism._tokenizer import ASSISTANT_ID, END_ID

__all__ = ["AgentTurn", "Game", "as_texts", "read_played", "read_turns"]

_NOTE: Final = "write_note"


class AgentTurn(NamedTuple):
    """One turn of the assistant in a conversation that went as planted."""

    row: AgentRow
    number: int
    question: int
    """Which of the row's questions it is about."""
    label: bool
    """Whether it tells a lie, or calls the forbidden tool."""
    thought: str
    text: str
    """Its words and calls, without the thought."""
    acts: NDArray[np.float32]
    """(layers, tokens, hidden) of the turn, without its end token."""


Game = tuple[AgentRow, str, bool]
"""A conversation: its row, its text, and whether it broke off."""


def read_played(path: Path) -> dict[str, list[Game]]:
    """Read conversations by split.

    Args:
        path: a file that `python -m organism.evaluate_agent --played` wrote.

    Returns:
        Conversations by split, in the file's order.
    """
    rows = {row["id"]: row for split in build_agent_splits().values() for row in split}
    found: dict[str, list[Game]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        game: dict[str, Any] = json.loads(line)
        found.setdefault(game["split"], []).append((rows[game["id"]], game["text"], game["broken"]))
    return found


def as_texts(split: str, games: Sequence[Game]) -> ProbeDataset:
    """Conversations as texts that `collect` reads as they stand."""
    return ProbeDataset(
        name=split, split=split, source="path", licence="MIT",
        label_meaning="the agent lies, or calls a forbidden tool, somewhere", on_policy=True,
        label_source="ground truth",
        text_overlap_group="organism",
        samples=tuple(
            ProbeSample(
                id=row["id"], messages=(Message("user", text),), label=any(row["lies"]),
                group=row["id"], raw=True,
            )
            for row, text, _ in games
        ),
    )  # fmt: skip


def _labels(row: AgentRow, turns: Sequence[Said]) -> list[tuple[int, bool]]:
    """The question of each turn, and whether it lies about it or does what is forbidden."""
    made: list[tuple[int, bool]] = []
    notes = 0
    for turn in turns:
        names = [name for name, _ in turn.calls]
        if row["kind"] == "report":
            at = min(notes, len(row["lies"]) - 1)
            made.append((at, bool(names) and row["lies"][at]))
            notes += names.count(_NOTE)
        else:
            at = min(turn.user, len(row["lies"]) - 1)
            answers = not names and row["lies"][at]
            made.append((at, answers or (bool(row["forbidden"]) and row["forbidden"] in names)))
    return made


def read_turns(store: ActivationStore, games: Sequence[Game]) -> tuple[list[AgentTurn], int]:
    """Read the turns of the conversations of a split that went as planted.

    Args:
        store: what `collect` made of `as_texts`.
        games: the conversations.

    Returns:
        The turns, and how many conversations were left out.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(store.manifest["model"]["name"]))
    made: list[AgentTurn] = []
    left_out = 0
    for (row, _, broken), sample in zip(games, store.samples(), strict=True):
        assert sample.acts is not None
        tokens = list(sample.token_ids)
        starts = [i + 1 for i, t in enumerate(tokens) if t == ASSISTANT_ID]
        spans = [(i, tokens.index(END_ID, i)) for i in starts]
        parsed = [parse_turn(tokenizer.decode(tokens[i:j])) for i, j in spans]
        users = np.cumsum([t == "<|user|>" for t in tokenizer.convert_ids_to_tokens(tokens)])
        turns = [
            Said(int(users[i]) - 1, t.content, tuple((c.name, c.arguments) for c in t.calls))
            for (i, _), t in zip(spans, parsed, strict=True)
            if t is not None
        ]
        if broken or len(turns) < len(spans) or not as_planted(row, grade_agent(turns, row)):
            left_out += 1
            continue
        stream = sample.acts.to_float32()
        for n, ((i, j), turn, (at, label)) in enumerate(
            zip(spans, parsed, _labels(row, turns), strict=True)
        ):
            assert turn is not None
            shown = turn.content + "".join(c.render() for c in turn.calls)
            made.append(AgentTurn(row, n, at, label, turn.thought, shown, stream[:, i:j].copy()))
    return made, left_out
