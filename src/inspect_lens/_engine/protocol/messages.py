"""What front-ends and workers tell each other, and the memory in which rows lie.

An envelope says what a request wants: plain data that msgpack carries. It is written once, in the
front-end, from a request that was already judged; the worker trusts it. Positions are resolved
there, so the worker never has to know how long a prompt is. Messages go the other way.

The memory is an anonymous file (`memfd_create`): it needs no space under /dev/shm, has no name that
could be left behind, and is gone with the last process that holds it, however that one ended.
Front-ends of the same host open it through the worker's entry in /proc.

The data part is a ring of blocks. The worker places a block, has it copied, and then, in the
same stream, the number of the message that tells of it (`landed`). A front-end that has taken
the rows writes that number into its cursor, which frees the block. Where there is no room, and
the front-end whose blocks are in the way stands still, its blocks are revoked: it finds out when
it goes on, before anybody has seen what lies in their place.

The board has a record per request: which positions have been fed to the model under steering,
and how. It is written in every step, so it must cost nothing: no message is sent for it.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import CapacityError, LensError
from inspect_lens.spec import (
    N_LATCHES,
    Cache,
    EngineFacts,
    EnginePath,
    EngineProbe,
    LensRequest,
    tap_order,
)

from .edits import NO_EDITS, EditEnvelope, SealedEdits, seal_request_edits
from .processes import STALLED_S, STOPPED_S, Process
from .readouts import (
    LENS_KEY,
    READOUTS,
    AskedProbes,
    CaptureEnvelope,
    LensEnvelope,
    ProbesEnvelope,
    PromptRead,
    Readout,
    seal_capture,
    seal_lens,
    seal_probes,
    seal_qk,
)

logger = logging.getLogger("vllm.inspect_lens")

ROWS, SCORES, QK, LENS = 0, 1, 2, 3
"""Results that a request may have: captured rows, what probes made of rows, queries and keys, and
what rows predict."""

PATHS: tuple[EnginePath, ...] = ("eager", "compiled", "piecewise", "graph")
"""Ways in which a step runs, in the order of their bits on the board."""


class Opening(msgspec.Struct, frozen=True, array_like=True, eq=True):
    """A request that a worker has taken up."""

    number: int
    """The worker's short name of it."""
    key: str
    shares: list[tuple[int, int]]
    """Per result, see `ROWS`: index of the worker's first row of a token among the request's, and
    how many of them the worker has."""
    n_steered: int
    """Steered taps that the worker has."""


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """Requests that a worker has taken up since its last message."""

    worker: str
    """Name of its shared memory."""
    openings: list[Opening]
    attention: bytes = b""
    """What the worker knows of its attention layers, as it was packed; with its first message to a
    front-end."""


class Block(msgspec.Struct, frozen=True, array_like=True, tag="block"):
    """Rows in shared memory, (taps, tokens, width), of several requests."""

    worker: str
    reader: int
    """Index of the cursor that this front-end writes."""
    seq: int
    """The rows are there once the worker's `landed` has reached this number."""
    offset: int
    shape: tuple[int, int, int]
    dtype: str
    stream: int
    """Which of a request's results the rows belong to."""
    tap: int
    """Taps of the worker's share that lie in earlier blocks."""
    path: str
    """How the forward pass ran."""
    numbers: bytes
    """int64; requests, in the order of their rows along the token axis."""
    counts: bytes
    """int64; tokens of each."""
    first: bytes
    """int64; position of each one's first token."""
    listed: dict[int, bytes]
    """By index of the request: int64 positions, where they need not be consecutive."""
    covers: bytes = b""
    """int64; tokens that each row stands for, up to its own position; empty where that is one."""


class Settled(msgspec.Struct, frozen=True, array_like=True, tag="settled"):
    """How far requests are past what drafts may feed again; follows the rows of its step."""

    worker: str
    numbers: bytes
    """int64; requests."""
    settled: bytes
    """int64; one past the last position that no later step feeds again, of each."""


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """A request that a worker could not serve."""

    key: str
    kind: str
    """Name of the error class."""
    message: str


