"""A set of captured activations on any fsspec path: shards, and a manifest or a recording."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import fsspec
import numpy as np
from numpy.typing import NDArray

from inspect_lens._intake import read_file
from inspect_lens._shards import (
    Captured,
    Manifest,
    RecordedShard,
    Recording,
    SampleRecord,
    ShardWriter,
    Stated,
    decode_shard,
    encode_shard,
    read_facts,
    read_layer,
    read_records,
)
from inspect_lens.errors import ArtifactError, CaptureError

__all__ = [
    "MANIFEST",
    "STORE_FORMAT",
    "ActivationStore",
    "Captured",
    "RecordedShard",
    "Recording",
    "SampleRecord",
    "ShardWriter",
    "encode_shard",
    "read_layer",
    "read_records",
    "read_whole",
    "write_whole",
]

MANIFEST: Final = "manifest.json"
"""Name of the file that is written last; a store that has it is complete."""
STORE_FORMAT: Final = "inspect_lens.activation_store/1"
"""Format name in a store's manifest."""


def write_whole(uri: str, content: bytes) -> None:
    """Write a file so that a reader, also after a crash, sees all of it or the old one.

    The temporary name is always the same, so that what a killed process left is overwritten
    and does not pile up.

    Args:
        uri: local path or fsspec URL; folders are made.
        content: all of it.

    Raises:
        CaptureError: it could not be written.

    Example:
        ```python
        from inspect_lens.data import read_whole, write_whole

        write_whole("notes/a.txt", b"kept")  # a path, or an address such as s3://bucket/a.txt
        assert read_whole("notes/a.txt") == b"kept"
        ```
    """
    try:
        filesystem, path = fsspec.core.url_to_fs(uri)
        filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
        if "file" not in filesystem.protocol:
            filesystem.pipe_file(path, content)  # object stores show an upload when it is complete
            return
        target = Path(path)
        temporary = target.with_name(f".{target.name}.tmp")
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)  # on a full disk it would keep what is needed
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except (OSError, ImportError, ValueError) as error:
        raise CaptureError(
            f"{uri}: could not be written ({error}); free space or choose another place; what is "
            "there already is kept, and collect goes on from it"
        ) from error


def read_whole(uri: str) -> bytes | None:
    """Content of a file, or None when there is none.

    Args:
        uri: local path or fsspec URL.

    Raises:
        ArtifactError: it is there and cannot be read.

    Example:
        ```python
        from inspect_lens.data import read_whole

        assert read_whole("acts/there-is-none.json") is None
        ```
    """
    return read_file(uri)


