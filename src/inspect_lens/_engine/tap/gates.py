"""Gates that remember: what running ones decided at sampled tokens, and those that read a prompt.

A program of the kernel works on one token, and the tokens of a chunk run side by side. So an
average over tokens is taken where they come one by one: over sampled tokens. A chunk holds several
of them only where a request that was pre-empted is computed again, and then all but the last were
decided before. A decision is written once, so they stand. Speculative decoding breaks this, and is
refused.

The taps of a chunk cannot know the mean of its prompt, either. What it is made of lies in the ring
when a step has run, as rows that are captured do. A prompt comes in any chunks, and some of it
twice where its request was pre-empted: each position counts once. All stays on the device, ordered
in front of the next step, whose taps find the gate open or shut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from inspect_lens._engine.plan import Longs
from inspect_lens._engine.protocol.edits import EditEnvelope
from inspect_lens._engine.protocol.programs import (
    AVERAGE,
    COUNT,
    COUNT_SHIFT,
    FIRST,
    HEAD,
    IS_OPEN,
    LAST_SHIFT,
    RECENT,
    RECENT_BITS,
    ROOM,
)
from inspect_lens.errors import CaptureError, UnsupportedError
from inspect_lens.spec import N_LATCHES, N_REGISTERS, NEXT_TOKEN, SAME_TOKEN, Kind, TapPoint

NEVER = (1 << 31) - 1
"""Position of a gate that has not fired."""


class Latches:
    """Buffers that taps read and write of gates whose decisions last; none has fired."""

    def __init__(self, records: int, device: torch.device) -> None:
        shape = records, N_LATCHES
        self.first = torch.full(shape, NEVER, dtype=torch.int32, device=device)
        self.history = torch.zeros_like(self.first)
        """First row of what a running gate keeps in the table of vectors."""
        self.noted = torch.zeros(records, 2 * N_LATCHES, dtype=torch.int64, device=device)
        """In memory that front-ends read: the position and one more, or 0; and behind them what
        `programs.open_among` reads. Until a worker has some, memory of the device."""
        self.can_tell = True
        """Whether front-ends see `noted`."""

    @property
    def nbytes(self) -> int:
        return 2 * self.first.numel() * self.first.element_size()

    def tell(self, noted: torch.Tensor | None) -> None:
        """Have front-ends told what fires."""
        self.can_tell = noted is not None
        if noted is not None:
            self.noted = noted

    def reset(self, record: int) -> None:
        """Forget what gates of the last owner of a record found; ordered before the next step."""
        self.first[record].fill_(NEVER)
        self.history[record].zero_()

    def fire(self, records: torch.Tensor, registers: torch.Tensor, positions: torch.Tensor) -> None:
        """Take note of gates that fired: the definition of what the kernel does."""
        at = records, registers - N_REGISTERS
        flat = at[0] * N_LATCHES + at[1]
        self.first.view(-1).scatter_reduce_(0, flat, positions.int(), "amin")
        self.noted[at] = self.first[at].long() + 1

    def is_behind(
        self, records: torch.Tensor, registers: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Whether tokens lie behind the one at which their gate fired; see `fire`."""
        return self.first[records, registers - N_REGISTERS] < positions


def decide(
    vectors: torch.Tensor,
    latches: Latches,
    owners: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scores: torch.Tensor,
    params: torch.Tensor,
) -> None:
    """Take note of what running gates make of tokens: the definition of what the kernel does."""
    records, registers, positions = owners
    slots = (registers - SAME_TOKEN) % N_LATCHES
    flat = vectors.view(-1)
    start = latches.history[records, slots].long() * vectors.shape[1]
    at, is_inside = _place(flat, start, positions)
    new = is_inside & flat[at].isnan()
    if not bool(new.any()):
        return
    start, at, x = start[new], at[new], scores[new]
    a, b, c, weight = params[new].unbind(-1)
    was = flat[start + AVERAGE]
    mean = torch.where(was.isnan(), x, weight * x + (1 - weight) * was)
    mean = torch.where(mean.isnan(), was, mean)
    is_open = (mean > b) | ((flat[start + IS_OPEN] != 0) & (mean >= c))
    step = is_open.to(flat.dtype)
    # NaN would mean that nothing is decided yet.
    flat[at] = torch.where(torch.isinf(a), step, torch.sigmoid(a * (mean - b))).nan_to_num(nan=0.0)
    count = flat[start + COUNT] + step
    recent = (flat[start + RECENT].long() * 2 + is_open) % (1 << RECENT_BITS)
    flat[start + AVERAGE], flat[start + IS_OPEN] = mean, step
    flat[start + COUNT], flat[start + RECENT] = count, recent.to(flat.dtype)
    records, slots, positions = records[new], slots[new], positions[new]
    begins = is_open & (count == 1)
    latches.noted[records[begins], slots[begins]] = positions[begins] + 1
    seen = at - start - HEAD + 1
    note = (seen << LAST_SHIFT) | (count.long() << COUNT_SHIFT) | recent
    latches.noted[records, N_LATCHES + slots] = note


