"""What every place for results has in common: the response, a handle, a store, a function."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from inspect_lens._shards import Captured, SampleRecord
from inspect_lens.spec import SinkUse, TensorData

__all__ = ["HIDDEN", "Done", "Said", "Sink", "lot", "own_memory"]

HIDDEN = "sink"
"""Transport of a capture that is for a sink alone: the response has none of its rows."""

Told = TypeVar("Told", covariant=True)


@dataclass(frozen=True)
class Said:
    """Prompt and completion of a choice, whole, however they were streamed."""

    key: str
    """Id of the request, as its client knows it."""
    prompt_ids: tuple[int, ...]
    prompt: str
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Done:
    """The results of a finished choice, joined over workers and steps."""

    tensors: Mapping[str, TensorData]
    """(layers, tokens, width) by name."""
    positions: tuple[int, ...] = ()
    """Of the captured tokens, ascending."""
    layers: tuple[int, ...] = ()
    """Captured layers, ascending."""
    said: Said | None = None
    """None where no sink of this choice reads it."""
    use: SinkUse | None = None
    """What the request says of itself; None for one that a rule has chosen."""

    def captured(self, name: str, index: int) -> Captured:
        """As a sample of a shard.

        Args:
            name: of the tensor.
            index: of the sample.
        """
        tensor, said = own_memory(self.tensors[name]), self.said
        assert said is not None
        n_rows = tensor.shape[1]
        key = said.key if self.use is None or self.use.id is None else self.use.id
        record = SampleRecord(
            index=index,
            id=key,
            label=None if self.use is None else self.use.label,
            group=(None if self.use is None else self.use.group) or key,
            n_rows=n_rows,
            n_prompt=len(said.prompt_ids),
            completion=said.text,
            columns={} if self.use is None else self.use.columns,
            prompt=said.prompt,
            content=hashlib.sha256(repr(said.prompt_ids).encode()).hexdigest()[:24],
        )
        return Captured(
            record=record,
            acts=tensor if n_rows else None,
            layers=self.layers if n_rows else (),
            positions=self.positions,
            token_ids=(*said.prompt_ids, *said.token_ids),
        )


class Sink(Protocol[Told]):
    """Takes the results of a finished choice.

    The response and the handle answer with what stands in the response. A store and a function
    answer with what became of the rows, as far as that is known.
    """

    def take(self, done: Done) -> Told:
        """Take them; never waits for a disk, a network or somebody's function."""
        ...


def own_memory(tensor: TensorData) -> TensorData:
    """The same rows, copied where they would keep much more memory than their own."""
    memory: Any = tensor.storage.base
    if memory is not None and 4 * memoryview(memory).nbytes > 5 * tensor.nbytes:
        # Of a text that ended long before it had to. numpy copies without the interpreter's lock.
        return TensorData(tensor.storage.copy(), tensor.dtype)
    return tensor


def lot(*words: str) -> float:
    """A number from 0 to 1, excluded, that depends on some words alone and falls evenly."""
    digest = hashlib.blake2b("\0".join(words).encode(errors="replace"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)
