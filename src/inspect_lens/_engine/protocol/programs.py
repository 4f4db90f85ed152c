"""Programs of an edit: made, hashed and read once for all requests that ask for the same.

A program depends on what an edit is, and not on the prompt. To make one from its directions, and
to hash what came out, takes up to milliseconds. A worker reads programs in the loop that also
starts its steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from inspect_lens.spec import EditBase, Instruction, Kind, SiteWidth, TensorData

from .kept import Kept

__all__ = ["Program", "Programs", "content_of", "made_once", "unpack_programs"]

Program = tuple[Instruction, ...]

_MOST = 1 << 14
"""Programs, and bytes of their rows, that a process keeps for requests to come."""
_LIST_BYTES = 1 << 12
"""What a program costs that has no rows."""


@dataclass(frozen=True, eq=False)
class Programs:
    """What an edit does at each of its layers, and the same as it is sent."""

    by_layer: tuple[tuple[Program, ...], ...]
    """By layer: one program for all tokens, or one for each of the listed positions."""
    rows: dict[int, bytes]
    """sha256 of each distinct row, by its identity; the rows live as long as this."""
    data: tuple[bytes, ...]
    """The rows as they are sent, in that order: little-endian float32."""
    packed: tuple[Any, ...]
    """`by_layer` as msgpack-able data, with numbers of rows in the place of rows."""
    sha256: str
    """Of all of it."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes to keep it."""
        return sum(map(len, self.data)) + _LIST_BYTES * len(self.by_layer)


def _of(by_layer: Sequence[Sequence[Program]]) -> Programs:
    numbers: dict[bytes, int] = {}
    """Of the distinct rows, by their data."""

    def number(row: Any) -> int:
        if row is None:
            return -1
        data = np.ascontiguousarray(row, dtype="<f4").tobytes()
        return numbers.setdefault(data, len(numbers))

    packed = tuple(
        tuple(
            tuple(
                (
                    int(one.kind), number(one.read), number(one.write), one.params,
                    one.sees_edits, one.gate,
                )
                for one in program
            )
            for program in at_layer
        )
        for at_layer in by_layer
    )  # fmt: skip
    whole = hashlib.sha256(repr(packed).encode())
    data, digests = tuple(numbers), _digests(numbers)
    for digest in digests:
        whole.update(digest)
    return _read(whole.hexdigest(), packed, data, digests)


def _digests(data: Iterable[bytes]) -> tuple[bytes, ...]:
    return tuple([hashlib.sha256(one).digest() for one in data])


def _read(
    sha256: str, packed: Sequence[Any], data: tuple[bytes, ...], digests: tuple[bytes, ...]
) -> Programs:
    rows = [np.frombuffer(one, dtype="<f4") for one in data]

    def instruction(one: Sequence[Any]) -> Instruction:
        kind, read, write, (a, b, c, d), sees_edits, gate = one
        return Instruction(
            Kind(kind),
            None if read < 0 else rows[read],
            None if write < 0 else rows[write],
            (a, b, c, d),
            sees_edits,
            gate,
        )

    by_layer = tuple(
        tuple(tuple(map(instruction, program)) for program in at_layer) for at_layer in packed
    )
    by_identity = {id(row): digest for row, digest in zip(rows, digests, strict=True)}
    return Programs(by_layer, by_identity, data, tuple(packed), sha256)


_Known = Kept[Hashable, Programs]
_MADE: Final[_Known] = Kept(_MOST)
_UNPACKED: Final[_Known] = Kept(_MOST)


def _once(kept: _Known, key: Hashable, make: Callable[[], Programs]) -> Programs:
    known = kept.get(key)
    if known is None:
        known = make()
        kept.keep(key, known, known.nbytes)
    return known


def content_of(edit: EditBase, width: SiteWidth, gate: int) -> Hashable:
    """What the programs of an edit depend on, tensors by their hashes.

    Args:
        edit: the edit.
        width: of its site in the engine.
        gate: register that its instructions are multiplied with; -1 for none.

    Returns:
        Equal for edits whose programs are the same.
    """
    fields = {k: v for k, v in edit.__dict__.items() if k not in ("positions", "phase", "when")}
    values = [v.sha256 if isinstance(v, TensorData) else v for v in fields.values()]
    return type(edit), edit.n_listed, width, gate, *values


def made_once(content: Hashable, make: Callable[[], Sequence[Sequence[Program]]]) -> Programs:
    """The programs of some content, made if they are not known.

    Args:
        content: what they depend on.
        make: gives them by layer and listed position.
    """
    return _once(_MADE, content, lambda: _of(make()))


def unpack_programs(
    sha256: str, packed: Sequence[Any], data: Callable[[], tuple[bytes, ...]]
) -> Programs:
    """Read what was sent.

    Args:
        sha256: `Programs.sha256`.
        packed: `Programs.packed`.
        data: gives `Programs.data`, where it is not known.
    """

    def read() -> Programs:
        rows = data()
        return _read(sha256, packed, rows, _digests(rows))

    return _once(_UNPACKED, sha256, read)
