"""The tap as one Triton kernel: the same meaning as `op.py`, for CUDA graphs.

Launched once per tapped site and forward pass, also when nothing is asked: inside a replayed
graph the launch cannot be left out, so an idle tap loads one flag and returns. Addresses are
those of persistent buffers; what changes from step to step is in the buffers.
"""

# A kernel's body is Triton's language and not Python's.
# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inspect_lens import spec
from inspect_lens._engine.protocol import programs as history
from inspect_lens._engine.tap import edit_table as table
from inspect_lens._engine.tap.buffers import HEAD, TapState
from inspect_lens._engine.tap.edit_table import largest_norm
from inspect_lens.spec import Kind

SEES_EDITS = tl.constexpr(table.SEES_EDITS)
GATE_SHIFT = tl.constexpr(table.GATE_SHIFT)
N_REGISTERS = tl.constexpr(spec.N_REGISTERS)
NORM, CLIP = tl.constexpr(int(Kind.NORM)), tl.constexpr(int(Kind.CLIP))
LATENT_SET = tl.constexpr(int(Kind.LATENT_SET))
LATENT_ADD = tl.constexpr(int(Kind.LATENT_ADD))
BLEND, PART = tl.constexpr(int(Kind.BLEND)), tl.constexpr(int(Kind.PART))
RENORM = tl.constexpr(int(Kind.RENORM))
TOKEN_GATE, JOIN = tl.constexpr(int(Kind.TOKEN_GATE)), tl.constexpr(int(Kind.JOIN))
SCHEDULE = tl.constexpr(int(Kind.SCHEDULE))
GATE, COSINE_GATE = tl.constexpr(int(Kind.GATE)), tl.constexpr(int(Kind.COSINE_GATE))
LATCH, COSINE_LATCH = tl.constexpr(int(Kind.LATCH)), tl.constexpr(int(Kind.COSINE_LATCH))
RUNNING = tl.constexpr(int(Kind.RUNNING))
COSINE_RUNNING = tl.constexpr(int(Kind.COSINE_RUNNING))
N_LATCHES = tl.constexpr(spec.N_LATCHES)
FIRST, ROOM = tl.constexpr(history.FIRST), tl.constexpr(history.ROOM)
AVERAGE, IS_OPEN = tl.constexpr(history.AVERAGE), tl.constexpr(history.IS_OPEN)
COUNT, RECENT = tl.constexpr(history.COUNT), tl.constexpr(history.RECENT)
HISTORY_HEAD = tl.constexpr(history.HEAD)
RECENT_END = tl.constexpr(1 << history.RECENT_BITS)
COUNT_SHIFT, LAST_SHIFT = tl.constexpr(history.COUNT_SHIFT), tl.constexpr(history.LAST_SHIFT)
STEEPEST = tl.constexpr(3e38)
"""Steeper than this, a gate is a step."""

_PROGRAMS = 1056
"""Eight per multiprocessor of an H200: enough to fill the memory bus while capturing."""


@triton.jit
def _fire(latch, note, position, is_above):
    # Triton does not stop at the first false half of an `and`.
    if is_above:  # noqa: SIM102
        if position < tl.atomic_min(latch, position):
            # Looked at again: of two tokens of a request that is computed again, both of which
            # fire, the later one must not be noted last.
            tl.store(note, tl.atomic_min(latch, position).to(tl.int64) + 1)


@triton.jit
def _decide(start, position, note, x, a, b, c, weight):
    """`gates.decide`, of one token."""
    index = position - tl.load(start + FIRST).to(tl.int32)
    is_inside = (index >= 0) & (index < tl.load(start + ROOM).to(tl.int32))
    at = start + HISTORY_HEAD + index
    known = tl.load(at, mask=is_inside, other=0.0)
    # A token that comes again keeps what was decided.
    is_new = known != known
    was = tl.load(start + AVERAGE)
    mean = tl.where(was != was, x, weight * x + (1.0 - weight) * was)
    mean = tl.where(mean != mean, was, mean)
    is_held = (tl.load(start + IS_OPEN) != 0) & (mean >= c)
    step = tl.where((mean > b) | is_held, 1.0, 0.0)
    smooth = 1.0 / (1.0 + tl.exp(-a * (mean - b)))
    count = tl.load(start + COUNT) + step
    recent = (2 * tl.load(start + RECENT).to(tl.int64) + step.to(tl.int64)) % RECENT_END
    seen = (index + 1).to(tl.int64)
    word = (seen << LAST_SHIFT) | (count.to(tl.int64) << COUNT_SHIFT) | recent
    # All threads have loaded before one of them stores.
    tl.debug_barrier()
    factor = tl.where(a > STEEPEST, step, smooth)
    # NaN would mean that nothing is decided yet.
    tl.store(at, tl.where(factor == factor, factor, 0.0), mask=is_new)
    tl.store(start + AVERAGE, mean, mask=is_new)
    tl.store(start + IS_OPEN, step, mask=is_new)
    tl.store(start + COUNT, count, mask=is_new)
    tl.store(start + RECENT, recent.to(tl.float32), mask=is_new)
    begins = is_new & (step != 0) & (count == 1)
    tl.store(note, position.to(tl.int64) + 1, mask=begins)
    tl.store(note + N_LATCHES, word, mask=is_new)
    # A later entry of this tap may read it.
    tl.debug_barrier()


