"""The custom op that sits behind every tapped layer, and what a tap means, in plain aten.

`inspect_lens::tap(Tensor(a!) hidden, Tensor? residual, Tensor ctl) -> ()`

The mutation is declared, also where nothing is steered: an op without outputs and without
mutation is removed as dead code. `ctl` is a tensor and not an int, so that the subgraphs of
all layers stay identical and compile once. The definition in aten is also what runs on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch

from inspect_lens._engine.tap.edit_table import GATE_SHIFT, SEES_EDITS, BankTensors, largest_norm
from inspect_lens._engine.tap.gates import decide, factors
from inspect_lens.spec import N_REGISTERS, SAME_TOKEN, Kind

from . import buffers
from .splice import splice_rows


def edit_rows(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    first: torch.Tensor,
    bank: BankTensors,
    owners: torch.Tensor | None = None,
    elapsed: int = 0,
) -> torch.Tensor:
    """Edit the stream of some tokens in place, each by its chain of instructions.

    Sums are taken in float32 and rounded once, so the edited value is the nearest value of
    the dtype. Tokens without a chain are not written at all: they keep their bits.
    Nor are those whose stream would be larger than `largest_norm`, or not finite: what later
    layers make of them would reach others through blocks of the key-value cache.
    """
    (index,) = first.nonzero(as_tuple=True)
    if not len(index):
        return index
    entry = first[index].long()
    records, positions = index, index
    if owners is not None:
        records, positions = owners[index, 0].long(), owners[index, 1].long() + elapsed
    owned = _Owned(index, records, positions)
    mine = hidden[index].float()
    stream = mine if residual is None else mine + residual[index].float()
    before = norm = torch.linalg.vector_norm(stream, dim=-1, keepdim=True)
    seen = stream
    delta = torch.zeros_like(mine)
    width = hidden.shape[1]
    directions = torch.zeros_like(mine[:, :1])
    while bool(entry.any()):
        code, read, write, link = bank.entries[entry].unbind(-1)
        again = ((code & SEES_EDITS) != 0).unsqueeze(-1)
        if bool(again.any()):
            seen = torch.where(again, stream + delta, seen)
            norm = torch.linalg.vector_norm(seen, dim=-1, keepdim=True)
        x = torch.zeros_like(norm)
        kind = (code & (SEES_EDITS - 1)).unsqueeze(-1)
        if bool(read.any()):
            # A schedule is no row of the site, and takes fewer rows of the table than one.
            is_row = kind.squeeze(-1) != Kind.SCHEDULE
            directions = vectors_at(bank, torch.where(is_row, read, 0), width)
            x = (directions * seen).sum(-1, keepdim=True)
        params, register = bank.params[entry], (code >> GATE_SHIFT).long() - 1
        factor, share = _maps(kind, params, x, norm, before)
        # Most chains have edits alone.
        decides = bool((kind >= Kind.JOIN).any())
        if decides:
            one = _Instruction(kind.squeeze(-1), register, params, read, write)
            _note(bank, one, owned, _score(bank, one, x, norm), directions)
        gates = _gates(bank, register, owned).unsqueeze(-1)
        if decides:
            _join(bank, one, owned, gates.squeeze(-1))
        delta += vectors_at(bank, write, width) * (factor * gates)
        is_part = (kind == Kind.PART) & (read != 0).unsqueeze(-1)
        if bool(is_part.any()):
            taken = directions * seen * (params[:, :1] * gates)
            delta -= torch.where(is_part, taken, torch.zeros_like(seen))
        if bool(share.any()):
            delta += torch.where(share != 0, seen * (share * gates), torch.zeros_like(seen))
        entry = link.long()
    edited = (mine + delta).to(hidden.dtype)
    after = edited.float() if residual is None else edited.float() + residual[index].float()
    # Of NaN this is false, too.
    is_fine = after.square().sum(dim=-1) <= largest_norm(hidden.dtype) ** 2
    hidden[index] = torch.where(is_fine.unsqueeze(-1), edited, hidden[index])
    return index[~is_fine]


class _Owned(NamedTuple):
    """Tokens with a chain: place in the step, board record, and position; (tokens,) int64 each."""

    places: torch.Tensor
    records: torch.Tensor
    positions: torch.Tensor


class _Instruction(NamedTuple):
    """The instruction of each token; all but `params` are (tokens,)."""

    kind: torch.Tensor
    register: torch.Tensor
    params: torch.Tensor
    read: torch.Tensor
    write: torch.Tensor


def _score(
    bank: BankTensors, one: _Instruction, x: torch.Tensor, norm: torch.Tensor
) -> torch.Tensor:
    """(tokens,); what gates read, by the definition of `Kind.GATE`."""
    x, norm, kind = x.squeeze(-1), norm.squeeze(-1), one.kind
    is_cosine = (kind == Kind.COSINE_GATE) | (kind == Kind.COSINE_LATCH)
    is_cosine = is_cosine | (kind == Kind.COSINE_RUNNING)
    at = torch.where(is_cosine, x / torch.where(norm > 0, norm, torch.ones_like(norm)), x)
    is_latent = (kind >= Kind.GATE) & (one.write != 0)
    added, above = bank.vectors[one.write.long(), :2].unbind(-1)
    active = torch.where(at + added <= above, torch.zeros_like(at), at + added)
    return torch.where(is_latent, active, at)


def _note(
    bank: BankTensors,
    one: _Instruction,
    owned: _Owned,
    score: torch.Tensor,
    directions: torch.Tensor,
) -> None:
    """Have gates take note of what they say of their tokens."""
    places, records, positions = owned
    kind, register, params = one.kind, one.register, one.params
    a, b = params[:, 0], params[:, 1]
    step = (score > b).to(score.dtype)
    gate = torch.where(torch.isinf(a), step, torch.sigmoid(a * (score - b)))
    if bool((kind == Kind.TOKEN_GATE).any()):
        named = (directions == (bank.fed.ids[places] + 1).unsqueeze(-1)).any(-1)
        gate = torch.where(kind == Kind.TOKEN_GATE, (named != (a != 0)).to(gate.dtype), gate)
    if bool((kind == Kind.SCHEDULE).any()):
        gate = torch.where(kind == Kind.SCHEDULE, _planned(bank, one, positions), gate)
    runs = kind >= Kind.RUNNING
    if bool(runs.any()):
        of = records[runs], register[runs], positions[runs]
        decide(bank.vectors, bank.latches, of, score[runs], params[runs])
    fires = (kind >= Kind.LATCH) & ~runs & (gate > 0)
    if bool(fires.any()):
        bank.latches.fire(records[fires], register[fires], positions[fires])
    is_gate = (kind >= Kind.GATE) & (kind < Kind.LATCH)
    if bool(is_gate.any()):
        bank.registers[places[is_gate], register[is_gate]] = gate[is_gate]


def _gates(bank: BankTensors, register: torch.Tensor, owned: _Owned) -> torch.Tensor:
    """(tokens,) float32; what edits are multiplied with, 1 where nothing gates them."""
    places, records, positions = owned
    gates = bank.registers[places, register.clamp(0, N_REGISTERS - 1)]
    gates = torch.where(register >= 0, gates, torch.ones_like(gates))
    runs = register >= SAME_TOKEN
    stays = (register >= N_REGISTERS) & ~runs
    if bool(stays.any()):
        open_ = bank.latches.is_behind(records[stays], register[stays], positions[stays])
        gates[stays] = open_.to(gates.dtype)
    if bool(runs.any()):
        of = records[runs], register[runs], positions[runs]
        gates[runs] = factors(bank.vectors, bank.latches, *of)
    return gates


def _planned(bank: BankTensors, one: _Instruction, positions: torch.Tensor) -> torch.Tensor:
    """(tokens,); the factors that schedules have for them; anything for tokens without one."""
    last = (one.params[:, 0].long() - 1).clamp(min=0)
    at = (positions - one.params[:, 1].long()).clamp(min=0).minimum(last)
    flat = bank.vectors.view(-1)
    start = one.read.long() * bank.vectors.shape[1]
    return flat[(start + at).clamp(max=len(flat) - 1)]


def _join(bank: BankTensors, one: _Instruction, owned: _Owned, gates: torch.Tensor) -> None:
    """Join gates with what is in registers; see `Kind.JOIN`."""
    joins = one.kind == Kind.JOIN
    if not bool(joins.any()):
        return
    params, places, gates = one.params[joins], owned.places[joins], gates[joins]
    how, to, is_denied = params[:, 0], params[:, 1].long(), params[:, 2] != 0
    value = torch.where(is_denied, 1 - gates, gates)
    held = bank.registers[places, to]
    several = torch.where(how == 1, held * value, torch.maximum(held, value))
    bank.registers[places, to] = torch.where(how == 0, value, several)


def vectors_at(bank: BankTensors, numbers: torch.Tensor, width: int) -> torch.Tensor:
    """Directions by their numbers; zeros for number 0."""
    first, n = numbers.long(), -(-width // bank.vectors.shape[1])
    if n == 1:
        return bank.vectors[first][:, :width]
    rows = first.unsqueeze(-1) + torch.arange(n, device=first.device)
    # What lies behind row 0 is somebody else's.
    rows = torch.where(first.unsqueeze(-1) > 0, rows, 0)
    return bank.vectors[rows].flatten(1)[:, :width]


def _maps(
    kind: torch.Tensor,
    params: torch.Tensor,
    x: torch.Tensor,
    norm: torch.Tensor,
    before: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factor of what is written, and share of the stream that is added to itself."""
    a, b, c, d = params.unsqueeze(-1).unbind(1)
    zero, one = torch.zeros_like(x), torch.ones_like(x)
    z = x + a
    is_active = z > b
    activation = torch.where(is_active, z, zero)
    is_left = ((d == 1) | (d == 3)) & ~is_active | (d >= 2) & (activation >= c)
    clipped = torch.minimum(torch.maximum(x, b), c)
    options = {
        Kind.LINEAR: a * x + b,
        Kind.NORM: a * norm,
        Kind.CLIP: a * (clipped - x),
        Kind.LATENT_SET: torch.where(is_left, zero, c - activation),
        Kind.LATENT_ADD: torch.where(is_left, zero, c),
        Kind.BLEND: a,
        Kind.PART: a,
    }
    factor = zero
    for which, value in options.items():
        factor = torch.where(kind == which, value, factor)
    share = torch.where(kind == Kind.BLEND, -a, zero)
    safe = torch.where(norm > 0, norm, one)
    share = torch.where((kind == Kind.RENORM) & (norm > 0), before / safe - 1, share)
    return factor, share


