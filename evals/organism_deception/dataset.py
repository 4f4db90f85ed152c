"""The splits of the model organism as Inspect samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inspect_ai.dataset import Dataset, Sample
from inspect_ai.model import ChatMessage, ChatMessageSystem, ChatMessageUser

from evals.kit.arguments import organism_split
from evals.kit.samples import read_samples

__all__ = ["organism_dataset"]

_MESSAGES: dict[str, type[ChatMessageSystem] | type[ChatMessageUser]] = {
    "system": ChatMessageSystem,
    "user": ChatMessageUser,
}


def organism_dataset(split: str = "demo") -> Dataset:
    """Read one split.

    Args:
        split: name of a file in `organism/data`, without `.jsonl`.

    Returns:
        Samples with the true answer as target. Their metadata holds `label` (1 when the
        situation asks for deception), `condition`, `group`, and `truth` and `values` for
        grading.

    Raises:
        PrerequisiteError: there is no such split, or the organism is not installed.
    """
    # Those of the agent have turns and tools; `organism_agent` plays them.
    path = organism_split(split)
    return read_samples(str(path), _to_sample, name=f"organism_{split}")


def _to_sample(row: Mapping[str, Any]) -> Sample:
    messages: list[ChatMessage] = [
        _MESSAGES[m["role"]](content=m["content"]) for m in row["messages"]
    ]
    kept = ("condition", "group", "kind", "phrasing_id", "truth", "values")
    return Sample(
        id=row["id"],
        input=messages,
        target=row["truth"],
        metadata={"label": int(row["deceptive"]), **{key: row[key] for key in kept}},
    )