class Saved(msgspec.Struct, frozen=True, array_like=True, tag="saved"):
    """What hooks of a request saved on one worker; see `hooks/results.py`."""

    key: str
    n_layers: int
    """Layers of this worker, of those where the request runs hooks."""
    n_fed: int
    """Tokens that were seen, from position 0."""
    n_edited: int
    """Calls of hooks that gave rows back."""
    data: bytes


Message = Opened | Block | Settled | Failure | Saved

SEND_QUEUE = 8192
"""Messages that may wait for a front-end before the step loop does."""


class Channel(Process):
    """Takes messages for one front-end, in their order."""

    def put(self, data: bytes, message: Message) -> bool:
        """Send a message; False where too many wait."""
        raise NotImplementedError

    def wait(self, seconds: float) -> None:
        """Wait until fewer do."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return _ENCODER.encode(message)


def decode(data: bytes) -> Message:
    # A decoder per call: it is cheap, and decoders must not be shared between threads.
    decoder: Any = msgspec.msgpack.Decoder(Opened | Block | Settled | Failure | Saved)
    return decoder.decode(data)  # type: ignore[no-any-return]


def packed(values: NDArray[np.int64]) -> bytes:
    return np.ascontiguousarray(values, dtype="<i8").tobytes()


def unpacked(data: bytes) -> NDArray[np.int64]:
    return np.frombuffer(data, dtype="<i8")


BOARD_SIZE = 1 << 15
"""Records; a request's is its number modulo this, so numbers of live requests must differ."""

BOARD_COLUMNS = 5 + 2 * N_LATCHES

_READERS = 256
_CURSORS = 8
_REVOKED = _CURSORS + _READERS
_BOARD = 8192
HEAD_BYTES = _DATA = _BOARD + BOARD_SIZE * BOARD_COLUMNS * 8
"""Of the file, in front of the rows."""
_ALIGN = 4096
_WAIT_S = 60.0
_WORTH_A_WORD_S = 1.0


