"""The one process-global that a compiled op needs: buffers, set once per worker.

A custom op in a compiled graph can only be handed tensors. It gets a tiny `ctl` tensor per
site, an identity token, and finds everything else here. The buffers keep their addresses for
the life of the worker, as CUDA graphs require.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from weakref import ReferenceType, ref

import numpy as np
import torch
from numpy.typing import NDArray

from inspect_lens._engine.plan import StepPlan
from inspect_lens._engine.protocol.messages import BOARD_SIZE
from inspect_lens._engine.protocol.readouts import LAG
from inspect_lens.errors import LensError
from inspect_lens.spec import TapPoint

from .edit_table import BankTensors, Share
from .memory import zeros
from .splice import Work

HEAD = 3
"""Numbers of the header before the flags: tokens described, ring row at which the step begins, and
steps since the plan was written, which is how far positions have moved on."""

_PARTS = 64
"""Of the ring on a GPU: decode steps behind a large one find some that have been copied out, or
never filled, until the large one's rows have left bit by bit."""


class TapState:
    """Buffers of one worker."""

    def __init__(
        self,
        *,
        taps: tuple[TapPoint, ...],
        hidden: int,
        dtype: torch.dtype,
        max_tokens: int,
        max_groups: int,
        ring_rows: int,
        bank_rows: int,
        device: torch.device,
        sum_rows: int = 0,
        lag: int = LAG,
        scratch_bytes: int = 0,
        parts: int | None = None,
        tap_rows: Sequence[int] | None = None,
        shares: Sequence[Share] | None = None,
        remote: tuple[TapPoint, ...] = (),
    ) -> None:
        n, wide = len(taps), torch.float32
        self.taps = taps
        """What each tap reads, in the order of the forward pass."""
        self.remote = remote
        """Taps of earlier stages of a pipeline, whose rows may come from there: see `Stages`."""
        self.header = torch.zeros(HEAD + n + 5 * max_tokens, dtype=torch.int32, device=device)
        """One allocation that a step fills in one copy: the number of tokens that the maps
        describe, the ring row at which the step's rows begin, steps since then, a flag per tap, and
        five numbers per token."""
        self.base = torch.full((max_groups, n + 1), -1, dtype=torch.int32, device=device)
        """Row of a group's first token at a tap, counted from where the step's rows begin, or -1.
        So a step that repeats writes none. Last, rows from one part of a wide row to the next."""
        # Row 0 is "nothing", so one more than asked for.
        self.bank = BankTensors(bank_rows + 1, hidden, n, device, max_tokens)
        self.parts = parts or (_PARTS if device.type == "cuda" else 1)
        """Equal parts of the ring that steps take in turn; see `Ring`."""
        part_rows = -(-ring_rows // max(1, self.parts // 2))
        self.ring = zeros(self.parts * part_rows, hidden, dtype=dtype, device=device)
        self.sums = zeros(sum_rows, hidden, dtype=wide, device=device)
        """What grows of sampled tokens."""
        self.latest = zeros(lag * sum_rows, hidden, dtype=dtype, device=device)
        """Tokens that are not yet part of it."""
        self.scratch = torch.empty(scratch_bytes // 4, dtype=wide, device=device)
        """On a GPU, what lies between rows and what probes make of them."""
        # Until somebody has shared memory for it.
        self.faults = torch.zeros(BOARD_SIZE, dtype=torch.int64, device=device)
        """Taps write a one where a steered row of the request with that board record would have
        been too large. Lies in memory that front-ends read."""
        self.step_rows = ring_rows
        """Ring rows that one step may fill."""
        self.tap_rows = np.asarray([1] * n if tap_rows is None else tap_rows, dtype=np.int64)
        """Ring rows of a token at each tap. Where a tap is wider than the ring, each row of the
        ring has a part of the token's row; the last one ends with zeros."""
        self.shares = ((0, hidden),) * n if shares is None else tuple(shares)
        """Per tap, the numbers of a whole row that this rank has: where they begin, and how many
        they are."""
        self.tap_of: dict[int, int] = {}
        """Index by address of a tap's `ctl` tensor."""
        self.steering = [False] * n
        """Per tap, whether this step steers there."""
        self.capturing = [False] * n
        self.splices: dict[int, list[Work]] = {}
        """By tap, autoencoders that this step puts into the stream."""
        self.spliced: set[int] = set()
        self.splice_error: Exception | None = None
        self.is_active = False
        """Whether any tap does anything in this step; the taps' only question in a step that asks
        for nothing."""

    def new_ctl(self, tap: int) -> torch.Tensor:
        """Make the identity token of a tap."""
        ctl = torch.full((1,), tap, dtype=torch.int32, device=self.ring.device)
        self.tap_of[ctl.data_ptr()] = tap
        return ctl

    def splice(self, work: dict[int, list[Work]]) -> None:
        """Have the next forward pass put autoencoders into the stream, by tap."""
        self.splices, self.spliced, self.splice_error = work, set(), None

    @property
    def flags(self) -> torch.Tensor:
        """(taps,) int32; what each tap does in this step."""
        return self.header[HEAD : HEAD + len(self.taps)]

    @property
    def tokens(self) -> torch.Tensor:
        """(tokens, 5) int32; what each token gets, see `StepPlan.tokens`."""
        return self.header[HEAD + len(self.taps) :].view(-1, 5)

    @property
    def row_starts(self) -> NDArray[np.int64]:
        """(taps,); of a token's rows at all taps, the first one of each tap."""
        return np.cumsum(self.tap_rows) - self.tap_rows

    @property
    def row_taps(self) -> list[TapPoint]:
        """The tap of each of a token's rows at all taps."""
        return [tap for tap, n in zip(self.taps, self.tap_rows, strict=True) for _ in range(n)]

    @property
    def kept_rows(self) -> NDArray[np.int64]:
        """(taps + remote taps,); ring rows of a token of each tap, those of other stages last."""
        return np.append(self.tap_rows, np.ones(len(self.remote), dtype=np.int64))

    @property
    def part_rows(self) -> int:
        """Ring rows of a part."""
        return self.ring.shape[0] // self.parts

    @property
    def nbytes(self) -> int:
        tensors = (self.header, self.base, self.ring, self.sums, self.latest, self.scratch)
        return self.bank.nbytes + sum(t.numel() * t.element_size() for t in tensors)


_owners: Final[dict[int, tuple[ReferenceType[TapState], int]]] = {}
"""By address of a control tensor. The worker keeps its state: an engine that was dropped is not
kept alive here."""


def install(state: TapState) -> None:
    """Make the taps whose control tensors are `state`'s find it. Engines may share a process."""
    for address, tap in state.tap_of.items():
        _owners[address] = (ref(state), tap)


def uninstall(state: TapState) -> None:
    """Forget `state`: taps that are still run do nothing."""
    for address in [a for a, (owner, _) in _owners.items() if owner() in (None, state)]:
        del _owners[address]


def find(ctl: torch.Tensor) -> tuple[TapState, int] | None:
    """The state of a tap and its index there; None where no worker in this process has taps."""
    found = _owners.get(ctl.data_ptr())
    state = None if found is None else found[0]()
    if found is not None and state is not None:
        return state, found[1]
    if any(owner() is not None for owner, _ in _owners.values()):
        raise LensError(
            "a tap ran with a control tensor that no worker of this process made: the model's "
            "buffers were moved or copied after loading; restart the engine"
        )
    return None


_EVENT: Any = torch.cuda.Event  # its constructor has no types

STEER, CAPTURE = 1, 2
"""Bits of a tap's flag."""


class Maps:
    """Fills the maps before a step, straight into the buffers: on a CPU nothing runs meanwhile."""

    def __init__(self, state: TapState) -> None:
        self._state = state
        self._header = state.header.numpy()
        self._base = state.base.numpy()

    def write(self, plan: StepPlan, first_row: int) -> None:
        """Make the next forward pass carry the plan out."""
        _fill(self._header, plan, first_row)
        self._base[: len(plan.base)] = plan.base
        _tell_host(self._state, plan)

    def repeat(self, first_row: int, done: int = 0) -> None:
        """Make the next forward pass carry out the plan that was written last."""
        self._header[1], self._header[2] = first_row, done

    def clear(self) -> None:
        """Make the following forward passes do nothing."""
        _forget(self._state)
        self._header[: HEAD + len(self._state.taps)] = 0


class CudaMaps(Maps):
    """Writes through rotating pinned staging on the stream that runs the model.

    The CPU prepares the next step while the GPU still runs the last one, so a staging buffer
    may be written again only once its copy has been made.
    """

    DEPTH = 4
    """Steps that may be in flight; asynchronous scheduling has two, a pipeline a few more."""

    def __init__(self, state: TapState) -> None:
        self._state = state
        pinned = torch.zeros(self.DEPTH, *state.header.shape, dtype=torch.int32).pin_memory()
        bases = torch.zeros(self.DEPTH, *state.base.shape, dtype=torch.int32).pin_memory()
        # Unpacked once: indexing a tensor costs microseconds in every step.
        self._headers = [(t, t.numpy()) for t in pinned]
        self._bases = [(t, t.numpy()) for t in bases]
        self._copied = [_EVENT() for _ in range(self.DEPTH)]
        self._turn = 0
        self._flags, self._origin = state.flags, state.header[1:2]
        self._elapsed = state.header[2:3]
        self._at = 0
        """What stands in `_origin`."""
        self._done = 0
        """What stands in `_elapsed`."""

    def write(self, plan: StepPlan, first_row: int) -> None:
        i = self._turn
        self._turn = (i + 1) % self.DEPTH
        self._copied[i].synchronize()
        header, header_np = self._headers[i]
        used = _fill(header_np, plan, first_row)
        self._state.header[:used].copy_(header[:used], non_blocking=True)
        if n := len(plan.base):
            base, base_np = self._bases[i]
            base_np[:n] = plan.base
            self._state.base[:n].copy_(base[:n], non_blocking=True)
        self._copied[i].record()
        self._at, self._done = first_row, 0
        _tell_host(self._state, plan)

    def repeat(self, first_row: int, done: int = 0) -> None:
        # A number for the GPU, and nothing at all where rows are not kept.
        if first_row != self._at:
            # The value travels with the launch: there is no buffer to keep.
            self._origin.fill_(first_row)
            self._at = first_row
        if done != self._done:
            self._elapsed.fill_(done)
            self._done = done

    def clear(self) -> None:
        # The flags gate everything else, which may keep old numbers.
        _forget(self._state)
        self._flags.zero_()


def _fill(header: np.ndarray[Any, Any], plan: StepPlan, first_row: int) -> int:
    """Write a plan as the taps read it; returns how many numbers of the header were written."""
    n, taps = len(plan.tokens), len(plan.steers)
    header[0], header[1], header[2] = n, first_row, 0
    header[HEAD : HEAD + taps] = plan.steers * STEER + plan.captures * CAPTURE
    used = HEAD + taps + 5 * n
    header[HEAD + taps : used] = plan.tokens.reshape(-1)
    return used


def _tell_host(state: TapState, plan: StepPlan) -> None:
    state.steering = plan.steers.tolist()
    state.capturing = plan.captures.tolist()
    state.is_active = True


def _forget(state: TapState) -> None:
    state.is_active = False
    state.splice({})
    state.steering = state.capturing = [False] * len(state.taps)


def maps_for(state: TapState) -> Maps:
    """The writer for the device that a state lives on."""
    return CudaMaps(state) if state.ring.is_cuda else Maps(state)
