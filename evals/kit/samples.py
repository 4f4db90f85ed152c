"""Sets and files of `inspect_lens.data` as Inspect samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from inspect_ai.dataset import Dataset, MemoryDataset, Sample
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
)

from inspect_lens.data import ProbeSample, load_dataset, read_rows

__all__ = ["load_samples", "read_samples"]

_KINDS: dict[str, Any] = {
    "system": ChatMessageSystem,
    "user": ChatMessageUser,
    "assistant": ChatMessageAssistant,
    "tool": ChatMessageTool,
}


def load_samples(
    name: str, data: str | None, *, revision: str | None = None, **options: Any
) -> Dataset:
    """Load a known set.

    Args:
        name: of `inspect_lens.data.DATASETS`.
        data: file or folder of it; None loads it from the hub, where it has a repository there.
        revision: of the repository; pin it.
        **options: of the set.

    Returns:
        Samples whose metadata hold `label` (1, 0, or None where a judge decides), `group`,
        `completion` where the set brings the answer, and the set's own columns.

    Raises:
        SpecError: a row is not of the set's schema, or the set is not on the hub.
        ArtifactError: it cannot be read.
    """
    loaded = load_dataset(name, path=data, revision=revision, **options)
    return MemoryDataset([_sample(s) for s in loaded], name=name)


def read_samples(
    data: str,
    to_sample: Callable[[Mapping[str, Any]], Sample],
    *,
    name: str,
    limit: int | None = None,
) -> Dataset:
    """Read a file of rows.

    Args:
        data: file, folder or address, as `inspect_lens.data.read_rows` reads them.
        to_sample: makes a sample of a row.
        name: of the data set.
        limit: samples at most.

    Returns:
        Samples; those without an id are numbered from 1.

    Raises:
        ArtifactError: it cannot be read.
    """
    samples: list[Sample] = []
    for number, row in enumerate(islice(read_rows(data), limit), 1):
        sample = to_sample({key: value for key, value in row.items() if not key.startswith("_")})
        sample.id = number if sample.id is None else sample.id
        samples.append(sample)
    return MemoryDataset(samples, name=name, location=data)


def _sample(sample: ProbeSample) -> Sample:
    messages: list[ChatMessage] = [_KINDS[m.role](content=m.content) for m in sample.messages]
    metadata: dict[str, Any] = {
        "label": None if sample.label is None else int(sample.label),
        "group": sample.group,
        **sample.columns,
    }
    if sample.completion is not None:
        metadata["completion"] = sample.completion
    text = sample.messages[0].content
    return Sample(id=sample.id, input=text if sample.raw else messages, metadata=metadata)
