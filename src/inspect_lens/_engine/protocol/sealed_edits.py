"""All that changes the stream of one request, and what is asked of it for each that has it.

A batch is mostly edited alike. What follows from the edits is worked out once, and requests whose
edits say nothing of their prompts have one object, however long these are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from inspect_lens.spec import (
    EditBase,
    EngineFacts,
    LensRequest,
    Site,
    TapPoint,
)

from .edits import EVERY, EditEnvelope, check_room, pack_edit, seal_edits, unpack_edit
from .kept import Kept

__all__ = [
    "NO_EDITS",
    "SealedEdits",
    "seal_request_edits",
]


Span = tuple[int, int]


@dataclass(frozen=True, eq=False)
class SealedEdits:
    """The edits of a request, in order."""

    edits: tuple[EditEnvelope, ...] = ()
    _packed: dict[Path | None, bytes] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def until(self) -> int:
        """One past the last position that is edited; `EVERY` when every token is."""
        return max((s.until for s in self.edits), default=0)

    @cached_property
    def taps(self) -> frozenset[TapPoint]:
        """Where the stream is edited."""
        return frozenset(tap for s in self.edits for tap in s.taps)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers at which it is edited, ascending."""
        return tuple(sorted({layer for s in self.edits for layer in s.layers}))

    @cached_property
    def sites(self) -> frozenset[Site]:
        """Sites at which it is edited."""
        return frozenset(s.site for s in self.edits)

    @cached_property
    def hashes(self) -> tuple[str, ...]:
        """sha256 of what each does, gates aside: for receipts."""
        return tuple(s.receipt_sha256 for s in self.edits if s.receipt_sha256)

    @cached_property
    def has_latches(self) -> bool:
        """Whether it has gates whose decisions last."""
        return any(edit.latch is not None for edit in self.edits)

    @cached_property
    def reads_ids(self) -> bool:
        """Whether it looks at the ids of tokens that are fed to the model."""
        return any(edit.reads_ids for edit in self.edits)

    @cached_property
    def spans(self) -> frozenset[Span]:
        """Spans all of whose tokens are edited; they do not overlap."""
        spans = {(s.lo, s.hi) for s in self.edits if s.positions is None}
        # Phases do not overlap, so without the whole they are disjoint.
        return frozenset({(0, EVERY)} if (0, EVERY) in spans else spans)

    @cached_property
    def named(self) -> NDArray[np.int64]:
        """Positions that are edited and lie in no span, ascending."""
        named = {p for s in self.edits for p in s.positions or () if s.lo <= p < s.hi}
        named = {p for p in named if not any(a <= p < b for a, b in self.spans)}
        return np.asarray(sorted(named), dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes to keep it."""
        listed = sum(8 * len(s.positions or ()) for s in self.edits)
        return listed + sum(e.made.nbytes for e in self.edits)

    def pack(self, folder: Path | None) -> bytes | None:
        """As bytes, which are made once; None without any."""
        if not self.edits:
            return None
        if folder not in self._packed:
            packed = [pack_edit(edit, folder) for edit in self.edits]
            self._packed[folder] = msgspec.msgpack.encode(packed)
        return self._packed[folder]

    @classmethod
    def unpack(cls, data: bytes) -> SealedEdits:
        """Read what `pack` made."""
        return cls(tuple(map(unpack_edit, msgspec.msgpack.decode(data))))

    @cached_property
    def content(self) -> str:
        """sha256 of all of it: requests with equal ones compute equal blocks of the cache."""
        digest = hashlib.sha256()
        for e in self.edits:
            digest.update(repr((e.taps, e.positions, e.lo, e.hi, e.sha256)).encode())
        return digest.hexdigest()


NO_EDITS: Final = SealedEdits()

_SEALED: Final[Kept[tuple[int, int], tuple[LensRequest, EngineFacts, SealedEdits]]] = Kept(1024)
"""By identity of the request and the facts, which are kept so that nothing else gets it."""


def seal_request_edits(
    request: LensRequest, facts: EngineFacts, n_prompt: int, n_max: int
) -> SealedEdits:
    """Resolve the edits of a judged request against its prompt."""
    if not request.edits:
        return NO_EDITS
    key = id(request), id(facts)
    known = _SEALED.get(key)
    if known is not None:
        return known[2]
    sealed = SealedEdits(seal_edits(request.edits, n_prompt, n_max, facts.width_of))
    check_room(sealed.edits, n_max, facts)
    if _suits_any_prompt(request.edits):
        _SEALED.keep(key, (request, facts, sealed), request.tensor_bytes)
    return sealed


def _suits_any_prompt(edits: Sequence[EditBase]) -> bool:
    """Whether every token is edited, and no gate is told by where its token lies."""
    return all(
        e.positions == "all" and e.phase == "both" and (e.when is None or not e.when.is_lasting)
        for e in edits
    )
