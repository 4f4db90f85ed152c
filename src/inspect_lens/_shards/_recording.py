"""A folder of shards that servers write while others read it.

A recording has no end, so it has no manifest. Each writer numbers its shards, and writes a small
file of facts behind each: a shard with facts is whole, and nothing else counts. So a reader sees
the same whether a writer goes on, has ended or was killed, and can go on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import fsspec

from inspect_lens._base.untrusted import parse_json
from inspect_lens._intake import read_file, write_file
from inspect_lens.errors import ArtifactError, SpecError

from ._shard import (
    About,
    Captured,
    ShardFacts,
    decode_shard,
    read_facts,
    shard_facts,
    shard_parts,
    sum_facts,
    to_json,
)

__all__ = ["RECORDING", "RECORDING_FORMAT", "RecordedShard", "Recording", "ShardWriter"]

RECORDING: Final = "recording.json"
"""Says what is recorded; written first."""
RECORDING_FORMAT: Final = "inspect_lens.recording/1"
"""Marks that file, and the manifest that is made of a recording."""
_PRIVATE: Final = 0o600
"""Of all files: what a server computes is its operator's."""
_FACTS = re.compile(r"shard-([0-9a-f]{12})-(\d{6,9})\.json")


def shard_name(writer: str, number: int) -> str:
    return f"shard-{writer}-{number:06d}"


class ShardWriter:
    """Writes activations to shard files; several processes may share a folder.

    Args:
        uri: the folder, a local path or fsspec URL.
        about: what is recorded: model, layers, site and so on. The same for all writers.
        writer: 12 hex digits that no other writer of the folder has.

    Example:
        ```python
        import numpy as np

        from inspect_lens.data import ActivationStore, Captured, SampleRecord, ShardWriter
        from inspect_lens.spec import TensorData

        record = SampleRecord(
            index=0, id="a", label=True, group="a", n_rows=1, n_prompt=2, completion="Ruvan."
        )
        acts = TensorData(np.ones((1, 1, 8), dtype=np.float32), "float32")
        kept = {"layers": (4,), "positions": (2,), "token_ids": (5, 6, 7)}
        about = {"layers": [4], "hidden": 8, "dtype": "float32"}
        writer = ShardWriter("acts/mine", about, writer="0123456789ab")
        writer.write(0, [Captured(record=record, acts=acts, **kept)])
        assert ActivationStore.open("acts/mine").n_rows == 1
        ```
    """

    def __init__(self, uri: str, about: Mapping[str, Any], writer: str) -> None:
        self.uri = uri.rstrip("/")
        self.writer = writer
        self._about = {"format": RECORDING_FORMAT, **about}

    def claim(self) -> None:
        """Write what is recorded, or compare it with what is there.

        Raises:
            SpecError: the folder holds something else.
            ArtifactError: it could not be read.
            CaptureError: it could not be written.
        """
        where = f"{self.uri}/{RECORDING}"
        content = read_file(where)
        if content is None:
            write_file(where, [to_json(self._about)], mode=_PRIVATE)
        else:
            there = _read_about(where, content)
            ours = json.loads(to_json(self._about))
            if differ := sorted(k for k in {*there, *ours} if there.get(k) != ours.get(k)):
                told = "; ".join(f"{k}: {there.get(k)!r}, now {ours.get(k)!r}" for k in differ)
                raise SpecError(
                    f"{self.uri}: holds another recording ({told[:600]}); give this one a folder "
                    "of its own"
                )

    def write(
        self,
        number: int,
        samples: Sequence[Captured],
        *,
        writer: str = "",
        parts: Sequence[bytes | memoryview] = (),
    ) -> tuple[str, int]:
        """Write a shard; the same number with the same samples may be written again.

        Args:
            number: of the shard.
            samples: what it holds.
            writer: another one that has ended, and had numbered it.
            parts: its content, where it is encoded already.

        Returns:
            Name of the file, and its bytes.

        Raises:
            CaptureError: it could not be written.
            SpecError, ArtifactError: see `claim`.
        """
        # Each time: somebody may have put the folder away, or what is old in it.
        self.claim()
        name = shard_name(writer or self.writer, number)
        parts = parts or shard_parts(samples)
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        write_file(f"{self.uri}/{name}.safetensors", parts, mode=_PRIVATE)
        facts = shard_facts(f"{name}.safetensors", digest.hexdigest(), samples)
        write_file(f"{self.uri}/{name}.json", [to_json(facts)], mode=_PRIVATE)
        return f"{name}.safetensors", sum(memoryview(part).nbytes for part in parts)


@dataclass(frozen=True)
class RecordedShard:
    """A finished file (shard) of what a server records."""

    uri: str
    """Of the file."""
    facts: Mapping[str, Any]
    """File, hash, samples and rows."""
    cursor: str
    """Of a reader that has taken this shard and those before it; see `Recording.shards`."""

    def samples(self) -> list[Captured]:
        """Its samples with their activations.

        Raises:
            ArtifactError: it is missing or damaged.
        """
        content = read_file(self.uri)
        if content is None or hashlib.sha256(content).hexdigest() != self.facts["sha256"]:
            what = "is not there" if content is None else "has another hash"
            raise ArtifactError(
                f"{self.uri}: {what} than its .json says; delete both, and read the others"
            )
        return decode_shard(content, where=self.uri)