class ActivationStore:
    """Reads what `collect` wrote or a server recorded, shard by shard.

    Args:
        uri: the folder, a local path or fsspec URL.
        manifest: its content.

    Example:
        ```python
        from inspect_lens.data import ActivationStore

        store = ActivationStore.open("acts/eight")
        for rows, labels in store.rows(layer=4):
            assert rows.shape == (len(labels), store.hidden)
        ```
    """

    def __init__(self, uri: str, manifest: Mapping[str, Any]) -> None:
        self.uri = uri.rstrip("/")
        self.manifest: Mapping[str, Any] = Stated(self.uri, manifest)

    @classmethod
    def open(cls, uri: str | Path) -> ActivationStore:
        """Open a store.

        Args:
            uri: the folder.

        Returns:
            The store; nothing but the manifest is read. Of a recording it is what was finished by
            now, however long the server goes on.

        Raises:
            ArtifactError: there is neither, or it is of another format.
        """
        where = f"{str(uri).rstrip('/')}/{MANIFEST}"
        content = read_whole(where)
        if content is None and (recording := Recording.find(str(uri))) is not None:
            return cls(str(uri), recording.manifest())
        if content is None:
            raise ArtifactError(
                f"{where}: is not there; a store without it is incomplete; check the path, or run "
                "collect again, which continues"
            )
        what = "a manifest of activations"
        manifest = read_facts(where, content, Manifest, what, format=STORE_FORMAT)
        for shard in manifest["shards"]:
            if Path(shard["file"]).name != shard["file"]:
                raise ArtifactError(f"{where}: shard {shard['file']!r} lies in another folder")
        return cls(str(uri), manifest)

    def __len__(self) -> int:
        """Number of samples, those without rows included."""
        return int(self.manifest["n_samples"])

    @property
    def layers(self) -> tuple[int, ...]:
        """Captured layers, ascending."""
        return tuple(self.manifest["layers"])

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return int(self.manifest["hidden"])

    @property
    def n_rows(self) -> int:
        """Tokens in all samples."""
        return int(self.manifest["n_rows"])

    @property
    def sha256(self) -> str:
        """Hash of the manifest, which holds the hash of every shard."""
        text = json.dumps(self.manifest, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def records(self) -> Iterator[SampleRecord]:
        """All samples without their activations, in the order of the data set."""
        for shard in self.manifest["shards"]:
            yield from read_records(f"{self.uri}/{shard['file']}")

    def samples(self) -> Iterator[Captured]:
        """All samples with their activations; one shard is in memory at a time.

        Raises:
            ArtifactError: a shard is missing or damaged, or its layers or its width are not those
                of the manifest.
        """
        for shard in self.manifest["shards"]:
            uri = f"{self.uri}/{shard['file']}"
            for sample in decode_shard(self._content(uri, shard["sha256"]), where=uri):
                found = (sample.layers, 0 if sample.acts is None else sample.acts.storage.shape[-1])
                # By place in the stack, another layer would pass for the one that is asked for.
                if sample.acts is not None and found != (self.layers, self.hidden):
                    raise ArtifactError(
                        f"{uri}: layers {list(found[0])} of width {found[1]}, and the manifest "
                        f"says {list(self.layers)} of width {self.hidden}; delete the shard, "
                        "its .json and the manifest, and run collect again"
                    )
                yield sample

    def rows(
        self, layer: int, *, size: int = 8192
    ) -> Iterator[tuple[NDArray[np.float32], NDArray[np.bool_]]]:
        """Rows of one layer with their labels, in pieces.

        Args:
            layer: one of `layers`.
            size: rows of a piece at most.

        Yields:
            (rows, hidden) float32 and (rows,) bool; samples without a label are left out.

        Raises:
            ArtifactError: the layer was not captured, or a shard is missing or cut short. Its hash
                is not compared, which would read all layers: `verify` does.
        """
        for shard in self.manifest["shards"]:
            uri = f"{self.uri}/{shard['file']}"
            records = read_records(uri)
            counts = [r.n_rows for r in records]
            known = np.repeat([r.label is not None for r in records], counts)
            label = np.repeat([bool(r.label) for r in records], counts)
            for first, end, data in read_layer(uri, layer, size=size):
                kept = known[first:end]
                if kept.any():
                    yield data.to_float32()[kept], label[first:end][kept]

    def verify(self) -> None:
        """Read every shard and compare its hash.

        Raises:
            ArtifactError: a shard is missing or damaged; the message names it.
        """
        for shard in self.manifest["shards"]:
            self._content(f"{self.uri}/{shard['file']}", shard["sha256"])

    def __repr__(self) -> str:
        return (
            f"ActivationStore({self.uri!r}: {len(self)} samples, {self.n_rows} rows, layers "
            f"{list(self.layers)})"
        )

    @staticmethod
    def _content(uri: str, sha256: str) -> bytes:
        content = read_whole(uri)
        if content is None or hashlib.sha256(content).hexdigest() != sha256:
            is_wrong = "has another hash than the manifest says"
            raise ArtifactError(
                f"{uri}: {'is not there' if content is None else is_wrong}; delete the shard, its "
                ".json and the manifest, and run collect again"
            )
        return content