def factors(
    vectors: torch.Tensor,
    latches: Latches,
    records: torch.Tensor,
    registers: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """What the edits of tokens are multiplied with: what was decided at them, or one before."""
    flat = vectors.view(-1)
    slots = (registers - SAME_TOKEN) % N_LATCHES
    start = latches.history[records, slots].long() * vectors.shape[1]
    at, is_inside = _place(flat, start, positions - (registers >= NEXT_TOKEN).long())
    found = flat[at]
    return torch.where(is_inside & ~found.isnan(), found, torch.zeros_like(found))


def _place(
    flat: torch.Tensor, start: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the factors of tokens lie, and whether they lie anywhere."""
    index = positions - flat[start + FIRST].long()
    is_inside = (index >= 0) & (index < flat[start + ROOM].long())
    return torch.where(is_inside, start + HEAD + index, start), is_inside


@dataclass
class Fed:
    """Ids of the tokens of the running step, on the device, and where they come from."""

    ids: torch.Tensor
    source: Callable[[], torch.Tensor] | None = None
    """Gives those of the step that is about to run, in their order; None where nobody can."""

    def check(self) -> None:
        """Refuse gates that look at ids where nobody can give them."""
        if self.source is None:
            raise UnsupportedError(
                "edits: positions among='completion' need the ids of tokens that are fed, which "
                "this worker cannot read; use positions='completion', or a gate"
            )

    def note(self) -> None:
        """Copy the ids of the step that is about to run, behind what computes them."""
        if self.source is not None:
            ids = self.source()
            n = min(len(ids), len(self.ids))
            self.ids[:n].copy_(ids[:n], non_blocking=True)


@dataclass(frozen=True)
class PromptGate:
    """One gate, and its number in the table of vectors."""

    edit: EditEnvelope
    number: int

    @property
    def is_mean(self) -> bool:
        """Whether it reads all tokens."""
        assert self.edit.first is not None
        return self.edit.first.kind == Kind.PROMPT_MEAN

    @property
    def params(self) -> tuple[float, float, float, float]:
        """Similarity, threshold, and what is added to the product, and above what that counts."""
        assert self.edit.first is not None
        return self.edit.first.params

    @property
    def averages_scores(self) -> bool:
        """Whether the mean is one of activations; of rows it is that of the product, too."""
        return self.is_mean and self.params[3] > -math.inf


@dataclass
class PromptReads:
    """What gates of one request have read of its prompt."""

    record: int
    """Of the board."""
    n_prompt: int
    gates: list[PromptGate] = field(default_factory=list)
    done: int | None = None
    """One past the last position that was read; None where there is none."""

    @property
    def is_decided(self) -> bool:
        return self.done == self.n_prompt

    def read(
        self,
        vectors: torch.Tensor,
        at: Longs,
        latches: Latches,
        first: int,
        rows: Mapping[TapPoint, torch.Tensor],
    ) -> None:
        """Take the rows of some positions in; see `Bank.read_prompt`."""
        begin = min(gate.edit.prompt_from or 0 for gate in self.gates)
        known = begin if self.done is None else self.done
        if first > known:
            raise CaptureError(
                f"edits: a gate reads the prompt from position {known} on, and the engine computed "
                f"it from {first} on; try again"
            )
        end = first + len(next(iter(rows.values())))
        if end <= known:
            return
        self.done = end
        for gate in self.gates:
            got = rows[gate.edit.taps[0]][known - first :].float()
            row = int(at[gate.number])
            held, direction = vectors[row], vectors[row + 1]
            if gate.averages_scores:
                held[0] += _latent(got @ direction, gate).sum()
            elif gate.is_mean:
                held += got.sum(0)
            else:
                held.copy_(got[-1])
            if self.is_decided:
                self._decide(gate, held, direction, latches)

    def _decide(
        self, gate: PromptGate, held: torch.Tensor, direction: torch.Tensor, latches: Latches
    ) -> None:
        latch = gate.edit.latch
        assert latch is not None
        row = held / self.n_prompt if gate.is_mean else held
        if gate.averages_scores:
            score = row[0]
        elif gate.params[0]:
            score = _cosine(row, direction, is_cast=gate.params[0] == CAST)
        else:
            score = _latent(row @ direction, gate)
        is_open = score > gate.params[1]
        behind = torch.where(is_open, self.n_prompt - 1, NEVER)
        latches.first[self.record, latch] = behind.to(latches.first.dtype)
        # By a kernel: on a GPU this is memory of the host.
        torch.mul(is_open.long(), self.n_prompt, out=latches.noted[self.record, latch])


CAST = 2.0
"""See `Kind.PROMPT_LAST`."""


def _latent(products: torch.Tensor, gate: PromptGate) -> torch.Tensor:
    _, _, bias, above = gate.params
    z = products + bias
    return torch.where(z <= above, torch.zeros_like(z), z)


def _cosine(row: torch.Tensor, direction: torch.Tensor, *, is_cast: bool) -> torch.Tensor:
    """The cosine of both, or of a row and of `tanh` of its projection; 0 where one has no norm."""
    other = direction
    if is_cast:
        other = torch.tanh((row @ direction) * direction / (direction @ direction))
    norms = torch.linalg.vector_norm(row) * torch.linalg.vector_norm(other)
    return torch.where(norms > 0, (row @ other) / norms, torch.zeros_like(norms))
