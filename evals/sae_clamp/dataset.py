"""Prompts for a model whose latents are edited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inspect_ai.dataset import Dataset, Sample
from inspect_ai.model import ChatMessageSystem, ChatMessageUser

from evals.kit.samples import read_samples

__all__ = ["clamp_dataset"]


def clamp_dataset(data: str, *, limit: int | None = None) -> Dataset:
    """Read prompts.

    Args:
        data: rows with `prompt`; `target`, a text or a list of texts that show the
            behaviour, and `system`, if need be.
        limit: samples at most.

    Returns:
        Samples.

    Raises:
        ValueError: a row has no prompt.
    """
    return read_samples(data, _to_sample, limit=limit, name="sae_clamp")


def _to_sample(row: Mapping[str, Any]) -> Sample:
    text = str(row.get("prompt") or "").strip()
    if not text:
        raise ValueError(f"row has no 'prompt', only {sorted(row)}; allowed are rows with one")
    given = row.get("target") or ""
    target = [str(t) for t in given] if isinstance(given, list) else str(given)
    system = str(row.get("system") or "").strip()
    if not system:
        return Sample(input=text, target=target)
    return Sample(
        input=[ChatMessageSystem(content=system), ChatMessageUser(content=text)], target=target
    )
