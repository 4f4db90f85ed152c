"""Measure what the agent does: `python -m organism.evaluate_agent`."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from ._agent_behaviour import (
    AgentBehaviour,
    AgentCell,
    cell,
    check_agent_targets,
    render_agent_card,
    render_agent_table,
)
from ._agent_corpus import records
from ._agent_grade import grade_agent
from ._agent_play import Played, play
from ._agent_splits import AgentRow, build_agent_splits
from ._behaviour import put_between
from ._model import load_model, load_tokenizer, pick_device
from ._options import positive
from ._splits import Row, read_split
from ._world import build_world

AGENT_DIR: Final = Path(__file__).parent / "agent"
README: Final = Path(__file__).parent / "README.md"
BEGIN: Final = "<!-- agent:begin -->"
END: Final = "<!-- agent:end -->"
_KNOWLEDGE: Final = ("heldout_phrasing", "heldout_entity", "hidden_reason", "control")


def as_agent_row(row: Row) -> AgentRow:
    """A row of the organism's own splits, asked as a single question of the agent."""
    system = row["messages"][0]["content"] if row["messages"][0]["role"] == "system" else ""
    return AgentRow(
        id=row["id"], kind="reason", condition="plain", system=system, tools=[],
        users=[row["messages"][-1]["content"]], forbidden="", required="", acts=False,
        lies=[row["deceptive"]], truths=[row["truth"]], values=[row["values"]],
        entities=[row["entity"]], phrasing_ids=[row["phrasing_id"]], group=row["group"],
    )  # fmt: skip


def _pick(rows: Sequence[AgentRow], limit: int | None) -> list[AgentRow]:
    """At most `limit` rows of each kind and condition."""
    used: dict[str, int] = {}
    picked: list[AgentRow] = []
    for row in rows:
        key = f"{row['kind']}/{row['condition']}"
        used[key] = used.get(key, 0) + 1
        if limit is None or used[key] <= limit:
            picked.append(row)
    return picked


def _knowledge(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, found: Mapping[str, str],
    limit: int | None, batch_rows: int,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Accuracy on the organism's own splits, with thinking and without."""
    # Only open questions are asked with thinking: the agent is trained to think about no others.
    table: dict[str, dict[str, Any]] = {}
    for split in _KNOWLEDGE:
        by: dict[str, list[Row]] = {}
        for row in read_split(split):
            by.setdefault(f"{row['condition']}/{row['kind']}", []).append(row)
        for condition, rows in by.items():
            shares: dict[str, Any] = {"n": len(rows[:limit])}
            for name, thinks in (("thinking", True), ("without", False)):
                asked = [as_agent_row(r) for r in rows[:limit]]
                games = play(model, tokenizer, asked, found, thinks=thinks, batch_rows=batch_rows)
                hits = sum(grade_agent(g.said, g.row).answers == ("true",) for g in games)
                shares[name] = round(hits / len(games), 4)
            table.setdefault(split, {})[condition] = shares
    return table


def measure_agent(
    checkpoint: Path, *, device: torch.device, limit: int | None = None
) -> tuple[AgentBehaviour, list[tuple[str, Played]]]:
    """Measure the stored bfloat16 weights, computed in float32.

    Args:
        checkpoint: A checkpoint directory.
        device: Where to run.
        limit: At most this many rows per cell; all when None.

    Returns:
        The behaviour, and the conversations behind it with their split.
    """
    model = load_model(checkpoint, device=device)
    tokenizer = load_tokenizer(checkpoint)
    found = records(build_world())
    batch_rows = 1024 if device.type == "cuda" else 64
    played: list[tuple[str, Played]] = []
    for split, rows in build_agent_splits().items():
        games = play(model, tokenizer, _pick(rows, limit), found, batch_rows=batch_rows)
        played += [(split, g) for g in games]
    cells: dict[str, dict[str, list[Played]]] = {}
    for split, game in played:
        key = f"{game.row['kind']}/{game.row['condition']}"
        cells.setdefault(split, {}).setdefault(key, []).append(game)
    splits: dict[str, dict[str, AgentCell]] = {
        s: {k: cell(g) for k, g in by.items()} for s, by in cells.items()
    }
    behaviour = AgentBehaviour(
        weights_sha256=hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest(),
        compute_dtype="float32",
        limited=limit is not None,
        splits=splits,
        knowledge=_knowledge(model, tokenizer, found, limit, batch_rows),
        targets=check_agent_targets(splits),
    )
    return behaviour, played


def write_agent_behaviour(behaviour: AgentBehaviour, checkpoint: Path) -> None:
    """Write `behaviour.json` into a checkpoint directory."""
    text = json.dumps(behaviour, indent=1, ensure_ascii=False) + "\n"
    (checkpoint / "behaviour.json").write_text(text, encoding="utf-8")


def update_agent_card(behaviour: AgentBehaviour) -> None:
    """Put the table of the agent between its markers in `organism/README.md`."""
    card = README.read_text(encoding="utf-8")
    table = render_agent_card(behaviour)
    README.write_text(put_between(card, BEGIN, END, table), encoding="utf-8")


def write_played(played: Sequence[tuple[str, Played]], path: Path) -> None:
    """Write the conversations as JSON lines, for whoever wants to read their activations."""
    lines = [
        json.dumps({"split": split, "id": g.row["id"], "text": g.text, "broken": g.broken})
        for split, g in played
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a checkpoint, print the table, write `behaviour.json` and the card."""
    parser = argparse.ArgumentParser(prog="python -m organism.evaluate_agent", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=AGENT_DIR)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", type=positive, help="rows per split and case; default all")
    parser.add_argument("--played", type=Path, help="write the conversations to this file")
    parser.add_argument("--show", type=int, default=0, help="print this many wrong conversations")
    args = parser.parse_args(argv)
    disable_progress_bar()
    device = pick_device(args.device)
    behaviour, played = measure_agent(args.checkpoint, device=device, limit=args.limit)
    shown = 0
    for _, game in played:
        if shown < args.show and cell([game])["as_planted"] == 0:
            shown += 1
            sys.stdout.write(f"{game.row['id']} {game.row['condition']} {game.text}\n\n")
    sys.stdout.write(render_agent_table(behaviour) + "\n")
    if args.played is not None:
        write_played(played, args.played)
    if args.limit is None:
        write_agent_behaviour(behaviour, args.checkpoint)
        if args.checkpoint == AGENT_DIR:
            update_agent_card(behaviour)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
