"""The one process-global that a compiled op needs: buffers, set once per worker.

A custom op in a compiled graph can only be handed tensors. It gets a tiny `ctl` tensor per
site, an identity token, and finds everything else here. The buffers keep their addresses for
the life of the worker, as CUDA graphs require.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from inspect_lens.spec import TapPoint

from ._bank import BankTensors

__all__ = ["TapState", "current", "install", "uninstall"]


@dataclass
class TapState:
    """Buffers of one worker.

    Attributes:
        taps: the taps of this worker, in the order in which a forward pass meets them.
        steer_rows: (sites, tokens) int32; bank row of each token, 0 for none.
        slots: (sites, tokens) int32; ring slot of each token, -1 for none.
        bank: steering rows.
        ring: (regions * region rows, hidden) in the dtype of the residual stream.
        flags: (sites,) int32; what a tap does in this step, where the host cannot tell it.
        regions: equal parts of the ring that steps use in turn, so that one can be copied out
            while the next step fills another.
        site_of: site index by address of the site's `ctl` tensor.
        steering: per site, whether this step steers there.
        capturing: per site, whether this step captures there.
        is_active: whether any site does anything in this step; the taps' only question
            in a step that asks for nothing.
    """

    taps: tuple[TapPoint, ...]
    steer_rows: torch.Tensor
    slots: torch.Tensor
    bank: BankTensors
    ring: torch.Tensor
    flags: torch.Tensor
    regions: int = 1
    site_of: dict[int, int] = field(default_factory=dict)
    steering: list[bool] = field(default_factory=list)
    capturing: list[bool] = field(default_factory=list)
    is_active: bool = False

    @classmethod
    def allocate(
        cls,
        *,
        taps: tuple[TapPoint, ...],
        hidden: int,
        dtype: torch.dtype,
        max_tokens: int,
        ring_rows: int,
        bank_rows: int,
        device: torch.device,
    ) -> TapState:
        """Allocate all buffers of a worker."""
        sites = len(taps)
        regions = 2 if device.type == "cuda" else 1
        return cls(
            taps=taps,
            steer_rows=torch.zeros(sites, max_tokens, dtype=torch.int32, device=device),
            slots=torch.full((sites, max_tokens), -1, dtype=torch.int32, device=device),
            # Row 0 is "nothing", so one more than asked for.
            bank=BankTensors.allocate(bank_rows + 1, hidden, device),
            ring=torch.zeros(regions * ring_rows, hidden, dtype=dtype, device=device),
            flags=torch.zeros(sites, dtype=torch.int32, device=device),
            regions=regions,
            steering=[False] * sites,
            capturing=[False] * sites,
        )

    def new_ctl(self, site: int) -> torch.Tensor:
        """Make the identity token of a site."""
        ctl = torch.full((1,), site, dtype=torch.int32, device=self.ring.device)
        self.site_of[ctl.data_ptr()] = site
        return ctl

    @property
    def region_rows(self) -> int:
        """Ring rows that one step may fill."""
        return self.ring.shape[0] // self.regions

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        tensors = (
            self.steer_rows,
            self.slots,
            self.bank.vectors,
            self.bank.norm,
            self.bank.link,
            self.ring,
        )
        return sum(t.numel() * t.element_size() for t in tensors)


class _Slot:
    """Holds the state; a class attribute so that no `global` statement is needed."""

    state: TapState | None = None


def install(state: TapState) -> None:
    """Make `state` the one that taps read. A second engine in the process replaces it."""
    _Slot.state = state


def uninstall(state: TapState) -> None:
    """Forget `state` if it is the current one."""
    if _Slot.state is state:
        _Slot.state = None


def current() -> TapState | None:
    """The state that taps read, or None before a worker has loaded its model."""
    return _Slot.state