class View:
    """The parts of the file, as arrays."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        whole = np.frombuffer(memory, dtype=np.uint8)
        words = whole[:_BOARD].view(np.int64)
        self.mark: NDArray[np.int64] = words[:1]
        self.landed: NDArray[np.int64] = words[1:2]
        self.cursors: NDArray[np.int64] = words[_CURSORS : _CURSORS + _READERS]
        self.revoked: NDArray[np.int64] = words[_REVOKED : _REVOKED + _READERS]
        """By front-end: its blocks up to this number may hold something else."""
        board = whole[_BOARD:_DATA].view(np.int64)
        self.board: NDArray[np.int64] = board.reshape(BOARD_SIZE, BOARD_COLUMNS)
        """number of the request, first position fed, one past the last, ways of the steps, and
        whether a tap left a steered row as it was (see `Faults`); of each gate that lasts the
        position at which it fired and one more, or 0; and of each running one what
        `programs.open_among` reads."""
        self.data: NDArray[np.uint8] = whole[_DATA:]
        self.whole = whole


class ArenaWriter:
    """The worker's side."""

    def __init__(self, nbytes: int) -> None:
        self._fd = os.memfd_create("inspect-lens", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, _DATA + nbytes)
        self.view = View(mmap.mmap(self._fd, _DATA + nbytes))
        # Numbers of processes and files are used again; the third part is not.
        self.view.mark[0] = mark = 1 + secrets.randbits(62)
        self.name = f"{os.getpid()}/{self._fd}/{mark:x}"
        self.nbytes = nbytes
        self._readers: dict[str, tuple[int, Process]] = {}
        self._gone: set[int] = set()
        self._blocks: deque[tuple[int, int, int, int]] = deque()
        """(sequence number, reader, offset, bytes) of blocks in use, oldest first."""
        self._head = 0
        self.waited_s = 0.0
        """Seconds that `place` has waited for room."""

    def reader(self, address: str, peer: Process) -> int:
        """The index of a front-end's cursor."""
        if address not in self._readers:
            held = {index for index, _ in self._readers.values()}
            self._free_taken()
            held.update(index for _, index, _, _ in self._blocks)
            index = next((i for i in range(_READERS) if i not in held), None)
            if index is None:
                raise CapacityError(
                    f"this engine has served {_READERS} front-end processes; restart it"
                )
            # A link that is made anew takes the place of one that ended.
            self._gone.discard(index)
            self.view.cursors[index] = self.view.revoked[index] = 0
            self._readers[address] = (index, peer)
        return self._readers[address][0]

    def forget(self, address: str) -> None:
        """Free the blocks of a front-end that has gone; under its address it is another one."""
        if address in self._readers:
            self._gone.add(self._readers.pop(address)[0])

    def place(self, seq: int, address: str, nbytes: int) -> int | None:
        """Find room for a block, waiting for the front-ends where there is none."""
        size = -(-nbytes // _ALIGN) * _ALIGN
        if size > self.nbytes:
            raise CapacityError(
                f"a step has {nbytes} bytes of rows and INSPECT_LENS_SHM_BYTES allows {self.nbytes}"
            )
        index = self._readers[address][0]
        if self._stands_still(index):
            return None
        if (offset := self._fit(size)) is None and (offset := self._wait_for(size, index)) is None:
            return None
        self._blocks.append((seq, index, offset, size))
        self._head = offset + size
        return offset

    @property
    def bytes_in_use(self) -> int:
        """Bytes that some front-end has not taken yet."""
        self._free_taken()
        return sum(size for _, _, _, size in self._blocks)

    def close(self) -> None:
        """Close the file; front-ends keep what they have mapped. Safe to call twice."""
        # The number may be another file's by then.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _wait_for(self, size: int, index: int) -> int | None:
        began, before = time.monotonic(), self.waited_s
        seen, since = (-1, -1), began
        try:
            while (offset := self._fit(size)) is None:
                # Whose blocks are in the way, and how far it has come.
                seq, oldest, _, _ = self._blocks[0]
                now = oldest, int(self.view.cursors[oldest])
                # Before its rows have landed nobody can take them.
                if now != seen or self.view.landed[0] < seq:
                    seen, since = now, time.monotonic()
                elif time.monotonic() - since > STOPPED_S:
                    self._revoke_if_still(oldest, time.monotonic() - since)
                if time.monotonic() > began + _WAIT_S:
                    raise CapacityError(
                        f"no shared memory came free within {_WAIT_S:g} s: the front-end takes "
                        "rows more slowly than the model makes them"
                    )
                self._drop_dead()
                time.sleep(0.0005)
            return None if self._stands_still(index) else offset
        finally:
            self.waited_s += time.monotonic() - began
            if before < _WORTH_A_WORD_S <= self.waited_s:
                logger.warning(
                    "inspect_lens: steps have waited %.1f s, so far, for room in shared memory: "
                    "front-ends take rows more slowly than the model makes them. A larger "
                    "INSPECT_LENS_SHM_BYTES (%d) helps where that is so for a while only",
                    self.waited_s,
                    self.nbytes,
                )

    def _stands_still(self, index: int) -> bool:
        """Whether blocks of a front-end were revoked, and it does not know yet."""
        return bool(self.view.cursors[index] < self.view.revoked[index])

    def _revoke_if_still(self, index: int, still_s: float) -> None:
        """Take the blocks of a front-end back, where it has taken none of them for long enough."""
        peer = next(peer for i, peer in self._readers.values() if i == index)
        if still_s <= STALLED_S and not peer.is_stopped():
            return
        self.view.revoked[index] = max(seq for seq, i, _, _ in self._blocks if i == index)
        logger.error(
            "inspect_lens: %s has taken no rows for %.1f s while others needed room; its "
            "requests fail, and the others go on",
            peer,
            still_s,
        )

    def _fit(self, size: int) -> int | None:
        self._free_taken()
        if not self._blocks:
            # From the start again: pages that were never used need never be there.
            return 0
        tail = self._blocks[0][2]
        if self._head > tail:
            if self._head + size <= self.nbytes:
                return self._head
            return 0 if size <= tail else None
        return self._head if self._head + size <= tail else None

    def _free_taken(self) -> None:
        cursors, revoked = self.view.cursors, self.view.revoked
        while self._blocks:
            seq, index, _, _ = self._blocks[0]
            if cursors[index] < seq and revoked[index] < seq and index not in self._gone:
                return
            self._blocks.popleft()

    def _drop_dead(self) -> None:
        for index, peer in self._readers.values():
            if index not in self._gone and not peer.is_alive():
                self._gone.add(index)


class ArenaReader:
    """The front-end's side."""

    def __init__(self, name: str) -> None:
        pid, number, mark = name.split("/")
        self.name = name
        self._path = f"/proc/{pid}/fd/{number}"
        fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size < _DATA:
                raise FileNotFoundError(f"{self._path} is another file by now")
            self.view = View(mmap.mmap(fd, size))
        finally:
            os.close(fd)
        if self.view.mark[0] != int(mark, 16):
            raise FileNotFoundError(f"{self._path} is the memory of another worker by now")

    is_lost = False
    """Whether nothing of the worker comes any more; of one of this host nobody asks."""

    @property
    def is_alive(self) -> bool:
        """Whether the worker still holds the file."""
        return os.path.exists(self._path)

    def is_told(self, number: int) -> bool:
        """Whether the board holds what the worker has noted of a request until now."""
        return True

    def ask_again(self, number: int) -> None:
        """Have the board hold what the worker notes of a request from now on, too."""

    def forget(self, number: int) -> None:
        """Take note that nobody waits for a request any more."""

    def has_landed(self, seq: int) -> bool:
        """Whether the blocks of a message are there."""
        return bool(self.view.landed[0] >= seq)

    def is_revoked(self, reader: int, seq: int) -> bool:
        """Whether a block may hold something else by now; asked again when it has been copied."""
        return bool(self.view.revoked[reader] >= seq)

    def done(self, reader: int, seq: int) -> None:
        """Say that all blocks up to a message have been taken, and those that were revoked."""
        self.view.cursors[reader] = max(seq, int(self.view.revoked[reader]))


VERSION = 20


USES_KEY = "uses"
_EDITED_KEY = "edited"
"""Of a packed envelope: `SealedEdits.pack`."""
HASH_KEY = "hash"
"""Of a packed envelope: `Envelope.steer_hash`."""
_STREAMED_KEY = "streamed"
"""Of a packed envelope: `Envelope.is_streamed`."""
SPLICED_KEY = "spliced"
"""Of a packed envelope: of a request that splices an autoencoder in, one past the last position
that is edited; else None."""
NUMBERS_KEY = "numbers"
"""Of a packed envelope: `SealedEdits.numbers`."""
KEPT_KEY = "kept"
"""Of a packed envelope: what the scheduler has to know, see `Envelope._kept`."""
CACHED_KEY = "cached"
"""Of a packed envelope: tokens of the prompt that may come out of the prefix cache, where rows of
more are wanted; none where that is all the same."""


class Packed(dict[str, Any]):
    """A packed envelope that has not left its process, and need not be unpacked there."""

    envelope: Envelope
    is_local: bool = False
    """Whether it is sent to workers of this host alone."""
    reuse: object = None
    """Of the process that sealed it: see `registered/rows.py`."""
    reads: object = None
    """Of the process that sealed it: how its probes are read."""
    uses: str | None = None
    """Uses of probes as text, for the process that sealed them: what an engine in another process
    is sent has none of it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ({**self, USES_KEY: self.uses},)

    def of(self, envelope: Envelope) -> Packed:
        """Another envelope of the same request."""
        made = envelope.pack(is_local=self.is_local)
        made.uses, made.reads = self.uses, self.reads
        return made

    def beside(self, key: str, value: object) -> Packed:
        """The same with something else in it."""
        made = Packed({**self, key: value})
        made.__dict__ |= self.__dict__
        return made


def uses_of(packed: Mapping[str, Any]) -> str | None:
    """Uses of probes of a packed envelope, or of a copy that was made of it."""
    return packed.uses if isinstance(packed, Packed) else packed.get(USES_KEY)


@dataclass(frozen=True)
class Envelope:
    """Everything that a worker reads of one request."""

    reply: str
    """ZMQ address of the front-end process that owns the request."""
    pid: int
    """Its process, which a worker that waits for it looks at."""
    capture: CaptureEnvelope | None
    edited: SealedEdits
    probes: ProbesEnvelope | None
    n_prompt: int
    is_speculative: bool
    """Whether a step may feed tokens that are rejected afterwards."""
    steer_hash: str | None
    """What the prefix cache is salted with: a content hash over the steering, and what keeps a
    request away from blocks that a failed one of the same content left behind."""

    qk: CaptureEnvelope | None = None
    """Queries and keys, which are a capture of their own beside the other."""
    lens: LensEnvelope | None = None
    is_streamed: bool = False
    """Whether the front-end sends results with their tokens; workers do not care."""

    @property
    def edits(self) -> tuple[EditEnvelope, ...]:
        return self.edited.edits

    @property
    def edited_from(self) -> int:
        """The first position that anything edits, or that a gate reads; 0 without edits."""
        return min((edit.since for edit in self.edits), default=0)

    @cached_property
    def alike(self) -> tuple[bytes | None, ...]:
        """What the requests of a batch have in common, of each result."""
        return tuple([None if part is None else part.alike for part in self.read])

    @cached_property
    def results(self) -> tuple[Readout | None, ...]:
        """What is asked for of each kind, in the order of `READOUTS`."""
        return tuple([getattr(self, name) for name in READOUTS])

    @cached_property
    def read(self) -> tuple[Readout | None, ...]:
        """What a worker reads: the results, and behind them what gates read of the prompt."""
        gates = [edit for edit in self.edits if edit.prompt_from is not None]
        if not gates:
            return (*self.results, None)
        taps = sorted({edit.taps[0] for edit in gates}, key=tap_order)
        first = min(edit.prompt_from or 0 for edit in gates)
        return (*self.results, PromptRead(lo=first, hi=self.n_prompt, read=tuple(taps)))

    def results_of(self, n_fed: int) -> dict[int, int]:
        """Positions that come, by kind of result, where so many tokens are fed to the model."""
        return {i: 0 if one is None else len(one.fed(n_fed)) for i, one in enumerate(self.results)}

    @property
    def is_edited_alone(self) -> bool:
        """Whether it has edits, asks for nothing else, and all that is told of it is how far."""
        edited = self.edited
        return (
            bool(edited.edits)
            and not (edited.has_latches or self.is_speculative)
            and not any(self.results)
        )

    @cached_property
    def is_plain(self) -> bool:
        """Whether all that a worker has to know of the request are two ends and its kind."""
        return not (
            self.edited.edits
            or self.is_speculative
            or any(part is not None and not part.is_plain for part in self.results)
        )

    @property
    def _kept(self) -> tuple[int, int, int] | None:
        """How many rows of a token are kept, and first and one past the last position, at most."""
        parts = [part for part in self.read if part is not None]
        if not parts:
            return None
        taps = dict.fromkeys([tap for part in parts for tap in part.taps], 1)
        for captured in (self.capture, self.qk):
            # Each rank has its share of a row at the same place.
            for row in () if captured is None else captured.whole_rows:
                taps[row.tap] = max(taps[row.tap], row.part + 1)
        return sum(taps.values()), min(part.lo for part in parts), max(part.hi for part in parts)

    def pack(self, *, is_local: bool = False) -> Packed:
        """As msgpack-able data; tensors become bytes."""
        packed = Packed(
            {
                "v": VERSION,
                "reply": self.reply,
                "pid": self.pid,
                HASH_KEY: self.steer_hash,
                NUMBERS_KEY: self.edited.numbers,
                SPLICED_KEY: self.edited.until if self.edited.autoencoders else None,
                KEPT_KEY: self._kept,
                LENS_KEY: None if self.lens is None else self.lens.lens,
                _STREAMED_KEY: self.is_streamed,
                "rows": msgspec.msgpack.encode((self.n_prompt, self.is_speculative, *self.results)),
                _EDITED_KEY: self.edited.pack(is_local=is_local),
            }
        )
        packed.envelope, packed.is_local = self, is_local
        return packed

    @classmethod
    def unpack(cls, value: Mapping[str, Any]) -> Envelope:
        if isinstance(value, Packed):
            return value.envelope
        if value.get("v") != VERSION:
            raise LensError(
                f"the front-end wrote envelope version {value.get('v')!r} and this worker reads "
                f"{VERSION}; install one release of inspect_lens in all processes"
            )
        rows = value["rows"]
        unpack = _shared_of_rows if len(rows) <= _SHARED_MOST else _of_rows
        envelope = unpack(value["reply"], value["pid"], rows)
        if value[_STREAMED_KEY]:
            envelope = replace(envelope, is_streamed=True)
        if (edits := value[_EDITED_KEY]) is None:
            return envelope
        return replace(envelope, edited=_edited(value[HASH_KEY], edits), steer_hash=value[HASH_KEY])


_EDITED: Final[Cache[str, SealedEdits]] = Cache(1024)
"""What was read of edits, by `Envelope.steer_hash`."""


def _edited(steer_hash: str, data: bytes) -> SealedEdits:
    known = _EDITED.get(steer_hash)
    if known is None:
        known = SealedEdits.unpack(data)
        # How long a gate may run is no part of what is computed, and so not of the hash.
        if not known.has_latches:
            _EDITED.keep(steer_hash, known, known.nbytes)
    return known


_SHARED_MOST = 2048
"""Bytes of what is remembered: more of them are mostly positions of one request."""


_ROWS: Any = tuple.__class_getitem__((int, bool, *[kind | None for kind in READOUTS.values()]))


def _of_rows(reply: str, pid: int, rows: bytes) -> Envelope:
    """An unsteered request."""
    n_prompt, is_speculative, *found = msgspec.msgpack.decode(rows, type=_ROWS)
    results = dict(zip(READOUTS, found, strict=True))
    return Envelope(
        reply=reply,
        pid=pid,
        edited=NO_EDITS,
        n_prompt=n_prompt,
        is_speculative=is_speculative,
        steer_hash=None,
        **results,
    )


_shared_of_rows = lru_cache(maxsize=1024)(_of_rows)
"""The same; one object for requests that ask for the same."""


def seal(
    request: LensRequest,
    facts: EngineFacts,
    *,
    reply: str,
    n_prompt: int,
    max_tokens: int,
    epoch: Callable[[str], str] = str,
    probes: Mapping[str, EngineProbe] | AskedProbes | None = None,
    may_overrun: bool = False,
    is_live: bool = False,
) -> Envelope:
    """Resolve a judged request against its prompt."""
    if request.probes and not isinstance(probes, AskedProbes):
        probes = AskedProbes.of(request.probes, probes or {})
    # The last sampled token is never fed to the model, so it has no row.
    n_max = n_prompt + max(max_tokens, 1) - 1
    edited = seal_request_edits(request, facts, n_prompt, n_max)
    read = None
    if isinstance(probes, AskedProbes):
        read = seal_probes(probes, n_prompt, n_max, is_live=is_live)
    streams = request.stream_results
    capture = seal_capture(
        request.capture, facts, n_prompt, n_max, may_overrun=may_overrun, is_live=streams
    )
    return Envelope(
        reply=reply,
        pid=os.getpid(),
        capture=capture,
        edited=edited,
        probes=read,
        n_prompt=n_prompt,
        is_speculative=facts.is_speculative,
        steer_hash=epoch(edited.content) if edited.edits else None,
        qk=seal_qk(request.qk, facts, n_prompt, n_max, is_live=streams),
        lens=seal_lens(request.lens, facts, n_prompt, n_max),
        is_streamed=streams,
    )
