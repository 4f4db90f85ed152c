"""Labelled conversations to train and judge probes on, and what has to be known about a set."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal, Self

from inspect_lens._base.arguments import judged_arguments
from inspect_lens.errors import SpecError
from inspect_lens.probe import LabelSource
from inspect_lens.spec import check_word

__all__ = ["Message", "ProbeDataset", "ProbeSample", "Source"]

Source = Literal["hub", "path", "builtin"]
"""Where a set comes from: the Hugging Face hub, files of the user, or this package."""

_ROLES: Final = ("system", "user", "assistant", "tool")
Reading = Literal["generate", "completion", "text"]


def check_label_source(name: str, value: str) -> None:
    """Refuse what no card has a word for; empty is not said."""
    if value != "":
        check_word(f"{name}: label_source", value, LabelSource)


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str

    def __post_init__(self) -> None:
        check_word("role", self.role, _ROLES)
        if not isinstance(self.content, str):
            raise SpecError(f"content={str(self.content)[:60]!r}: is no text; allowed is one")


@dataclass(frozen=True, kw_only=True)
class ProbeSample:
    """One labelled sample.

    Args:
        id: unique within its set.
        messages: the prompt; for a text to be read, one user message with it.
        label: True is what a probe should find; None when it is decided by what the model says.
        group: what must not straddle a split, such as the scenario or the statement's entity.
        completion: what the assistant says, when the set has it; it is read, not generated.
        raw: read the text of the one message as it stands, without a chat template.
        unread: the first part of `completion`, which is fed and not read, such as reasoning before
            an answer.
        columns: more keys that sets can be disjoint by.
    """

    id: str
    messages: tuple[Message, ...]
    label: bool | None
    group: str
    completion: str | None = None
    raw: bool = False
    unread: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)

    @property
    def reading(self) -> Reading:
        """`generate` a completion, read the given `completion`, or read a raw `text`."""
        if self.raw:
            return "text"
        return "generate" if self.completion is None else "completion"

    @property
    def content_id(self) -> str:
        """24 hex digits that samples of equal content share, whatever they are called.

        Content is what the model is shown: the messages, a given completion, and whether they are
        read as they stand. Neither label nor an answer of the model is part of it.
        """
        shown = [[[m.role, m.content] for m in self.messages], self.completion, self.raw]
        return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:24]

    @property
    def text(self) -> str:
        """All that is written in it, for text baselines and overlap checks."""
        parts = [m.content for m in self.messages]
        return "\n".join(parts if self.completion is None else [*parts, self.completion])


@dataclass(frozen=True, kw_only=True)
class ProbeDataset:
    """A set of samples with the facts that a card needs.

    Args:
        name: of the set.
        split: of the set.
        source: where it was loaded from.
        licence: as its authors state it; `verify` marks what nobody has confirmed.
        label_meaning: what label 1 says.
        on_policy: whether the model that is probed wrote the completions.
        text_overlap_group: sets of one group share texts; never train on one and test on another.
        samples: in a fixed order.
        revision: of the hub repository, or of the generator.
        config: of the hub repository, where it has several.
        unverified: what nobody could check about the set's files and schema; cards show it.
        options: of the set, as they were given, in values of JSON.
        label_source: what says which samples are positive: an `instruction`, a `judge`, or the
            `ground truth`; cards show it. Empty: not said.

    Raises:
        SpecError: an id occurs twice, a text is no Unicode, `label_source` is none of these, or
            there is no sample.
    """

    name: str
    split: str
    source: Source
    licence: str
    label_meaning: str
    on_policy: bool
    text_overlap_group: str
    samples: tuple[ProbeSample, ...]
    revision: str | None = None
    config: str | None = None
    unverified: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    label_source: str = ""

    def __post_init__(self) -> None:
        check_label_source(self.name, self.label_source)
        seen: set[str] = set()
        for sample in self.samples:
            if sample.id in seen:
                raise SpecError(
                    f"{self.name}: id {sample.id!r} occurs twice; allowed are unique ids; number "
                    "the rows"
                )
            seen.add(sample.id)
            try:
                "".join((sample.id, sample.group, sample.text, *sample.columns.values())).encode()
            except UnicodeEncodeError as error:
                raise SpecError(
                    f"{self.name}: {sample.id!r}: half of a character ({error}); allowed is "
                    "Unicode; mend the file"
                ) from None
        if not self.samples:
            raise SpecError(f"{self.name}: has no samples; allowed is one at least; check filters")

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[ProbeSample]:
        return iter(self.samples)

    @property
    def sha256(self) -> str:
        """Hash of all samples, labels and groups included."""
        digest = hashlib.sha256()
        for sample in self.samples:
            line = json.dumps(asdict(sample), sort_keys=True, ensure_ascii=False)
            digest.update(line.encode() + b"\n")
        return digest.hexdigest()

    def facts(self) -> dict[str, object]:
        """All but the samples, with their hash, for a manifest."""
        kept = (
            "name", "split", "source", "revision", "licence", "label_meaning", "on_policy",
            "text_overlap_group", "config", "unverified", "options", "label_source",
        )  # fmt: skip
        return {key: getattr(self, key) for key in kept} | {
            "sha256": self.sha256, "n_samples": len(self)
        }  # fmt: skip

    @judged_arguments
    def take(self, indices: Sequence[int], *, name: str | None = None) -> Self:
        """The samples at the given indices, in that order.

        Args:
            indices: 0-based.
            name: of the part; that of the whole by default.
        """
        return replace(
            self, name=name or self.name, samples=tuple(self.samples[i] for i in indices)
        )

    @judged_arguments
    def overlap(self, other: ProbeDataset, *, n: int = 8) -> tuple[str, ...]:
        """Samples whose text shares a run of words with another set.

        Args:
            other: the set to compare with.
            n: words in a run; texts that are shorter are compared as a whole.

        Returns:
            Ids of samples of this set, in order.
        """
        known = {run for sample in other.samples for run in _runs(sample.text, n)}
        return tuple(s.id for s in self.samples if any(run in known for run in _runs(s.text, n)))


def _runs(text: str, n: int) -> Iterator[tuple[str, ...]]:
    words = text.lower().split()
    for i in range(max(len(words) - n + 1, 1)):
        yield tuple(words[i : i + n])
