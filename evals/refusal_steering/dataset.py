"""Harmful and harmless instructions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inspect_ai.dataset import Dataset, MemoryDataset, Sample
from inspect_ai.model import ChatMessageSystem, ChatMessageUser

from evals.kit.samples import read_samples

__all__ = ["refusal_dataset"]


def refusal_dataset(
    harmful: str, harmless: str | None = None, *, limit: int | None = None
) -> Dataset:
    """Read instructions.

    Args:
        harmful: rows with `instruction`, and `input` and `system` if need be.
        harmless: the same, of instructions that should be followed.
        limit: of each kind at most.

    Returns:
        Samples; `label` in their metadata is 1 for a harmful instruction.

    Raises:
        ValueError: a row has no instruction.
    """
    samples: list[Sample] = []
    for label, path in ((1, harmful), (0, harmless)):
        if path is not None:
            kind = "harmful" if label else "harmless"
            for i, sample in enumerate(read_samples(path, _to_sample, name=kind, limit=limit)):
                sample.id, sample.metadata = f"{kind}-{i}", {"label": label, "kind": kind}
                samples.append(sample)
    return MemoryDataset(samples, name="refusal")


def _to_sample(row: Mapping[str, Any]) -> Sample:
    text = str(row.get("instruction") or "").strip()
    if not text:
        raise ValueError(f"row has no 'instruction', only {sorted(row)}; allowed are rows with one")
    if str(row.get("input") or "").strip():
        text += f"\n\n{str(row['input']).strip()}"
    system = str(row.get("system") or "").strip()
    if not system:
        return Sample(input=text)
    return Sample(input=[ChatMessageSystem(content=system), ChatMessageUser(content=text)])
