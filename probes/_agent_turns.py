"""Turns of the agent with their activations, read from conversations that were played."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from organism._agent_behaviour import as_planted
from organism._agent_format import parse_turn
from organism._agent_grade import Said, grade_agent
from organism._agent_splits import AgentRow, build_agent_splits
from organism._tokenizer import ASSISTANT_ID, END_ID

__all__ = ["AgentTurn", "read_played", "read_turns"]

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


def read_played(path: Path) -> dict[str, list[tuple[AgentRow, str, bool]]]:
    """Read conversations by split: row, text, and whether it broke off.

    Args:
        path: a file that `python -m organism.evaluate_agent --played` wrote.

    Returns:
        Conversations by split, in the file's order.
    """
    rows = {row["id"]: row for split in build_agent_splits().values() for row in split}
    found: dict[str, list[tuple[AgentRow, str, bool]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        game: dict[str, Any] = json.loads(line)
        found.setdefault(game["split"], []).append((rows[game["id"]], game["text"], game["broken"]))
    return found


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


def read_turns(
    checkpoint: str, games: Mapping[str, Sequence[tuple[AgentRow, str, bool]]]
) -> tuple[dict[str, list[AgentTurn]], dict[str, int]]:
    """Read the activations of every turn in one forward pass per conversation.

    Args:
        checkpoint: folder of the agent.
        games: conversations by split.

    Returns:
        Turns of the conversations that went as planted, by split; and how many conversations
        were left out of each split.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    blocks = model.get_decoder().layers
    captured: list[Any] = [None] * len(blocks)

    def keep(layer: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            # After the block and before the final norm, which `hidden_states[-1]` has applied.
            captured[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    for layer, block in enumerate(blocks):
        block.register_forward_hook(keep(layer))
    made: dict[str, list[AgentTurn]] = {}
    left_out = dict.fromkeys(games, 0)
    for split, conversations in games.items():
        for row, text, broken in conversations:
            ids = tokenizer(text, return_tensors="pt")["input_ids"]
            tokens = ids[0].tolist()
            starts = [i + 1 for i, t in enumerate(tokens) if t == ASSISTANT_ID]
            spans = [(i, tokens.index(END_ID, i)) for i in starts]
            parsed = [parse_turn(tokenizer.decode(tokens[i:j])) for i, j in spans]
            users = np.cumsum([t == "<|user|>" for t in tokenizer.convert_ids_to_tokens(tokens)])
            turns = [
                Said(int(users[i]) - 1, t.content, tuple((c.name, c.arguments) for c in t.calls))
                for (i, _), t in zip(spans, parsed, strict=True)
                if t is not None
            ]
            good = not broken and len(turns) == len(spans)
            if not (good and as_planted(row, grade_agent(turns, row))):
                left_out[split] += 1
                continue
            with torch.inference_mode():
                model(ids)
            stream = torch.stack([c[0] for c in captured]).numpy()
            for n, ((i, j), turn, (at, label)) in enumerate(
                zip(spans, parsed, _labels(row, turns), strict=True)
            ):
                if turn is None:
                    raise RuntimeError("a conversation without a broken turn has none")
                shown = turn.content + "".join(c.render() for c in turn.calls)
                acts = stream[:, i:j].copy()
                made.setdefault(split, []).append(
                    AgentTurn(row, n, at, label, turn.thought, shown, acts)
                )
    return made, left_out
