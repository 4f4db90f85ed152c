"""Programs of an edit: made, hashed and read once for all requests that ask for the same.

A program depends on what an edit is, and not on the prompt. To make one from its directions, and
to hash what came out, takes up to milliseconds. A worker reads programs in the loop that also
starts its steps.
"""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, Final

import msgspec
import numpy as np

from inspect_lens.errors import CaptureError
from inspect_lens.spec import Cache, EditBase, Instruction, Kind, SiteWidth, TensorData

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

    @cached_property
    def autoencoders(self) -> frozenset[str]:
        programs = (program for at_layer in self.by_layer for program in at_layer)
        return frozenset(one.content for program in programs for one in program if one.content)

    @property
    def nbytes(self) -> int:
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
                    one.sees_edits, one.gate, one.content,
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
        kind, read, write, (a, b, c, d), sees_edits, gate, content = one
        return Instruction(
            Kind(kind),
            None if read < 0 else rows[read],
            None if write < 0 else rows[write],
            (a, b, c, d),
            sees_edits,
            gate,
            content,
        )

    by_layer = tuple(
        tuple(tuple(map(instruction, program)) for program in at_layer) for at_layer in packed
    )
    by_identity = {id(row): digest for row, digest in zip(rows, digests, strict=True)}
    return Programs(by_layer, by_identity, data, tuple(packed), sha256)


_Known = Cache[Hashable, Programs]
_MADE: Final[_Known] = Cache(_MOST)
_UNPACKED: Final[_Known] = Cache(_MOST)


def _once(kept: _Known, key: Hashable, make: Callable[[], Programs]) -> Programs:
    known = kept.get(key)
    if known is None:
        known = make()
        kept.keep(key, known, known.nbytes)
    return known


_AROUND = ("positions", "phase", "when", "schedule")
"""Fields that say when an edit acts, and how strongly, which gates know and its programs do not."""


def content_of(edit: EditBase, width: SiteWidth, gate: int) -> Hashable:
    """What the programs of an edit depend on, tensors by their hashes."""
    fields = {k: v for k, v in edit.__dict__.items() if k not in _AROUND}
    values = [v.sha256 if isinstance(v, TensorData) else v for v in fields.values()]
    return type(edit), edit.n_listed, edit.content, width, gate, *values


def made_once(content: Hashable, make: Callable[[], Sequence[Sequence[Program]]]) -> Programs:
    """The programs of some content, made if they are not known."""
    return _once(_MADE, content, lambda: _of(make()))


def unpack_programs(
    sha256: str, packed: Sequence[Any], data: Callable[[], tuple[bytes, ...]]
) -> Programs:
    def read() -> Programs:
        rows = data()
        return _read(sha256, packed, rows, _digests(rows))

    return _once(_UNPACKED, sha256, read)


@lru_cache(maxsize=1024)
def written(values: tuple[Any, ...]) -> bytes:
    """Values that msgpack carries, as bytes: the same object for equal ones."""
    return msgspec.msgpack.encode(values)


FIRST, ROOM, AVERAGE, IS_OPEN, COUNT, RECENT = range(6)
"""Of a head: position of the first sampled token; tokens that there is room for; the average so
far, NaN before the first; whether the gate is open; tokens at which it was; and of the latest
tokens whether it was, a bit each, the newest one lowest."""

HEAD = 8
"""Numbers of a head."""

RECENT_BITS = 16
COUNT_SHIFT, LAST_SHIFT = RECENT_BITS, 40
"""Of a note: recent tokens, then how many were open, then how many were seen."""

MOST_POSITIONS = 1 << 23
"""Positions of a request that the numbers above can tell apart."""


N_PROMPT_ROWS = 2
"""Rows of the table of vectors that a gate has which reads a prompt: the sum so far, and the
direction."""


def history_rows(room: int, width: int) -> int:
    """Rows of the table of vectors that a history takes."""
    return -(-(HEAD + room) // width)


def open_among(note: int, n: int) -> int | None:
    """At how many of the first sampled tokens a gate was open."""
    count = (note >> COUNT_SHIFT) & ((1 << (LAST_SHIFT - COUNT_SHIFT)) - 1)
    behind = (note >> LAST_SHIFT) - n
    if not 0 <= behind <= RECENT_BITS:
        return None
    return count - (note & ((1 << behind) - 1)).bit_count()


LARGE: Final = 1 << 16
"""Bytes from which on data lie in a file: to write and to read one takes as long as to send them
once."""
MOST: Final = 1 << 20
"""Bytes up to which: a server's loop, which all clients share, does not copy more at once."""
_MOST_FILES: Final = 256
"""At once: a process may have a thousand files open, and vLLM needs some."""

_FILES: Final[weakref.WeakKeyDictionary[object, str]] = weakref.WeakKeyDictionary()
"""Of what the data belong to: where they lie."""
_LOCK = threading.Lock()


def file_of(parts: Sequence[memoryview | bytes], owner: object, *, is_local: bool) -> str | None:
    """A file that has some data, which is sent to workers of this host in their place.

    It lies in memory: a server's loop must not wait for a disk, neither to make one nor to remove
    it.
    """
    nbytes = sum(memoryview(part).nbytes for part in parts)
    if not is_local or not LARGE <= nbytes <= MOST:
        return None
    with _LOCK:
        if (known := _FILES.get(owner)) is not None or len(_FILES) >= _MOST_FILES:
            return known
        try:
            # Nobody but root may look into a process that changed its user or has capabilities.
            if os.stat("/proc/self/fd").st_uid != os.geteuid():
                return None
            made = os.memfd_create("inspect-lens-edits", os.MFD_CLOEXEC)
        except OSError:
            return None
        try:
            with open(made, "wb", closefd=False) as file:
                file.writelines(parts)
        except OSError:
            os.close(made)
            return None
        # A fork has files of its own: each closes what it has.
        weakref.finalize(owner, os.close, made).atexit = False
        # Numbers of files are used again; with the third part it is known whose it is.
        _FILES[owner] = f"{os.getpid()}/{made}/{os.fstat(made).st_ino}"
        return _FILES[owner]


Parts = tuple[str | None, list[int], Sequence[memoryview | bytes]]
"""Data as they are sent: a file or None, their sizes, and they themselves where there is none."""


def sent(parts: Sequence[memoryview | bytes], owner: object, *, is_local: bool) -> Parts:
    """What is sent of some data; they live as long as their owner, see `file_of`."""
    file = file_of(parts, owner, is_local=is_local)
    return file, [memoryview(part).nbytes for part in parts], parts if file is None else ()


def received(parts: Parts) -> tuple[bytes, ...]:
    """The data of which this was sent."""
    file, sizes, data = parts
    if file is None:
        return tuple(map(bytes, data))
    whole = memoryview(read_file(file))
    ends = accumulate(sizes)
    return tuple([bytes(whole[end - n : end]) for n, end in zip(sizes, ends, strict=True)])


def read_file(name: str) -> bytes:
    """Read what `file_of` wrote."""
    pid, number, inode = name.split("/")
    why: str | None = "it has gone"
    try:
        with open(f"/proc/{pid}/fd/{number}", "rb") as file:
            if os.fstat(file.fileno()).st_ino == int(inode):
                return file.read()
    except OSError as error:
        why = error.strerror
    raise CaptureError(
        f"edits: what the request brought lies in a file that cannot be read ({why}); the process "
        "that took it in may have ended, so try again"
    )