def capture_rows(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    slots: torch.Tensor,
    ring: torch.Tensor,
    apart: torch.Tensor,
) -> None:
    """Write what a site holds of captured tokens to the ring, wider rows in parts."""
    (index,) = (slots >= 0).nonzero(as_tuple=True)
    if not len(index):
        return
    stream = hidden[index]
    if residual is not None:
        stream = (stream.float() + residual[index].float()).to(ring.dtype)
    first, step, width = slots[index].long(), apart[index].long(), ring.shape[1]
    for i, part in enumerate(torch.split(stream.to(ring.dtype), width, dim=1)):
        missing = width - part.shape[1]
        ring[first + i * step] = torch.nn.functional.pad(part, (0, missing)) if missing else part


def ring_rows(tokens: torch.Tensor, base: torch.Tensor, origin: int) -> torch.Tensor:
    """Ring row of each token at one tap."""
    group = tokens[:, 1]
    first = base.index_select(0, group.clamp(min=0))
    return torch.where((group >= 0) & (first >= 0), origin + first + tokens[:, 2], -1)


_LIBRARY: Any = torch.library.Library(  # type: ignore[no-untyped-call]
    "inspect_lens", "FRAGMENT"
)
_LIBRARY.define("tap(Tensor(a!) hidden, Tensor? residual, Tensor ctl) -> ()")


