"""Gates that read a prompt: its rows are summed as they come, and decided on behind the last one.

Taps of a chunk work on its tokens side by side, so none of them could know the mean. What it is
made of lies in the ring when a step has run, as rows that are captured do. A prompt comes in any
chunks, and some of it twice where its request was pre-empted: each position counts once. All stays
on the device, ordered in front of the next step, whose taps find the gate open or shut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from inspect_lens._engine.plan.step_plan import Longs
from inspect_lens._engine.protocol.edits import EditEnvelope
from inspect_lens.errors import CaptureError
from inspect_lens.spec import Kind, TapPoint

from .histories import NEVER, Latches


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
        """Whether the gates have decided."""
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
