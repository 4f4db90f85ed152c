"""Edits of one request, resolved against its prompt, as a front-end tells a worker of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Final

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
    Rule,
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
    N_PROMPT_ROWS,
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
    layers: tuple[int, ...]
    """Layer of each entry of `programs`."""
    made: Programs
    positions: tuple[int, ...] | None
    """None: every token of the span."""
    lo: int
    hi: int
    """The span: only positions of [lo, hi) are edited."""
    room: int = 0
    """Sampled tokens of which a running gate keeps its decision, at most."""
    receipt_sha256: str = ""
    """By which receipts name the edit; empty for a gate."""
    key: str = ""
    """Of a gate that may stay open in later requests: what opens it there."""
    is_open: bool = False
    """Whether an earlier request has opened it, so that its edits act whatever it reads."""

    @property
    def taps(self) -> tuple[TapPoint, ...]:
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
        one = self.first
        if one is None or one.kind < Kind.LATCH:
            return None
        return (one.gate - N_REGISTERS) % N_LATCHES

    @property
    def decides_on(self) -> int | None:
        """How far behind a token a running gate decides, 0 or 1; None for everything else."""
        one = self.first
        if one is None or one.kind < Kind.RUNNING:
            return None
        return int(one.gate >= NEXT_TOKEN)

    @property
    def reads_ids(self) -> bool:
        """Whether it looks at the ids of tokens that are fed to the model."""
        return self.first is not None and self.first.kind == Kind.TOKEN_GATE

    @property
    def reads_positions(self) -> bool:
        """Whether what it does depends on where a token lies."""
        one = self.first
        return one is not None and (one.kind >= Kind.LATCH or one.kind == Kind.SCHEDULE)

    @property
    def prompt_from(self) -> int | None:
        """Of a gate that reads the prompt, the first position it reads; None for all else."""
        one = self.first
        if one is None or one.kind not in (Kind.PROMPT_LAST, Kind.PROMPT_MEAN):
            return None
        return 0 if one.kind == Kind.PROMPT_MEAN else self.lo

    @property
    def first(self) -> Instruction | None:
        """The first instruction; a gate is a program of its own, of one."""
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
    opened: Collection[str] = (),
) -> tuple[EditEnvelope, ...]:
    """Resolve judged edits; a gate becomes an entry in front of the first edit that reads it.

    `opened` are the keys of gates that an earlier request has opened.
    """
    sealing = _Sealing(n_prompt, n_max, width_of, frozenset(opened))
    for i, edit in enumerate(edits):
        sealing.add(edit, f"edits[{i}]")
    return tuple(sealing.made)


_Where = tuple[tuple[int, ...] | None, int, int]
"""Listed positions or None, and the span."""


@dataclass(eq=False)
class _Sealing:
    """The entries of one request, as they are made, and the registers that its gates have."""

    _n_prompt: int
    _n_max: int
    _width_of: Callable[[Site], SiteWidth]
    _opened: frozenset[str]
    _registers: dict[tuple[object, ...], int] = field(default_factory=dict)
    """By content: what a step computes for a token."""
    _latches: dict[tuple[object, ...], int] = field(default_factory=dict)
    made: list[EditEnvelope] = field(default_factory=list)

    def add(self, edit: EditBase, field: str) -> None:
        where = _where(edit.positions, edit.phase, self._n_prompt, self._n_max, field)
        width, n = self._width_of(edit.site), len(edit.layers)
        gate = _ALWAYS if edit.when is None else self._condition(edit.when, edit, where)
        if gate == _NEVER or (edit.when is not None and edit.when.shadow):
            return
        factors = [] if gate == _ALWAYS else [(gate, False)]
        if (match := sampled_match(edit.positions)) is not None:
            register = self._register(token_gate_key(match), self._registers)
            looks = token_gate(match, width, register)
            self._note((token_gate_key(match), width, register, n), looks, edit, where)
            factors.append((register, False))
        if edit.schedule is not None:
            register = self._register((edit.schedule,), self._registers)
            looks = edit.schedule.instruction(register, self._n_prompt)
            self._note((edit.schedule, self._n_prompt, register, n), looks, edit, where)
            factors.append((register, False))
        gate = self._product(factors, edit, where)
        chosen = chosen_numbers(edit.choice, width, field)
        made = made_once(content_of(edit, width, gate), partial(_programs, edit, chosen, gate))
        named = edit.sha256 or made.sha256
        self.made.append(EditEnvelope(edit.site, edit.layers, made, *where, receipt_sha256=named))

    def _condition(self, when: Gate | Rule, edit: EditBase, where: _Where) -> int:
        """The register of a gate or a rule, or what it says of all tokens."""
        if isinstance(when, Gate):
            return self._gate(when, where)
        every, some, none = (
            [self._condition(part, edit, where) for part in parts]
            for parts in (when.all, when.any, when.none)
        )
        if _NEVER in every or _ALWAYS in none or (some and set(some) == {_NEVER}):
            return _NEVER
        factors = [(register, False) for register in every if register != _ALWAYS]
        factors += [(register, True) for register in none if register != _NEVER]
        if some and _ALWAYS not in some:
            few = [(register, False) for register in some if register != _NEVER]
            one = few[0][0] if len(few) == 1 else self._join(few, _LARGEST, edit, where)
            factors.append((one, False))
        return self._product(factors, edit, where)

    def _gate(self, gate: Gate, where: _Where) -> int:
        read_at = _read_at(gate, self._n_prompt) if gate.is_lasting else where
        known = self._latches if gate.is_lasting else self._registers
        content = gate.content, gate.conversation, read_at
        is_open = gate.conversation and gate.key in self._opened
        is_new = content not in known
        register = gate.first_register + self._register(content, known)
        if is_new:
            room = max(self._n_max - self._n_prompt, 1) if gate.is_running else 0
            one = gate.instruction(register)
            made = made_once((gate.content, register), partial(_repeated, one, 1))
            key = gate.key if gate.conversation else ""
            self.made.append(
                EditEnvelope(
                    gate.site, (gate.layer,), made, *read_at, room, key=key, is_open=is_open
                )
            )
        return _ALWAYS if is_open else register

    def _product(self, factors: list[tuple[int, bool]], edit: EditBase, where: _Where) -> int:
        """A register with the product of several, some of them denied."""
        if not factors:
            return _ALWAYS
        if len(factors) == 1 and not factors[0][1]:
            return factors[0][0]
        return self._join(factors, _PRODUCT, edit, where)

    def _join(
        self, parts: list[tuple[int, bool]], how: float, edit: EditBase, where: _Where
    ) -> int:
        register = self._register((tuple(parts), how, where), self._registers)
        for i, (source, is_denied) in enumerate(parts):
            params = (how if i else _FIRST, float(register), float(is_denied), 0.0)
            one = Instruction(Kind.JOIN, None, None, params, True, source)
            self._note((Kind.JOIN, params, source, len(edit.layers)), one, edit, where)
        return register

    def _register(self, content: tuple[object, ...], known: dict[tuple[object, ...], int]) -> int:
        """The number of some content in its block of registers."""
        most = N_LATCHES if known is self._latches else N_REGISTERS
        register = known.setdefault(content, len(known))
        if register >= most:
            raise SpecError(
                f"edits: their gates, rules and schedules need more than {most} registers; "
                "join fewer"
            )
        return register

    def _note(
        self, content: tuple[object, ...], one: Instruction, edit: EditBase, where: _Where
    ) -> None:
        """Have something computed at each tap of an edit: each stage of a pipeline needs it."""
        made = made_once(content, partial(_repeated, one, len(edit.layers)))
        self.made.append(EditEnvelope(edit.site, edit.layers, made, *where))


_ALWAYS, _NEVER = -1, -2
"""In the place of a register: the edit always acts, or never."""
_FIRST, _PRODUCT, _LARGEST = 0.0, 1.0, 2.0
"""See `Kind.JOIN`."""


def _programs(edit: EditBase, chosen: Chosen | None, gate: int) -> list[list[Program]]:
    listed: Sequence[int | None] = [None] if edit.n_listed is None else range(edit.n_listed)
    made = [[edit.program(i, k, chosen) for k in listed] for i in range(len(edit.layers))]
    if gate < 0:
        return made
    return [[tuple([replace(one, gate=gate) for one in p]) for p in at] for at in made]


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


def own_rows(edits: Sequence[EditEnvelope], hidden: int) -> int:
    """Vectors of the edit table that gates keep, which no two requests share."""
    rows = sum(history_rows(edit.room, hidden) for edit in edits if edit.room)
    return rows + sum(N_PROMPT_ROWS for edit in edits if edit.prompt_from is not None)


def most_numbers(edits: Sequence[EditEnvelope], hidden: int) -> int:
    """Vectors, instructions or configurations of the edit table, whichever are more, at most.

    Those that requests with equal edits share.
    """
    vectors = sum(-(-len(row) // (4 * hidden)) for edit in edits for row in edit.made.data)
    # Tokens in front of the end of the prompt, those behind it, and those that are listed.
    kinds = 2 + len({p for edit in edits for p in edit.positions or ()})
    chain = sum(max(map(len, at_layer)) for edit in edits for at_layer in edit.programs)
    return max(vectors, kinds * chain)


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
    if gate.reads_prompt:
        # The mean is known when the last token has been computed.
        return (n_prompt - 1,), n_prompt - 1, n_prompt
    return None, n_prompt, EVERY


Span = tuple[int, int]


@dataclass(frozen=True, eq=False)
class SealedEdits:
    """The edits of a request, in order."""

    edits: tuple[EditEnvelope, ...] = ()
    numbers: tuple[int, int] = (0, 0)
    """`most_numbers` and `own_rows` of it; known where a request is sealed."""
    _packed: dict[bool, bytes] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def until(self) -> int:
        """One past the last position that is edited; `EVERY` when every token is."""
        return max((s.until for s in self.edits), default=0)

    @cached_property
    def taps(self) -> frozenset[TapPoint]:
        return frozenset(tap for s in self.edits for tap in s.taps)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers at which it is edited, ascending."""
        return tuple(sorted({layer for s in self.edits for layer in s.layers}))

    @cached_property
    def sites(self) -> frozenset[Site]:
        return frozenset(s.site for s in self.edits)

    @cached_property
    def hashes(self) -> tuple[str, ...]:
        """sha256 of what each does, gates aside: for receipts."""
        return tuple(s.receipt_sha256 for s in self.edits if s.receipt_sha256)

    @cached_property
    def autoencoders(self) -> tuple[str, ...]:
        """Hashes of autoencoders that are spliced in, which workers keep."""
        return tuple(sorted({sha256 for e in self.edits for sha256 in e.made.autoencoders}))

    @cached_property
    def has_latches(self) -> bool:
        """Whether it has gates whose decisions last."""
        return any(edit.latch is not None for edit in self.edits)

    @cached_property
    def reads_positions(self) -> bool:
        """Whether something depends on where tokens lie, so that taps have to know."""
        return any(edit.reads_positions for edit in self.edits)

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
        listed = sum(8 * len(s.positions or ()) for s in self.edits)
        return listed + sum(e.made.nbytes for e in self.edits)

    def pack(self, *, is_local: bool) -> bytes | None:
        """As bytes, which are made once; None without any."""
        if not self.edits:
            return None
        if is_local not in self._packed:
            packed = [
                (
                    (e.site, e.layers, e.positions, e.lo, e.hi, e.room,
                     e.receipt_sha256, e.key, e.is_open),
                    e.sha256, e.made.packed, sent(e.made.data, e.made, is_local=is_local),
                )
                for e in self.edits
            ]  # fmt: skip
            self._packed[is_local] = msgspec.msgpack.encode(packed)
        return self._packed[is_local]

    @classmethod
    def unpack(cls, data: bytes) -> SealedEdits:
        edits = []
        for one, sha256, packed, parts in msgspec.msgpack.decode(data):
            site, layers, positions, *rest = one
            programs = unpack_programs(sha256, packed, partial(received, parts))
            listed = None if positions is None else tuple(positions)
            edits.append(EditEnvelope(site, tuple(layers), programs, listed, *rest))
        return cls(tuple(edits))

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
    edits = seal_edits(request.edits, n_prompt, n_max, facts.width_of, request.open_gates)
    check_room(edits, n_max, facts)
    if request.edits_meet == "error":
        _refuse_meeting(request.edits, n_prompt, n_max)
    numbers = most_numbers(edits, facts.hidden), own_rows(edits, facts.hidden)
    sealed = SealedEdits(edits, numbers)
    if all(  # every token is edited, and no gate is told by where its token lies
        e.positions == "all" and e.phase == "both" and not any(g.is_lasting for g in e.gates)
        for e in request.edits
    ):
        _SEALED.keep(key, (request, facts, sealed), request.tensor_bytes)
    return sealed