@triton.jit
def _add_both(a, b, c, d):
    """Combine step of a reduction that makes two sums with one barrier."""
    return a + c, b + d


@triton.jit
def _keep(pointer):
    """Load a number that all taps of a step read; the L2 cache keeps it while weights stream by."""
    return tl.load(pointer, eviction_policy="evict_last")


@triton.jit
def _instruction(entries, entry):
    """Code, row that is read and row that is written, four parameters, and the next entry."""
    at = entries + 8 * entry
    code, link = _keep(at), _keep(at + 3)
    return (
        code,
        _keep(at + 1),
        _keep(at + 2),
        _keep(at + 4).to(tl.float32, bitcast=True),
        _keep(at + 5).to(tl.float32, bitcast=True),
        _keep(at + 6).to(tl.float32, bitcast=True),
        _keep(at + 7).to(tl.float32, bitcast=True),
        link,
    )


@triton.jit
def _decided(start, position):
    """`gates.factors`, of one token."""
    index = position - tl.load(start + FIRST).to(tl.int32)
    is_inside = (index >= 0) & (index < tl.load(start + ROOM).to(tl.int32))
    found = tl.load(start + HISTORY_HEAD + index, mask=is_inside, other=0.0)
    return tl.where(found == found, found, 0.0)


@triton.jit
def _stream(at, there, inside, IS_FUSED: tl.constexpr):
    """What a site holds of one token, in float32: its own numbers, and those to be added."""
    mine = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    other = tl.zeros_like(mine)
    if IS_FUSED:
        other = tl.load(there, mask=inside, other=0.0).to(tl.float32)
    return mine, other


