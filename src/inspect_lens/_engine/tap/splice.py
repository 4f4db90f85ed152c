"""Autoencoders on the device, and what a tap does to put what they make of rows in their place.

Thousands of latents are dense products of all rows of a step that ask, and not a chain of
instructions of one token. They run beside the kernel of the tap: it ends each chain where an
autoencoder comes, and runs the rest of it afterwards, out of a second table. A replayed graph
launches what was captured and nothing else, so steps that splice replay none (`RequestStepper`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import linear

from inspect_lens._base.to_torch import to_torch
from inspect_lens.spec import (
    N_REGISTERS,
    SAME_TOKEN,
    SPLICE_MODES,
    EngineAutoencoder,
    Instruction,
    SpliceMode,
)

from .gates import factors
from .memory import uploaded

if TYPE_CHECKING:
    from .edit_table import BankTensors, Chain

_ACTIVATIONS: Final = 1 << 24
"""Activations, in float32, that are made at once, so that a step's memory is bounded."""


class Autoencoder:
    """One autoencoder on one device; see `EngineAutoencoder` for what it computes."""

    def __init__(self, item: EngineAutoencoder, device: torch.device) -> None:
        tensors = {name: to_torch(tensor).to(device) for name, tensor in item.tensors.items()}
        self.encoder, self.decoder = tensors["encoder"], tensors["decoder"]
        self.bias, self.decoder_bias = tensors["bias"].float(), tensors["decoder_bias"].float()
        threshold = tensors.get("threshold")
        self.threshold = None if threshold is None else threshold.float().clamp(min=0)
        self.top_k = item.top_k
        self.nbytes = sum(tensor.nbytes for tensor in tensors.values())
        """Of the tensors on the device."""

    @property
    def rows_at_once(self) -> int:
        """Rows whose activations are made at once."""
        return max(1, _ACTIVATIONS // len(self.encoder))

    def activations(self, rows: torch.Tensor, latents: torch.Tensor | None = None) -> torch.Tensor:
        """(rows, latents) float32; of some of the latents, unless they compete for `top_k`."""
        encoder, bias, threshold = self.encoder, self.bias, self.threshold
        if latents is not None:
            encoder, bias = encoder[latents], bias[latents]
            threshold = None if threshold is None else threshold[latents]
        found = linear(rows.to(encoder.dtype), encoder).float() + bias
        counts = found > (0.0 if threshold is None else threshold)
        if self.top_k:
            last = torch.topk(found, self.top_k, dim=-1).values[:, -1:]
            # Of those that tie for the last places, the first ones.
            left = self.top_k - (found > last).sum(-1, keepdim=True)
            ties = (found == last).cumsum(-1, dtype=torch.int32)
            counts &= (found > last) | ((found == last) & (ties <= left))
        return torch.where(counts, found, torch.zeros_like(found))

    def written(
        self, activations: torch.Tensor, latents: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(rows, width) float32; what activations of latents write, the bias aside."""
        decoder = self.decoder if latents is None else self.decoder[latents]
        return (activations.to(decoder.dtype) @ decoder).float()


@dataclass(frozen=True, eq=False)
class Splice:
    """One autoencoder with the changes of one edit."""

    autoencoder: Autoencoder
    latents: torch.Tensor
    """(changed,) int64."""
    values: torch.Tensor
    """(changed,) float32."""
    mode: SpliceMode
    adds_error: bool
    only_if_active: bool
    gate: int
    """Register that the edit is multiplied with, or -1."""

    @classmethod
    def of(cls, one: Instruction, autoencoder: Autoencoder) -> Splice:
        """What an instruction says, on the device of the autoencoder."""
        changed = [np.zeros(0) if row is None else row for row in (one.read, one.write)]
        rows = np.stack(changed).astype(np.float32)
        latents, values = uploaded(rows, autoencoder.encoder.device)
        mode, *flags = one.params
        adds_error, only_if_active, _ = map(bool, flags)
        return cls(
            autoencoder,
            latents.long(),
            values,
            SPLICE_MODES[int(mode)],
            adds_error,
            only_if_active,
            one.gate,
        )

    def step(self, stream: torch.Tensor) -> torch.Tensor:
        """(rows, width) float32; what is added to rows, gates aside; NaN to what it cannot read."""
        read = stream.to(self.autoencoder.encoder.dtype)
        # An infinity in float16 turns latents off, whose sums then look like those of other rows.
        fits = read.isfinite().all(dim=-1, keepdim=True)
        return torch.where(fits, self._step(stream), torch.nan)

    def _step(self, stream: torch.Tensor) -> torch.Tensor:
        own = self.autoencoder
        if self.adds_error:
            # The rest of what it makes of the rows, and the error term, add up to the rows.
            if own.top_k:
                before = own.activations(stream)[:, self.latents]
            else:
                before = own.activations(stream, self.latents)
            return own.written(self._changed(before) - before, self.latents)
        found = own.activations(stream)
        if len(self.latents):
            found[:, self.latents] = self._changed(found[:, self.latents])
        return own.written(found) + own.decoder_bias - stream

    def _changed(self, before: torch.Tensor) -> torch.Tensor:
        values = self.values.expand_as(before)
        match self.mode:
            case "set":
                after = values
            case "add":
                after = before + values
            case "scale":
                after = before * values
            case "at_least":
                after = torch.maximum(before, values)
            case "at_most":
                after = torch.minimum(before, values)
        return torch.where(before > 0, after, before) if self.only_if_active else after


class Work(NamedTuple):
    """What one autoencoder does at one tap in a step."""

    splice: Splice
    rows: torch.Tensor
    """(rows,) int64, on the device; tokens of the step."""


class Splices:
    """Which configurations of the edit table splice an autoencoder in, and at which taps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._at: dict[int, dict[int, Splice]] = {}
        self._known: WeakValueDictionary[Any, Splice] = WeakValueDictionary()
        """By content, so that rows of several requests go through one product."""
        self.find: Callable[[str], Autoencoder]
        """Gives an autoencoder by its hash; set by whoever keeps them."""

    def add(self, config: int, chains: Mapping[int, Chain]) -> None:
        """Note what a configuration splices in, by tap."""
        self._at[config] = {tap: self._splice(chain) for tap, chain in chains.items()}

    def _splice(self, chain: Chain) -> Splice:
        assert chain.splice is not None
        known = self._known.get(chain.content)
        if known is None:
            autoencoder = self.find(chain.splice.content)
            known = self._known[chain.content] = Splice.of(chain.splice, autoencoder)
        return known

    def drop(self, config: int) -> None:
        self._at.pop(config, None)

    def work(self, configs: NDArray[np.int32]) -> dict[int, list[Work]]:
        """What a step has to do beside the kernels, by tap; for configurations of its tokens."""
        if not self._at:
            return {}
        parts: dict[tuple[int, Splice], list[NDArray[np.int64]]] = {}
        for config in np.unique(configs).tolist():
            if splices := self._at.get(config):
                index = np.flatnonzero(configs == config)
                for at in splices.items():
                    parts.setdefault(at, []).append(index)
        if not parts:
            return {}
        sizes = [sum(map(len, some)) for some in parts.values()]
        every = np.concatenate([index for some in parts.values() for index in some])
        split = torch.split(uploaded(every, self._device), sizes)
        work: dict[int, list[Work]] = {}
        for (tap, splice), rows in zip(parts, split, strict=True):
            work.setdefault(tap, []).append(Work(splice, rows))
        return work


def splice_rows(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    work: Work,
    bank: BankTensors,
    owners: torch.Tensor,
    elapsed: torch.Tensor,
    note: Callable[[torch.Tensor, torch.Tensor], None],
    largest: float,
) -> None:
    """Put what an autoencoder makes of the stream of some tokens in its place; waits for no device.

    Sums are taken in float32 and rounded once. A row whose norm would be above `largest`, or not
    finite, is not written. `note` gets the records of all, and which of their rows are fine.
    """
    for index in torch.split(work.rows, work.splice.autoencoder.rows_at_once):
        mine = hidden[index].float()
        other = 0.0 if residual is None else residual[index].float()
        records, positions = owners[index, 0].long(), owners[index, 1].long() + elapsed
        step = work.splice.step(mine + other)
        gate = _gate(work.splice.gate, bank, index, records, positions)
        if gate is not None:
            # Where a gate is shut, a row that the autoencoder cannot read stays as it is.
            step = torch.where(gate[:, None] != 0, step * gate[:, None], torch.zeros_like(step))
        edited = (mine + step).to(hidden.dtype)
        is_fine = (edited.float() + other).square().sum(dim=-1) <= largest**2
        hidden[index] = torch.where(is_fine[:, None], edited, hidden[index])
        note(records, is_fine)


def _gate(
    register: int,
    bank: BankTensors,
    index: torch.Tensor,
    records: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor | None:
    """(rows,) float32; what the edit of each token is multiplied with, None for 1."""
    if register < 0:
        return None
    if register < N_REGISTERS:
        return bank.registers[index, register]
    registers = torch.full_like(records, register)
    if register < SAME_TOKEN:
        return bank.latches.is_behind(records, registers, positions).float()
    return factors(bank.vectors, bank.latches, records, registers, positions)
