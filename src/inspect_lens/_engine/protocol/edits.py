"""Edits of one request, resolved against its prompt, as a front-end tells a worker of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec import (
    N_LATCHES,
    N_REGISTERS,
    NEXT_TOKEN,
    Cache,
    Chosen,
    EditBase,
    EngineFacts,
    Gate,
    Instruction,
    Kind,
    LensRequest,
    Phase,
    Positions,
    Site,
    SiteWidth,
    TapPoint,
    chosen_numbers,
    is_mask,
    phase_range,
    resolve_positions,
    sampled_match,
    tap_point,
    token_gate,
    token_gate_key,
)

from .programs import (
    MOST_POSITIONS,
    Program,
    Programs,
    content_of,
    history_rows,
    made_once,
    received,
    sent,
    unpack_programs,
)

EVERY = 1 << 62
"""End of a span that has none."""


@dataclass(frozen=True)
class EditEnvelope:
    """One edit, or a gate that later ones read."""

    site: Site
    """The site asked for."""
    layers: tuple[int, ...]
    """Layer of each entry of `programs`."""
    made: Programs
    """What it does."""
    positions: tuple[int, ...] | None
    """None: every token of the span."""
    lo: int
    hi: int
    """The span: only positions of [lo, hi) are edited."""
    room: int = 0
    """Sampled tokens of which a running gate keeps its decision, at most."""
    receipt_sha256: str = ""
    """By which receipts name the edit; empty for a gate."""

    @property
    def taps(self) -> tuple[TapPoint, ...]:
        """The tap of each layer."""
        return tuple(tap_point(self.site, layer) for layer in self.layers)

    @property
    def since(self) -> int:
        """The first position that is edited, or read by a gate."""
        if self.positions is None:
            return self.lo
        return min((p for p in self.positions if self.lo <= p < self.hi), default=self.lo)

    @property
    def until(self) -> int:
        """One past the last position that is edited; `EVERY` where there is no last one."""
        if self.positions is None:
            return self.hi
        return max((p + 1 for p in self.positions if self.lo <= p < self.hi), default=0)

    @property
    def programs(self) -> tuple[tuple[Program, ...], ...]:
        """By layer: one program for all tokens, or one for each of the listed positions."""
        return self.made.by_layer

    @property
    def sha256(self) -> str:
        """Of the programs."""
        return self.made.sha256

    @property
    def latch(self) -> int | None:
        """Which gate that lasts it computes; None for everything else."""
        one = self._first
        if one is None or one.kind < Kind.LATCH:
            return None
        return (one.gate - N_REGISTERS) % N_LATCHES

    @property
    def decides_on(self) -> int | None:
        """How far behind a token a running gate decides, 0 or 1; None for everything else."""
        one = self._first
        if one is None or one.kind < Kind.RUNNING:
            return None
        return int(one.gate >= NEXT_TOKEN)

    @property
    def reads_ids(self) -> bool:
        """Whether it looks at the ids of tokens that are fed to the model."""
        return self._first is not None and self._first.kind == Kind.TOKEN_GATE

    @property
    def _first(self) -> Instruction | None:
        """A gate is a program of its own, of one instruction."""
        program = self.programs[0][0]
        return program[0] if program else None

    @property
    def is_listed(self) -> bool:
        """Whether each of the positions has a program of its own."""
        return len(self.programs[0]) > 1


def seal_edits(
    edits: Sequence[EditBase],
    n_prompt: int,
    n_max: int,
    width_of: Callable[[Site], SiteWidth],
) -> tuple[EditEnvelope, ...]:
    """Resolve judged edits; a gate becomes an entry in front of the first edit that reads it."""
    registers: dict[tuple[object, ...], int] = {}
    """By content: gates of scope `token`, and those of sampled tokens with some ids."""
    latches: dict[tuple[object, ...], int] = {}
    sealed: list[EditEnvelope] = []
    for i, edit in enumerate(edits):
        where = _where(edit.positions, edit.phase, n_prompt, n_max, f"edits[{i}]")
        gate = -1
        if edit.when is not None:
            is_lasting = edit.when.is_lasting
            read_at = _read_at(edit.when, n_prompt) if is_lasting else where
            known = latches if is_lasting else registers
            content = (edit.when.content, read_at)
            if content not in known:
                known[content] = edit.when.first_register + len(known)
                room = max(n_max - n_prompt, 1) if edit.when.is_running else 0
                sealed.append(_gate(edit.when, known[content], read_at, room))
            gate = known[content]
            if edit.when.shadow:
                continue
        if (match := sampled_match(edit.positions)) is not None:
            gate = registers.setdefault(token_gate_key(match), len(registers))
            one = token_gate(match, width_of(edit.site), gate)
            which = token_gate_key(match), width_of(edit.site), gate, len(edit.layers)
            looks = made_once(which, partial(_repeated, one, len(edit.layers)))
            sealed.append(EditEnvelope(edit.site, edit.layers, looks, *where))
        chosen = chosen_numbers(edit.choice, width_of(edit.site), f"edits[{i}]")
        same = content_of(edit, width_of(edit.site), gate)
        made = made_once(same, partial(_programs, edit, chosen, gate))
        named = edit.sha256 or made.sha256
        sealed.append(EditEnvelope(edit.site, edit.layers, made, *where, receipt_sha256=named))
    return tuple(sealed)


def _programs(edit: EditBase, chosen: Chosen | None, gate: int) -> list[list[Program]]:
    listed: Sequence[int | None] = [None] if edit.n_listed is None else range(edit.n_listed)
    return [
        [_gated(edit.program(index, k, chosen), gate) for k in listed]
        for index in range(len(edit.layers))
    ]


def _repeated(one: Instruction, n_layers: int) -> list[list[Program]]:
    return [[(one,)]] * n_layers


def check_room(edits: Sequence[EditEnvelope], n_max: int, facts: EngineFacts) -> None:
    """Refuse running gates whose decisions the table of vectors has no room for."""
    rooms = [edit.room for edit in edits if edit.room]
    rows = sum(history_rows(room, facts.hidden) for room in rooms)
    if rows > facts.bank_rows or (rooms and n_max >= MOST_POSITIONS):
        raise UnsupportedError(
            f"edits: gates that decide on up to {max(rooms)} sampled tokens keep a number of each, "
            f"in {rows} rows; the steering table has {facts.bank_rows}, and positions go up to "
            f"{MOST_POSITIONS - 1}; lower max_tokens, or raise INSPECT_LENS_BANK_BYTES"
        )


def _where(
    positions: Positions, phase: Phase, n_prompt: int, n_max: int, field: str
) -> tuple[tuple[int, ...] | None, int, int]:
    """Listed positions or None, and the span."""
    span = phase_range(phase, n_prompt, EVERY)
    listed: tuple[int, ...] | None = None
    if positions == "prompt":
        span = range(span.start, min(span.stop, n_prompt))
    elif positions == "completion" or sampled_match(positions) is not None:
        span = range(max(span.start, n_prompt), span.stop)
    elif positions != "all":
        found = resolve_positions(
            positions, n_prompt=n_prompt, n_max=n_max, field=f"{field}.positions"
        )
        listed = tuple(found)
    nothing = span.start >= span.stop if listed is None else not any(p in span for p in listed)
    if nothing:
        named = "a mask over the prompt" if is_mask(positions) else repr(positions)
        raise SpecError(
            f"{field}: phase={phase!r} beside positions={named} selects no token of a prompt of "
            f"{n_prompt}; leave one of them out"
        )
    return listed, span.start, span.stop


def _read_at(gate: Gate, n_prompt: int) -> tuple[tuple[int, ...] | None, int, int]:
    """Listed positions or None, and the span in which a gate that lasts is read."""
    if gate.reads == "last_prompt":
        return (n_prompt - 1,), n_prompt - 1, n_prompt
    return None, n_prompt, EVERY


def _gate(
    gate: Gate, register: int, where: tuple[tuple[int, ...] | None, int, int], room: int
) -> EditEnvelope:
    one = gate.instruction(register)
    made = made_once((gate.content, register), partial(_repeated, one, 1))
    return EditEnvelope(gate.site, (gate.layer,), made, *where, room)


def _gated(program: Program, gate: int) -> Program:
    if gate < 0:
        return program
    return tuple(
        Instruction(one.kind, one.read, one.write, one.params, one.sees_edits, gate)
        for one in program
    )


def pack_edit(edit: EditEnvelope, folder: Path | None) -> tuple[Any, ...]:
    """As msgpack-able data."""
    where = edit.site, edit.layers, edit.positions, edit.lo, edit.hi, edit.room
    return (
        (*where, edit.receipt_sha256),
        edit.sha256,
        edit.made.packed,
        sent(edit.made.data, edit.made, folder),
    )


def unpack_edit(value: Sequence[Any]) -> EditEnvelope:
    """Read what `pack_edit` made."""
    (site, layers, positions, lo, hi, room, named), sha256, programs, parts = value
    made = unpack_programs(sha256, programs, partial(received, parts))
    positions = None if positions is None else tuple(positions)
    return EditEnvelope(site, tuple(layers), made, positions, lo, hi, room, named)


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

_SEALED: Final[Cache[tuple[int, int], tuple[LensRequest, EngineFacts, SealedEdits]]] = Cache(1024)
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
