"""Probes on captured rows, before they leave the device: numbers per token instead of rows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final
from weakref import WeakValueDictionary

import numpy as np
import torch

from inspect_lens._engine.protocol.readouts import removed
from inspect_lens._engine.tap.memory import uploaded
from inspect_lens.errors import CapacityError, UnsupportedError
from inspect_lens.spec import EngineProbe, TapPoint

READOUT_BYTES: Final = 32 << 20
"""Of what lies between rows and the numbers that are made of them."""

_LEAST: Final = 64
"""Tokens that are read at once, however many bytes that is."""

_KEPT_BYTES: Final = 64 << 20
"""Of weights that stay on the device for the next request that names the same probes."""

_MOST_BYTES: Final = 1 << 30

_SHARES: Final = 16
"""On a GPU, parts of a row that are multiplied at the same time: see `launch`."""

_Key = tuple[tuple[str, ...], tuple[TapPoint, ...], int]
"""Probes and taps of a readout, and how many of these are borrowed."""

_INDICES = 8
"""Choices of taps whose indices are kept on the device."""


class ProbeReader:
    """Applies some probes to blocks of rows.

    A number per token and column comes out: the share of these taps in a linear score, or in the
    logits and values of an attention head, or the whole score of an MLP. Shares are added where
    they arrive, so that taps of several pipeline stages need not meet. Only an MLP needs all its
    taps in one place: the last of `taps` are `n_borrowed` ones of earlier stages, for MLPs alone,
    and an MLP that has not all of them here is read elsewhere.
    """

    def __init__(
        self,
        probes: Sequence[EngineProbe],
        taps: Sequence[TapPoint],
        device: torch.device,
        *,
        n_borrowed: int = 0,
        scratch: torch.Tensor | None = None,
    ) -> None:
        every = {tap: i for i, tap in enumerate(taps)}
        rank = {tap: i for tap, i in every.items() if i < len(taps) - n_borrowed}
        hidden = probes[0].hidden
        self.columns = sum(probe.columns for probe in probes)
        weight = np.zeros((len(taps), self.columns, hidden), dtype=np.float32)
        self._mlps: list[
            tuple[int, list[int], torch.Tensor, torch.Tensor, torch.Tensor, float]
        ] = []
        self.nbytes = weight.nbytes

        def on_device(name: str, probe: EngineProbe) -> torch.Tensor:
            values = probe.tensors[name].to_float32()
            self.nbytes += values.nbytes
            return uploaded(values.copy(), device)

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
            elif own and all(tap in every for tap in probe.taps):
                k = probe.tensors["w2"].shape[0]
                b1 = (
                    on_device("b1", probe)
                    if "b1" in probe.tensors
                    else torch.zeros(k, device=device)
                )
                self._mlps.append(
                    (
                        column,
                        [every[tap] for tap in probe.taps],
                        on_device("w1", probe),
                        b1,
                        on_device("w2", probe),
                        probe.bias("b2"),
                    )
                )
            column += probe.columns
        self._weight = uploaded(weight, device).transpose(1, 2).contiguous()
        """(taps, hidden, columns)."""
        self._scratch = scratch
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}
        units = max((2 * len(b1) for _, _, _, b1, _, _ in self._mlps), default=0)
        is_gpu = device.type == "cuda"
        per_token = _SHARES * self.columns if is_gpu else 0
        if self._mlps or not is_gpu:
            # These are widened to float32, at one tap at a time.
            per_token = max(per_token, hidden + units)
        self.chunk = max(_LEAST, READOUT_BYTES // (4 * per_token))
        """Tokens that are read at once."""

    def __call__(self, rows: torch.Tensor, ranks: Sequence[int] | None = None) -> torch.Tensor:
        rows = rows if rows.dim() == 4 else rows[:, None]
        ranks = tuple(range(rows.shape[0]) if ranks is None else ranks)
        _, steps, n, _ = rows.shape
        out = torch.empty(1, steps * n, self.columns, dtype=torch.float32, device=rows.device)
        # As many whole steps at once as there is room for, in equal shares, or a part of one.
        size = min(n, self.chunk)
        shares = -(-steps // max(1, self.chunk // max(n, 1)))
        at_once = -(-steps // shares)
        multiply = self._on_gpu if rows.is_cuda else self._on_cpu
        for step in range(0, steps, at_once):
            for a in range(0, n, max(size, 1)):
                part = rows[:, step : step + at_once, a : a + size]
                begin = step * n + a
                into = out[0, begin : begin + part.shape[1] * part.shape[2]]
                multiply(part, ranks, into)
                self._add_mlps(part, ranks, into)
        return out

    def _on_cpu(self, part: torch.Tensor, ranks: tuple[int, ...], out: torch.Tensor) -> None:
        out.zero_()
        for rank, weight in zip(ranks, self._weight, strict=True):
            out.addmm_(part[rank].flatten(0, 1).float(), weight)

    def _on_gpu(self, part: torch.Tensor, ranks: tuple[int, ...], out: torch.Tensor) -> None:
        # Imported here: Triton is not there on a CPU-only machine.
        from .kernels.readout_triton import launch

        size = _SHARES * out.numel()
        memory = self._scratch
        if memory is None or memory.numel() < size:
            memory = torch.empty(size, dtype=torch.float32, device=out.device)
        shares = memory[:size].view(_SHARES, *out.shape)
        launch(part, self._index(ranks, out.device), self._weight, shares)
        torch.sum(shares, dim=0, out=out)

    def _index(self, ranks: tuple[int, ...], device: torch.device) -> torch.Tensor:
        if (known := self._indices.get(ranks)) is None:
            if len(self._indices) >= _INDICES:
                self._indices.clear()
            known = self._indices[ranks] = uploaded(np.asarray(ranks, dtype=np.int64), device)
        return known

    def _add_mlps(self, part: torch.Tensor, ranks: tuple[int, ...], out: torch.Tensor) -> None:
        for column, own, w1, b1, w2, b2 in self._mlps:
            units = b1.expand(len(out), -1)
            for rank, layer in zip(own, w1, strict=True):
                units = torch.addmm(units, part[ranks[rank]].flatten(0, 1).float(), layer.T)
            out[:, column] = torch.relu(units) @ w2 + b2


def warm_up_readout(ring: torch.Tensor, scratch: torch.Tensor) -> None:
    """Compile what reads rows on a GPU: no running request must wait for that."""
    if not scratch.numel():
        return
    from .kernels.readout_triton import WIDE, launch

    for columns in (1, WIDE):
        weight = torch.zeros(1, ring.shape[1], columns, device=ring.device)
        shares = torch.zeros(_SHARES, 1, columns, device=ring.device)
        ranks = torch.zeros(1, dtype=torch.int64, device=ring.device)
        launch(ring[:1][None, None], ranks, weight, shares)


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
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        self.most_bytes = most_bytes
        self._device = device
        self._scratch = scratch
        self._probes: dict[str, EngineProbe] = {}
        self._used: WeakValueDictionary[_Key, ProbeReader] = WeakValueDictionary()
        self._kept: OrderedDict[_Key, ProbeReader] = OrderedDict()
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

    def find(self, names: Sequence[str]) -> list[EngineProbe]:
        missing = [name for name in names if name not in self._probes]
        if missing:
            raise removed("probes", [name[:12] for name in missing])
        return [self._probes[name] for name in names]

    def readout(
        self, names: tuple[str, ...], taps: tuple[TapPoint, ...], n_borrowed: int = 0
    ) -> ProbeReader:
        """The readout of some probes at some taps of this worker; see `ProbeReader`."""
        probes = self.find(names)
        key = (names, taps, n_borrowed)
        made = self._used.get(key)
        if made is None:
            self._make_room(sum(probe.columns for probe in probes), probes, taps)
            made = ProbeReader(
                probes, taps, self._device, n_borrowed=n_borrowed, scratch=self._scratch
            )
            self._used[key] = made
        self._keep(key, made)
        return made

    def _make_room(
        self, columns: int, probes: Sequence[EngineProbe], taps: Sequence[TapPoint]
    ) -> None:
        wide = 4 * len(taps) * columns * probes[0].hidden
        mlps = [probe for probe in probes if probe.kind == "mlp"]
        need = wide + sum(4 * t.storage.size for probe in mlps for t in probe.tensors.values())
        what = f"probes: their weights take {need} bytes on the device"
        if need > self.most_bytes:
            raise UnsupportedError(
                f"{what}; allowed are {self.most_bytes}; name fewer probes in one request, or "
                "raise INSPECT_LENS_PROBE_BYTES"
            )
        while self._kept and self.nbytes + need > self.most_bytes:
            self._kept.popitem(last=False)
        if (others := self.nbytes) + need > self.most_bytes:
            raise CapacityError(
                f"{what}, those of running requests {others}, and allowed are {self.most_bytes}; "
                "try again later, or raise INSPECT_LENS_PROBE_BYTES"
            )

    def _keep(self, key: _Key, readout: ProbeReader) -> None:
        self._kept[key] = readout
        self._kept.move_to_end(key)
        size = sum(kept.nbytes for kept in self._kept.values())
        while size > self._kept_bytes:
            size -= self._kept.popitem(last=False)[1].nbytes
