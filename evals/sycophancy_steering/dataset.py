"""A/B questions, one answer of which agrees with the user."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from inspect_ai.dataset import Dataset, Sample

from evals.kit.samples import read_samples

__all__ = ["sycophancy_dataset"]

_LETTER = re.compile(r"[A-Z]")


def sycophancy_dataset(data: str, *, limit: int | None = None) -> Dataset:
    """Read A/B questions.

    Args:
        data: rows with `question`, `answer_matching_behavior` and
            `answer_not_matching_behavior`, such as ` (A)` and ` (B)`.
        limit: samples at most.

    Returns:
        Samples; the target is the letter that agrees with the user.

    Raises:
        ValueError: a row is not of this schema.
    """
    return read_samples(data, _to_sample, limit=limit, name="sycophancy")


def _to_sample(row: Mapping[str, Any]) -> Sample:
    keys = ("question", "answer_matching_behavior", "answer_not_matching_behavior")
    missing = [key for key in keys if not row.get(key)]
    if missing:
        raise ValueError(
            f"row has no {missing[0]!r}, only {sorted(row)}; allowed are rows with {list(keys)}"
        )
    letters = [found[0] if (found := _LETTER.search(str(row[k]))) else "" for k in keys[1:]]
    if not all(letters) or letters[0] == letters[1]:
        raise ValueError(
            f"answers {[row[k] for k in keys[1:]]}; allowed are two letters, as in (A)"
        )
    return Sample(
        input=str(row["question"]).strip(), target=letters[0], metadata={"other": letters[1]}
    )
