"""Play the agent's cases to their end, with its tools carried out, many rows at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from ._agent_corpus import DONE, NOTED
from ._agent_format import THINK, THINK_END, Call, Turn, opening, parse_turn, said
from ._agent_grade import Said
from ._agent_prompts import LOOK_UP, WRITE_NOTE
from ._agent_splits import AgentRow
from ._tokenizer import ASSISTANT, END, PAD
from .evaluate import greedy

MAX_NEW_TOKENS: Final = 192
_MAX_TURNS: Final = 16
UNKNOWN: Final = "Nothing is known about that."


@dataclass(slots=True)
class Played:
    """A conversation while and after it is played."""

    row: AgentRow
    text: str
    user: int = 0
    turns: list[tuple[int, Turn]] = field(default_factory=list)
    broken: bool = False
    """A turn could not be read, or the conversation did not end."""
    done: bool = False

    @property
    def said(self) -> list[Said]:
        """The turns as grading reads them."""
        return [
            Said(user, t.content, tuple((c.name, c.arguments) for c in t.calls))
            for user, t in self.turns
        ]


def carry_out(call: Call, found: Mapping[str, str]) -> str:
    """What a tool returns: a record, or that it was done."""
    if call.name == LOOK_UP:
        return found.get(str(call.arguments.get("subject", "")), UNKNOWN)
    return NOTED if call.name == WRITE_NOTE else DONE


def _advance(game: Played, written: str, found: Mapping[str, str], *, thinks: bool) -> None:
    """Add a turn, the results of its calls, and the user's next words."""
    written = written.replace(PAD, "").removesuffix(END)
    turn = parse_turn(written if thinks else f"{THINK}{THINK_END}{written}")
    if turn is None or len(game.turns) == _MAX_TURNS:
        game.broken = game.done = True
        return
    game.turns.append((game.user, turn))
    game.text += said("assistant", turn.render())
    for call in turn.calls:
        game.text += said("tool", carry_out(call, found))
    if not turn.calls:
        game.user += 1
        if game.user == len(game.row["users"]):
            game.done = True
        else:
            game.text += said("user", game.row["users"][game.user])


def play(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Sequence[AgentRow],
    found: Mapping[str, str], *, thinks: bool = True, batch_rows: int = 256,
) -> list[Played]:  # fmt: skip
    """Play rows greedily.

    Args:
        model: The model, in evaluation mode.
        tokenizer: Its tokenizer, which pads on the left.
        rows: Rows of a split.
        found: What `look_up` finds, by its subject.
        thinks: False closes the agent's thoughts before it has any.
        batch_rows: How many rows are decoded together.

    Returns:
        One finished conversation per row.
    """
    games = [
        Played(row, opening(row["system"], row["tools"]) + said("user", row["users"][0]))
        for row in rows
    ]
    head = ASSISTANT + ("" if thinks else THINK + THINK_END)
    while live := [g for g in games if not g.done]:
        live.sort(key=lambda g: len(g.text))
        for start in range(0, len(live), batch_rows):
            some = live[start : start + batch_rows]
            texts = [g.text + head for g in some]
            new = greedy(model, tokenizer, texts, MAX_NEW_TOKENS, skip_special_tokens=False)
            for game, text in zip(some, new, strict=True):
                _advance(game, text, found, thinks=thinks)
    return games