def _tap_cpu(hidden: torch.Tensor, residual: torch.Tensor | None, ctl: torch.Tensor) -> None:
    found = buffers.find(ctl)
    if found is None or not found[0].is_active:
        return
    state, tap = found
    tokens = state.tokens[: min(hidden.shape[0], int(state.header[0]))]

    def edit(table: torch.Tensor) -> None:
        first = table[:, tap].index_select(0, tokens[:, 0])
        elapsed = int(state.header[2])
        left = edit_rows(hidden, residual, first, state.bank, tokens[:, 3:5], elapsed)
        state.faults[tokens[left, 3].long()] = 1

    if state.steering[tap]:
        edit(state.bank.table)
        if tap in state.splices and _splice(hidden, residual, state, tap):
            edit(state.bank.rest)
    if state.capturing[tap]:
        rows = ring_rows(tokens, state.base[:, tap], int(state.header[1]))
        apart = state.base[:, -1].index_select(0, tokens[:, 1].clamp(min=0))
        capture_rows(hidden, residual, rows, state.ring, apart)


def _note_faults(faults: torch.Tensor, records: torch.Tensor, is_fine: torch.Tensor) -> None:
    """Note the requests of rows that are not fine; without waiting for a device."""
    if not records.is_cuda:
        faults[records[~is_fine]] = 1
        return
    # A worker's notes lie in memory of the host, which kernels reach and indexing does not.
    from .tap_triton import note_faults

    note_faults(faults, records, is_fine)