@triton.jit(do_not_specialize=["tap", "column", "n_tokens"])
def _tap(  # noqa: C901, PLR0915
    hidden,
    residual,
    hidden_stride,
    residual_stride,
    header,
    base,
    vectors,
    entries,
    registers,
    fed,
    latches,
    histories,
    noted,
    noted_stride,
    table,
    ring,
    faults,
    fault_stride,
    tap,
    column,
    n_tokens,
    HEAD: tl.constexpr,
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_FUSED: tl.constexpr,
    LARGEST: tl.constexpr,
    ROOM_FOR: tl.constexpr,
):
    # Loaded beside the flag, so that both are waited for at once. Whether the maps describe this
    # token is checked below.
    ahead = header + HEAD + TAPS + 5 * tl.program_id(0)
    coming_config = tl.load(ahead, mask=tl.program_id(0) < ROOM_FOR, other=0, volatile=True)
    flag = _keep(header + HEAD + tap)
    if flag == 0:
        return
    # A graph runs over padding, which the maps do not describe.
    n_tokens = tl.minimum(n_tokens, _keep(header))
    origin = _keep(header + 1)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < WIDTH
    for token in range(tl.program_id(0), n_tokens, tl.num_programs(0)):
        numbers = header + HEAD + TAPS + 5 * token
        config = tl.where((flag & 1) != 0, coming_config, 0)
        ahead = numbers + 5 * tl.num_programs(0)
        is_last = token + tl.num_programs(0) >= n_tokens
        coming_config = tl.load(ahead, mask=~is_last, other=0, eviction_policy="evict_last")
        row = _keep(table + config * 2 * TAPS + column)
        group = tl.load(numbers + 1, mask=(flag & 2) != 0, other=-1)
        first = tl.load(base + group * (TAPS + 1) + tap, mask=group >= 0, other=-1)
        place = tl.load(numbers + 2, mask=first >= 0, other=0)
        slot = tl.where(first >= 0, origin + first + place, -1)
        if (row != 0) | (slot >= 0):
            # Before the loads of the stream: the loads of directions wait for these.
            code, read, write, a, b, c, d, link = _instruction(entries, row)
            at = hidden + token.to(tl.int64) * hidden_stride + offsets
            there = residual + token.to(tl.int64) * residual_stride + offsets
            mine, other = _stream(at, there, inside, IS_FUSED)
            if row != 0:
                seen = mine + other
                before = tl.full((), -1.0, tl.float32)
                delta = tl.zeros_like(mine)
                record = _keep(numbers + 3).to(tl.int64)
                position = _keep(numbers + 4) + _keep(header + 2)
                entry = row
                while entry != 0:
                    kind = code & (SEES_EDITS - 1)
                    vector = vectors + read.to(tl.int64) * ROW + offsets
                    # A schedule is no row of the site, and takes fewer rows of the table than one.
                    is_row = (read != 0) & (kind != SCHEDULE)
                    direction = tl.load(
                        vector, inside & is_row, other=0.0, eviction_policy="evict_last"
                    )
                    target = vectors + write.to(tl.int64) * ROW + offsets
                    is_other = (write != 0) & (write != read)
                    written = tl.load(
                        target, inside & is_other, other=0.0, eviction_policy="evict_last"
                    )
                    written = tl.where(is_other | (write == 0), written, direction)
                    # Comes while this one is computed; entry 0, behind the last, does nothing.
                    coming = _instruction(entries, link)
                    if (code & SEES_EDITS) != 0:
                        mine, other = _stream(at, there, inside, IS_FUSED)
                        seen = mine + other + delta
                    squares, x = tl.reduce((seen * seen, direction * seen), 0, _add_both)
                    norm = tl.sqrt(squares)
                    before = tl.where(before < 0, norm, before)
                    register = (code >> GATE_SHIFT) - 1
                    z = x + a
                    activation = tl.where(z > b, z, 0.0)
                    is_left = ((d == 1) | (d == 3)) & (z <= b) | (d >= 2) & (activation >= c)
                    y = a * x + b
                    y = tl.where(kind == NORM, a * norm, y)
                    y = tl.where(kind == CLIP, a * (tl.minimum(tl.maximum(x, b), c) - x), y)
                    y = tl.where(kind == LATENT_SET, c - activation, y)
                    y = tl.where(kind == LATENT_ADD, c, y)
                    is_latent = (kind == LATENT_SET) | (kind == LATENT_ADD)
                    y = tl.where(is_latent & is_left, 0.0, y)
                    y = tl.where((kind == BLEND) | (kind == PART), a, y)
                    # These write no direction, and what they have for a may be infinite.
                    y = tl.where(kind >= RENORM, 0.0, y)
                    safe = tl.where(norm > 0, norm, 1.0)
                    share = tl.where(kind == BLEND, -a, 0.0)
                    share = tl.where((kind == RENORM) & (norm > 0), before / safe - 1.0, share)
                    gates = registers + token.to(tl.int64) * N_REGISTERS + register
                    lasting = register - N_REGISTERS
                    lasts = lasting % N_LATCHES
                    latch = latches + record * N_LATCHES + lasts
                    note = noted + record * noted_stride + lasts
                    is_cosine = (kind == COSINE_GATE) | (kind == COSINE_LATCH)
                    is_cosine = is_cosine | (kind == COSINE_RUNNING)
                    at_gate = tl.where(is_cosine, x / safe, x)
                    kept = tl.load(
                        histories + record * N_LATCHES + lasts, mask=lasting >= N_LATCHES, other=0
                    )
                    start = vectors + kept.to(tl.int64) * ROW
                    if kind >= GATE:  # noqa: SIM102
                        if write != 0:
                            # A latent: what is added, and above what it counts.
                            two = vectors + write.to(tl.int64) * ROW
                            at_gate += tl.load(two)
                            at_gate = tl.where(at_gate <= tl.load(two + 1), 0.0, at_gate)
                    if kind >= RUNNING:
                        _decide(start, position, note, at_gate, a, b, c, d)
                    elif kind >= LATCH:
                        _fire(latch, note, position, at_gate > b)
                    elif kind >= GATE:
                        step = tl.where(at_gate > b, 1.0, 0.0)
                        smooth = 1.0 / (1.0 + tl.exp(-a * (at_gate - b)))
                        is_by_id = kind == TOKEN_GATE
                        fed_id = tl.load(fed + token, mask=is_by_id, other=-1).to(tl.float32) + 1
                        # Zeros are no ids, and lie behind the end of the row, too.
                        named = tl.max(tl.where(direction == fed_id, 1.0, 0.0), axis=0)
                        value = tl.where(a > STEEPEST, step, smooth)
                        value = tl.where(is_by_id, tl.abs(named - a), value)
                        if kind == SCHEDULE:
                            past = tl.minimum(position - b.to(tl.int32), a.to(tl.int32) - 1)
                            past = tl.maximum(past, 0)
                            value = tl.load(vectors + read.to(tl.int64) * ROW + past)
                        tl.store(gates, value)
                        # A later entry of this tap may read it.
                        tl.debug_barrier()
                    is_own = (register >= 0) & (lasting < 0)
                    gate = tl.load(gates, mask=is_own, other=1.0)
                    fired = tl.load(latch, mask=(lasting >= 0) & (lasting < N_LATCHES), other=-1)
                    gate = tl.where(fired < position, gate, 0.0)
                    if lasting >= N_LATCHES:
                        # Behind those blocks whose gates decide on the token they read.
                        gate = _decided(start, position - tl.where(lasting < 2 * N_LATCHES, 0, 1))
                    if kind == JOIN:
                        to = registers + token.to(tl.int64) * N_REGISTERS + b.to(tl.int32)
                        operand = tl.where(c != 0, 1.0 - gate, gate)
                        held = tl.load(to)
                        several = tl.where(a == 1, held * operand, tl.maximum(held, operand))
                        # All threads have loaded before one of them stores.
                        tl.debug_barrier()
                        tl.store(to, tl.where(a == 0, operand, several))
                        # A later entry of this tap may read it.
                        tl.debug_barrier()
                    delta += written * (y * gate)
                    if (share != 0) | (kind == PART):
                        shares = tl.where(kind == PART, -a * direction, share)
                        delta += seen * (shares * gate)
                    entry = link
                    code, read, write, a, b, c, d, link = coming
                # Loaded again rather than held meanwhile: a wide row has no registers left for it.
                mine, other = _stream(at, there, inside, IS_FUSED)
                edited = (mine + delta).to(hidden.dtype.element_ty)
                after = edited.to(tl.float32)
                stream = after + other
                if tl.sum(stream * stream, axis=0) <= LARGEST:
                    tl.store(at, edited, mask=inside)
                    mine = after
                else:
                    # Too large, or not finite: the row stays as it is, and its request fails.
                    tl.store(faults + record * fault_stride, 1)
            if slot >= 0:
                values = (mine + other).to(ring.dtype.element_ty)
                # Rows of the ring that lie apart take a part each; the last ends with zeros.
                apart = tl.load(base + group * (TAPS + 1) + TAPS)
                into = slot + (offsets // ROW) * apart
                target = ring + into.to(tl.int64) * ROW + offsets % ROW
                tl.store(target, values, mask=offsets < PARTS * ROW)


def launch(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    *,
    tap: int,
    state: TapState,
    is_rest: bool = False,
) -> None:
    """Edit and capture the rows of one tap; or do what comes behind its autoencoder.

    A row that is not as wide as the stream takes several rows of the ring and of the table of
    directions, or a part of one; a program of the kernel has all of it.
    """
    n_tokens, width = hidden.shape
    kernel: Any = _tap
    bank, row = state.bank, state.ring.shape[1]
    parts = -(-width // row)
    block = triton.next_power_of_2(parts * row)
    warps = 4 if block <= 4096 else 16 if block <= 8192 else 32
    kernel[(min(n_tokens, _PROGRAMS),)](
        hidden,
        hidden if residual is None else residual,
        hidden.stride(0),
        0 if residual is None else residual.stride(0),
        state.header,
        state.base,
        bank.vectors,
        bank.instructions,
        bank.registers,
        bank.fed.ids,
        bank.latches.first,
        bank.latches.history,
        bank.latches.noted,
        bank.latches.noted.stride(0),
        bank.configs,
        state.ring,
        state.faults,
        state.faults.stride(0),
        tap,
        tap + len(state.taps) * is_rest,
        n_tokens,
        HEAD=HEAD,
        TAPS=len(state.taps),
        WIDTH=width,
        ROW=row,
        PARTS=parts,
        BLOCK=block,
        IS_FUSED=residual is not None,
        LARGEST=largest_norm(hidden.dtype) ** 2,
        ROOM_FOR=(len(state.header) - HEAD - len(state.taps)) // 5,
        num_warps=warps,
        # With 1024 threads the assembler would choose 32, and spill the rest.
        maxnreg=64 if warps == 32 else None,
    )


@triton.jit(do_not_specialize=["n_rows"])
def _note_faults(faults, fault_stride, records, is_fine, n_rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_bad = (row < n_rows) & (tl.load(is_fine + row, mask=row < n_rows, other=1) == 0)
    record = tl.load(records + row, mask=is_bad, other=0)
    # Several tokens of one request write the same number.
    tl.store(faults + record * fault_stride, tl.full([BLOCK], 1, tl.int64), mask=is_bad)


def note_faults(faults: torch.Tensor, records: torch.Tensor, is_fine: torch.Tensor) -> None:
    """Note the requests, by record, of rows that are not fine; `faults` may lie on the host."""
    block = 256
    kernel: Any = _note_faults
    kernel[(triton.cdiv(len(records), block),)](
        faults, faults.stride(0), records, is_fine.byte(), len(records), BLOCK=block
    )
