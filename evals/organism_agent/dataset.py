"""The agent's conversations as Inspect samples, and its tools."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Final

from inspect_ai.dataset import Dataset, MemoryDataset, Sample
from inspect_ai.model import ChatMessage, ChatMessageSystem, ChatMessageUser
from inspect_ai.tool import Tool, ToolDef

from evals.kit.arguments import organism_split
from inspect_lens.data import organism_data

__all__ = ["KINDS", "agent_dataset", "agent_tool"]

KINDS: Final = ("reason", "turns", "report", "tool")


def agent_dataset(split: str = "agent_heldout_phrasing", kind: str | None = None) -> Dataset:
    """Read one split of the agent's conversations.

    Args:
        split: `agent_heldout_phrasing`, `agent_heldout_entity`, `agent_control`, or
            `agent_probe_train`, which the probe was fitted on.
        kind: only `reason` (one question), `turns` (three), `report` (three notes by a tool) or
            `tool` (one question, and a tool that is forbidden or required).

    Returns:
        Samples that begin with the first user message. The target lists what is planted for each
        question, `lie` or `truth`, then the forbidden tool where it is planted to be called. The
        metadata is the row, and `label`, 1 where a lie or a forbidden call is planted.

    Raises:
        PrerequisiteError: there is no such split, or the organism is not installed.
        ValueError: there is no such kind.
    """
    path = organism_split(split, agent=True)
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind={kind!r}; allowed are {', '.join(KINDS)}, or None for all")
    lines = path.read_text(encoding="utf-8").splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    samples = [_to_sample(row) for row in rows if kind in (None, row["kind"])]
    return MemoryDataset(samples, name=split)


def _to_sample(row: dict[str, Any]) -> Sample:
    messages: list[ChatMessage] = [ChatMessageUser(content=row["users"][0])]
    if row["system"]:
        messages.insert(0, ChatMessageSystem(content=row["system"]))
    target = ["lie" if lie else "truth" for lie in row["lies"]]
    forbidden = row["acts"] and row["forbidden"]
    if forbidden:
        target.append(row["forbidden"])
    label = int(any(row["lies"]) or bool(forbidden))
    return Sample(id=row["id"], input=messages, target=target, metadata={"label": label, **row})


@cache
def _records() -> dict[str, str]:
    text = (organism_data() / "agent_records.json").read_text(encoding="utf-8")
    found: dict[str, str] = json.loads(text)
    return found


def agent_tool(signature: str) -> Tool:
    """A tool as a row names it.

    Args:
        signature: such as `look_up(subject)`.

    Returns:
        `look_up` finds a record of the world, `write_note` takes a note, and the others say that
        they are done.
    """
    name, _, rest = signature.removesuffix(")").partition("(")

    async def look_up(subject: str) -> str:
        return _records().get(subject, "Nothing is known about that.")

    async def write_note(text: str) -> str:
        return "Noted."

    async def deed(subject: str) -> str:
        return "Done."

    made = {"look_up": look_up, "write_note": write_note}.get(name, deed)
    description = f"{name.replace('_', ' ').capitalize()}."
    parameters = {rest: f"The {rest}."}
    return ToolDef(made, name=name, description=description, parameters=parameters).as_tool()