def _splice(
    hidden: torch.Tensor, residual: torch.Tensor | None, state: buffers.TapState, tap: int
) -> bool:
    """Put autoencoders into the stream at a tap; what goes wrong fails the requests that ask."""
    try:
        for work in state.splices[tap]:
            splice_rows(
                hidden,
                residual,
                work,
                state.bank,
                state.tokens[:, 3:5],
                state.header[2],
                partial(_note_faults, state.faults),
                largest_norm(hidden.dtype),
            )
    except Exception as error:  # noqa: BLE001 - the forward pass is that of other requests, too
        state.splice_error = error
        return False
    state.spliced.add(tap)
    return True


def _tap_cuda(hidden: torch.Tensor, residual: torch.Tensor | None, ctl: torch.Tensor) -> None:
    found = buffers.find(ctl)
    if found is None:
        return
    state, tap = found
    # Outside a graph the host knows whether anything is asked of this tap, and saves the
    # launch. While a graph is being captured the launch must be in it: its replays read the
    # flags.
    is_asked = state.is_active and (state.steering[tap] or state.capturing[tap])
    if not is_asked and not torch.cuda.is_current_stream_capturing():
        return
    # Imported here: Triton is not there on a CPU-only machine.
    from .tap_triton import launch

    launch(hidden, residual, tap=tap, state=state)
    if is_asked and state.steering[tap] and tap in state.splices:  # noqa: SIM102 - it does work
        if _splice(hidden, residual, state, tap):
            launch(hidden, residual, tap=tap, state=state, is_rest=True)


def warm_up(state: buffers.TapState, widths: Iterable[int] = ()) -> None:
    """Compile the kernels for all layouts: a graph capture must not be the first launch."""
    if not state.ring.is_cuda or not state.taps:
        return
    from .tap_triton import launch, note_faults

    rows = torch.zeros(1, state.ring.shape[1], dtype=state.ring.dtype, device=state.ring.device)
    for residual in (None, rows):
        launch(rows, residual, tap=0, state=state)
    for width in widths:
        launch(rows.new_zeros(1, width), None, tap=0, state=state)
        # A router may compute in float32.
        launch(rows.new_zeros(1, width, dtype=torch.float32), None, tap=0, state=state)
    nobody = torch.zeros(1, dtype=torch.int64, device=rows.device)
    note_faults(state.faults, nobody, torch.ones_like(nobody, dtype=torch.bool))


def _tap_fake(hidden: torch.Tensor, residual: torch.Tensor | None, ctl: torch.Tensor) -> None:
    return None


_LIBRARY.impl("tap", _tap_cpu, "CPU")
_LIBRARY.impl("tap", _tap_cuda, "CUDA")
torch.library.register_fake("inspect_lens::tap", _tap_fake, lib=_LIBRARY)

tap: Any = torch.ops.inspect_lens.tap.default
"""The op; `tap(hidden, residual, ctl)`."""
