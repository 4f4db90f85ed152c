"""Latches: the first position at which a gate with `scope="rest"` fired, by board record.

Each record also says where the decisions of gates that average, or that decide on the next token,
are kept; see `histories`.

A position can only fall, never rise, and a token asks whether it lies behind it. So the answer is
the same however tokens share steps, and a request that was pre-empted and is computed again gets
the decisions that it had: its record is still its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inspect_lens.spec import N_LATCHES, N_REGISTERS

__all__ = ["NEVER", "Latches"]

NEVER = (1 << 31) - 1
"""Position of a gate that has not fired."""


@dataclass
class Latches:
    """Buffers that taps read and write.

    Attributes:
        first: (records, `N_LATCHES`) int32, on the device.
        history: (records, `N_LATCHES`) int32, on the device; first row of what a running gate
            keeps in the table of vectors.
        noted: (records, `2*N_LATCHES`) int64, in memory that front-ends read: the position and one
            more, or 0; and behind them what `gate_history.open_among` reads. Until a worker has
            some, memory of the device.
        can_tell: whether front-ends see `noted`.
    """

    first: torch.Tensor
    history: torch.Tensor
    noted: torch.Tensor
    can_tell: bool = True

    @classmethod
    def allocate(cls, records: int, device: torch.device) -> Latches:
        """Latches of which none has fired."""
        shape = records, N_LATCHES
        first = torch.full(shape, NEVER, dtype=torch.int32, device=device)
        noted = torch.zeros(records, 2 * N_LATCHES, dtype=torch.int64, device=device)
        return cls(first, torch.zeros_like(first), noted)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return 2 * self.first.numel() * self.first.element_size()

    def tell(self, noted: torch.Tensor | None) -> None:
        """Have front-ends told what fires.

        Args:
            noted: see `Latches`; None where kernels cannot write to what front-ends read.
        """
        self.can_tell = noted is not None
        if noted is not None:
            self.noted = noted

    def reset(self, record: int) -> None:
        """Forget what gates of the last owner of a record found; ordered before the next step."""
        self.first[record].fill_(NEVER)
        self.history[record].zero_()

    def fire(self, records: torch.Tensor, registers: torch.Tensor, positions: torch.Tensor) -> None:
        """Take note of gates that fired: the definition of what the kernel does.

        Args:
            records: (n,) int64; of the tokens' requests.
            registers: (n,) int64; of the gates, from `N_REGISTERS` on.
            positions: (n,) int64; of the tokens.
        """
        at = records, registers - N_REGISTERS
        flat = at[0] * N_LATCHES + at[1]
        self.first.view(-1).scatter_reduce_(0, flat, positions.int(), "amin")
        self.noted[at] = self.first[at].long() + 1

    def is_behind(
        self, records: torch.Tensor, registers: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Whether tokens lie behind the one at which their gate fired; see `fire`."""
        return self.first[records, registers - N_REGISTERS] < positions
