"""What the front-end tells the workers about one request: plain data that msgpack carries.

Written once, in the front-end, from a request that was already judged; the worker trusts it.
Positions are resolved here, so the worker never has to know how long a prompt is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec

from inspect_lens.errors import LensError
from inspect_lens.spec import Cache, EngineFacts, EngineProbe, LensRequest, tap_order

from .edits import NO_EDITS, EditEnvelope, SealedEdits, seal_request_edits
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
    folder: Path | None = None
    """See `Envelope.pack`."""
    reuse: object = None
    """Of the process that sealed it: see `registered/prompt_rows.py`."""
    reads: object = None
    """Of the process that sealed it: how its probes are read."""
    uses: str | None = None
    """Uses of probes as text, for the process that sealed them: what an engine in another process
    is sent has none of it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ({**self, USES_KEY: self.uses},)

    def of(self, envelope: Envelope) -> Packed:
        """Another envelope of the same request."""
        made = envelope.pack(self.folder)
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
    """Everything that changes the stream."""
    probes: ProbesEnvelope | None
    n_prompt: int
    """Prompt tokens."""
    is_speculative: bool
    """Whether a step may feed tokens that are rejected afterwards."""
    steer_hash: str | None
    """What the prefix cache is salted with: a content hash over the steering, and what keeps a
    request away from blocks that a failed one of the same content left behind."""

    qk: CaptureEnvelope | None = None
    """Queries and keys, which are a capture of their own beside the other."""
    lens: LensEnvelope | None = None
    """What rows predict."""
    is_streamed: bool = False
    """Whether the front-end sends results with their tokens; workers do not care."""

    @property
    def edits(self) -> tuple[EditEnvelope, ...]:
        """What changes the stream, in order."""
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

    def pack(self, folder: Path | None = None) -> Packed:
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
                _EDITED_KEY: self.edited.pack(folder),
            }
        )
        packed.envelope, packed.folder = self, folder
        return packed

    @classmethod
    def unpack(cls, value: Mapping[str, Any]) -> Envelope:
        """Read what `pack` made."""
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