class Recording:
    """Reads activations that servers record, also while they are still writing.

    Args:
        uri: the folder, a local path or fsspec URL.

    Example:
        ```python
        import numpy as np

        from inspect_lens.data import Captured, Recording, SampleRecord, ShardWriter
        from inspect_lens.spec import TensorData

        record = SampleRecord(
            index=0, id="a", label=None, group="a", n_rows=1, n_prompt=2, completion="Ruvan."
        )
        acts = TensorData(np.ones((1, 1, 8), dtype=np.float32), "float32")
        sample = Captured(
            record=record, acts=acts, layers=(4,), positions=(2,), token_ids=(5, 6, 7)
        )
        writer = ShardWriter("acts/live", {"model": {"name": "m"}}, writer="0123456789ab")
        writer.write(0, [sample])

        cursor = ""
        for shard in Recording.open("acts/live").shards(after=cursor):
            assert shard.samples()[0].record.id == "a"
            cursor = shard.cursor  # keep it: a later run goes on from here
        assert not list(Recording.open("acts/live").shards(after=cursor))
        ```
    """

    def __init__(self, uri: str, about: Mapping[str, Any]) -> None:
        self.uri = uri
        self.about = about
        """What is recorded: model, layers, site, positions."""

    @classmethod
    def open(cls, uri: str | Path) -> Recording:
        """Open a recording.

        Args:
            uri: the folder.

        Returns:
            The recording; no shard is read.

        Raises:
            ArtifactError: the folder holds none.
        """
        found = cls.find(str(uri))
        if found is None:
            raise ArtifactError(
                f"{uri}: holds no recording ({RECORDING} is not there); give the folder that a "
                "server's INSPECT_LENS_SINKS names"
            )
        return found

    @classmethod
    def find(cls, uri: str) -> Recording | None:
        """Open a recording, or return None if the folder holds none.

        Raises:
            ArtifactError: its first file cannot be read.
        """
        uri = uri.rstrip("/")
        where = f"{uri}/{RECORDING}"
        content = read_file(where)
        return None if content is None else cls(uri, _read_about(where, content))

    def shards(self, after: str = "") -> Iterator[RecordedShard]:
        """Finished shards that a reader has not taken yet, by writer and number.

        Args:
            after: `RecordedShard.cursor` of the last shard that was taken; empty for all.

        Raises:
            SpecError: `after` is no cursor.
            ArtifactError: a file of facts is damaged.
        """
        seen = _read_cursor(after)
        for writer, number in self._finished():
            taken = seen.setdefault(writer, set())
            if number in taken:
                continue
            name = shard_name(writer, number)
            content = read_file(f"{self.uri}/{name}.json")
            if content is None:
                continue  # whoever keeps house here has removed it
            where, file = f"{self.uri}/{name}.json", f"{name}.safetensors"
            facts = read_facts(where, content, ShardFacts, "the facts of a shard")
            if facts["file"] != file:
                raise ArtifactError(f"{where}: is of another shard; delete it")
            taken.add(number)
            yield RecordedShard(f"{self.uri}/{file}", facts, _cursor(seen))

    def manifest(self) -> dict[str, Any]:
        """What a manifest would say now, of all that is finished."""
        facts = [shard.facts for shard in self.shards()]
        return {**self.about, **sum_facts(facts)}

    def _finished(self) -> list[tuple[str, int]]:
        try:
            filesystem, path = fsspec.core.url_to_fs(self.uri)
            filesystem.invalidate_cache(path)
            names = [str(one).rpartition("/")[2] for one in filesystem.ls(path, detail=False)]
        except (OSError, ImportError, ValueError) as error:
            raise ArtifactError(f"{self.uri}: could not be listed ({error})") from error
        found = [match for name in names if (match := _FACTS.fullmatch(name))]
        return sorted((match[1], int(match[2])) for match in found)


def _read_about(where: str, content: bytes) -> dict[str, Any]:
    return read_facts(where, content, About, "what a recording is of", format=RECORDING_FORMAT)


def _cursor(seen: Mapping[str, set[int]]) -> str:
    """What was taken, in a line: of each writer the first number that was not, and those behind."""
    told: dict[str, list[Any]] = {}
    for writer, numbers in seen.items():
        following = 0
        while following in numbers:
            following += 1
        if numbers:
            told[writer] = [following, sorted(n for n in numbers if n > following)]
    return json.dumps(told, sort_keys=True)


def _read_cursor(text: str) -> dict[str, set[int]]:
    if not text:
        return {}
    try:
        told = parse_json(text)
        return {str(w): {*range(int(n)), *map(int, more)} for w, (n, more) in told.items()}
    except (ValueError, TypeError, AttributeError):
        raise SpecError(
            f"after={text[:80]!r}: not a cursor; give RecordedShard.cursor as it came, or nothing"
        ) from None
