"""Probes on captured rows, before they leave the device: numbers per token instead of rows."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Final
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec import EngineProbe, TapPoint

__all__ = ["READOUT_BYTES", "ProbeStore", "Readout"]

READOUT_BYTES: Final = 128 << 20
"""Of rows that are widened to float32 at once, and of what is made of them."""

_LEAST: Final = 64
"""Tokens that are read at once, however many bytes that is."""

_KEPT_BYTES: Final = 64 << 20
"""Of weights that stay on the device for the next request that names the same probes."""

_ALIGN: Final = 64
"""Numbers: 256 bytes."""

_Key = tuple[tuple[str, ...], tuple[TapPoint, ...]]
"""Probes and taps of a readout."""

_VIEWS = 8
"""Sizes for which views of the scratch memory are kept."""

_SLICES = 32
"""Slices of a row that are multiplied at the same time on a GPU. A few tokens times a few columns
are one small tile of output, which one multiprocessor would sum over the whole width."""


class Readout:
    """Applies some probes to blocks of rows.

    A number per token and column comes out: the share of these taps in a linear score, or in the
    logits and values of an attention head, or the whole score of an MLP. Shares are added where
    they arrive, so that taps of several pipeline stages need not meet.
    """

    def __init__(
        self,
        probes: Sequence[EngineProbe],
        taps: Sequence[TapPoint],
        device: torch.device,
        *,
        slices: int | None = None,
        scratch: torch.Tensor | None = None,
    ) -> None:
        """Lay the weights out.

        Args:
            probes: in the order of their columns.
            taps: taps of this worker that they read, in tap order.
            device: of the rows.
            slices: of a row, to be multiplied at the same time; by default what suits the device.
            scratch: flat float32 memory for what is needed between rows and numbers; used by one
                readout at a time. Without it that is allocated.

        Raises:
            UnsupportedError: an MLP reads taps of several pipeline stages.
        """
        rank = {tap: i for i, tap in enumerate(taps)}
        hidden = probes[0].hidden
        self.columns = sum(probe.columns for probe in probes)
        weight = np.zeros((len(taps), self.columns, hidden), dtype=np.float32)
        self._mlps: list[
            tuple[int, list[int], torch.Tensor, torch.Tensor, torch.Tensor, float]
        ] = []
        self.nbytes = weight.nbytes
        """Of the weights on the device."""

        def on_device(name: str, probe: EngineProbe) -> torch.Tensor:
            values = probe.tensors[name].to_float32()
            self.nbytes += values.nbytes
            return _uploaded(values.copy(), device)

        column = 0
        for probe in probes:
            own = [tap for tap in probe.taps if tap in rank]
            if probe.kind == "linear":
                values = probe.tensors["weight"].to_float32()
                for tap, row in zip(probe.taps, values, strict=True):
                    if tap in rank:
                        weight[rank[tap], column] = row
            elif probe.kind == "attention":
                heads = probe.columns // 2
                for tap in own:
                    query, value = (probe.tensors[n].to_float32() for n in ("query", "value"))
                    weight[rank[tap], column : column + heads] = query
                    weight[rank[tap], column + heads : column + 2 * heads] = value
            elif own:
                if len(own) != len(probe.taps):
                    raise UnsupportedError(
                        f"probe: an MLP over layers {probe.layers} needs them all on one pipeline "
                        "stage"
                    )
                k = probe.tensors["w2"].shape[0]
                b1 = (
                    on_device("b1", probe)
                    if "b1" in probe.tensors
                    else torch.zeros(k, device=device)
                )
                self._mlps.append(
                    (
                        column,
                        [rank[tap] for tap in own],
                        on_device("w1", probe),
                        b1,
                        on_device("w2", probe),
                        probe.bias("b2"),
                    )
                )
            column += probe.columns
        self._slices = slices or (math.gcd(hidden, _SLICES) if device.type == "cuda" else 1)
        self._weight = (
            _uploaded(weight, device)
            .view(len(taps), self.columns, self._slices, hidden // self._slices)
            .permute(0, 2, 3, 1)
            .contiguous()
            .flatten(0, 1)
        )
        self._scratch = scratch
        self._views: dict[
            tuple[int, int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]
        ] = {}
        """Of the scratch memory, by taps, steps and tokens."""
        units = max((hidden + 2 * len(b1) for _, _, _, b1, _, _ in self._mlps), default=0)
        per_token = 4 * (len(taps) * (hidden + self._slices * self.columns) + units)
        self.chunk = max(_LEAST, READOUT_BYTES // per_token)
        """Tokens that are read at once."""

    def __call__(self, rows: torch.Tensor, ranks: Sequence[int] | None = None) -> torch.Tensor:
        """Apply the probes.

        Args:
            rows: (taps, tokens, hidden), or (taps, steps, tokens, hidden) of some steps.
            ranks: of its taps those that are read, ascending; by default all.

        Returns:
            (1, tokens, columns) float32, those of a step behind those of the one before.
        """
        rows = rows if rows.dim() == 4 else rows[:, None]
        ranks = range(rows.shape[0]) if ranks is None else ranks
        runs = _runs(tuple(ranks))
        _, steps, n, _ = rows.shape
        out = torch.empty(1, steps * n, self.columns, dtype=torch.float32, device=rows.device)
        # As many whole steps at once as there is room for, in equal shares, or a part of one.
        size = min(n, self.chunk)
        shares = -(-steps // max(1, self.chunk // max(n, 1)))
        at_once = -(-steps // shares)
        for step in range(0, steps, at_once):
            for a in range(0, n, max(size, 1)):
                part = rows[:, step : step + at_once, a : a + size]
                k, m = part.shape[1:3]
                wide, flat, product = self._between(len(ranks), k, m, rows)
                # Taps that do not lie side by side are put there as they are widened, not before.
                for i, count, first in runs:
                    own = part[first : first + count].view(count, k, m, self._slices, -1)
                    wide[i : i + count].copy_(own.permute(0, 3, 1, 2, 4))
                torch.bmm(flat, self._weight, out=product)
                begin = step * n + a
                into = out[0, begin : begin + k * m]
                torch.sum(product, dim=0, out=into)
                self._add_mlps(part, ranks, into)
        return out

    def _between(
        self, taps: int, steps: int, tokens: int, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Memory for rows in slices, the same with fewer axes, and for products.

        Returns:
            (taps, slices, steps, tokens, width of a slice), (taps * slices, steps * tokens, width
            of a slice) and (taps * slices, steps * tokens, columns).
        """
        if (views := self._views.get((taps, steps, tokens))) is not None:
            return views
        width = like.shape[-1] // self._slices
        count = taps * self._slices * steps * tokens
        # Aligned, for the sake of the multiplication.
        begin = -(-count * width // _ALIGN) * _ALIGN
        size = begin + count * self.columns
        memory, is_kept = self._scratch, True
        if memory is None or memory.numel() < size:
            memory, is_kept = torch.empty(size, dtype=torch.float32, device=like.device), False
        wide = memory[: count * width].view(taps, self._slices, steps, tokens, width)
        product = memory[begin:size].view(taps * self._slices, steps * tokens, self.columns)
        views = wide, wide.view(taps * self._slices, steps * tokens, width), product
        if is_kept:
            # A step is mostly as large as the one before, and each view takes microseconds.
            if len(self._views) >= _VIEWS:
                self._views.clear()
            self._views[taps, steps, tokens] = views
        return views

    def _add_mlps(self, part: torch.Tensor, ranks: Sequence[int], out: torch.Tensor) -> None:
        for column, own, w1, b1, w2, b2 in self._mlps:
            units = b1.expand(len(out), -1)
            for rank, layer in zip(own, w1, strict=True):
                units = torch.addmm(units, part[ranks[rank]].flatten(0, 1).float(), layer.T)
            out[:, column] = torch.relu(units) @ w2 + b2


@lru_cache(maxsize=64)
def _runs(ranks: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """Ranks that lie side by side: index of the first of them, their number, and the first."""
    found, start = [], 0
    for i in range(1, len(ranks) + 1):
        if i == len(ranks) or ranks[i] != ranks[i - 1] + 1:
            found.append((start, i - start, ranks[start]))
            start = i
    return tuple(found)


def _uploaded(values: NDArray[np.float32], device: torch.device) -> torch.Tensor:
    """On a device, without waiting for what it has been given to do."""
    source = torch.from_numpy(values)
    return source.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else source


class ProbeStore:
    """Probes that a worker knows, by content hash, and readouts made of them.

    A readout goes with the last group that uses it; some are kept for the requests to come.
    """

    def __init__(
        self,
        device: torch.device,
        scratch: torch.Tensor | None = None,
        *,
        kept_bytes: int = _KEPT_BYTES,
    ) -> None:
        """Start empty.

        Args:
            device: of the rows.
            scratch: see `Readout`.
            kept_bytes: of weights that are kept though nobody may use them.
        """
        self._device = device
        self._scratch = scratch
        self._probes: dict[str, EngineProbe] = {}
        self._used: WeakValueDictionary[_Key, Readout] = WeakValueDictionary()
        self._kept: OrderedDict[_Key, Readout] = OrderedDict()
        self._kept_bytes = kept_bytes

    def add(self, probe: EngineProbe) -> None:
        """Make a probe known; twice is fine."""
        self._probes[probe.sha256] = probe

    def remove(self, sha256: str) -> None:
        """Forget a probe; running requests keep what they have."""
        self._probes.pop(sha256, None)
        for key in [k for k in self._kept if sha256 in k[0]]:
            del self._kept[key]

    @property
    def nbytes(self) -> int:
        """Of weights on the device, in use or kept."""
        return sum(readout.nbytes for readout in self._used.values())

    def readout(self, names: tuple[str, ...], taps: tuple[TapPoint, ...]) -> Readout:
        """The readout of some probes at some taps of this worker.

        Raises:
            SpecError: a probe is not known here.
            UnsupportedError: an MLP reads taps of several pipeline stages.
        """
        missing = [name for name in names if name not in self._probes]
        if missing:
            raise SpecError(
                f"probes: this worker does not know {', '.join(m[:12] for m in missing)}; "
                "register them with this engine again"
            )
        key = (names, taps)
        made = self._used.get(key)
        if made is None:
            probes = [self._probes[name] for name in names]
            made = Readout(probes, taps, self._device, scratch=self._scratch)
            self._used[key] = made
        self._keep(key, made)
        return made

    def _keep(self, key: _Key, readout: Readout) -> None:
        self._kept[key] = readout
        self._kept.move_to_end(key)
        size = sum(kept.nbytes for kept in self._kept.values())
        while size > self._kept_bytes:
            size -= self._kept.popitem(last=False)[1].nbytes