def _refuse_meeting(edits: Sequence[EditBase], n_prompt: int, n_max: int) -> None:
    """Refuse two edits of the same numbers at one token; gates count as open."""
    acting: list[tuple[int, set[TapPoint], range, set[int] | None]] = []
    for i, edit in enumerate(edits):
        if edit.op == "renormalise" or (edit.when is not None and edit.when.shadow):
            continue
        field = f"edits[{i}]"
        listed, lo, hi = _where(edit.positions, edit.phase, n_prompt, n_max, field)
        named = None if listed is None else set(listed)
        at = {tap_point(edit.site, layer): layer for layer in edit.layers}
        for j, taps, span, others in acting:
            layer = next((layer for tap, layer in at.items() if tap in taps), None)
            if layer is None or _are_apart(edits[j], edit):
                continue
            both = range(max(lo, span.start), min(hi, span.stop))
            sets = [one for one in (named, others) if one is not None]
            tokens = filter(both.__contains__, set.intersection(*sets)) if sets else both[:1]
            token = min(tokens, default=None)
            if token is not None:
                raise SpecError(
                    f"{field}: meets edits[{j}] at layer {layer}, site {edit.site}, token {token}, "
                    "and edits_meet='error' allows one edit there; give them other positions, or "
                    "leave edits_meet out, so that they act in the order of the list"
                )
        acting.append((i, {*at}, range(lo, hi), named))


def _are_apart(a: EditBase, b: EditBase) -> bool:
    """Whether they can never meet: of other parts of a row, or of other sampled tokens."""
    if a.choice and all(
        name in b.choice and set(parts).isdisjoint(b.choice[name])
        for name, parts in a.choice.items()
    ):
        return True
    matches = sampled_match(a.positions), sampled_match(b.positions)
    taken = [set(one.token_ids or ()) for one in matches if one is not None and not one.exclude]
    left = [set(one.token_ids or ()) for one in matches if one is not None and one.exclude]
    if len(taken) == 2:
        return taken[0].isdisjoint(taken[1])
    return len(taken) == len(left) == 1 and taken[0] <= left[0]
