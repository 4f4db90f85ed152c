"""Registered lenses on the device: rows of a layer become rows that the unembedding can read.

A worker has the tensors of every registered lens. They are uploaded when a lens is registered, so
no step waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from inspect_lens._torch import to_torch
from inspect_lens.errors import CapacityError, SpecError
from inspect_lens.spec import EngineLens

__all__ = ["LensStore", "Span", "Translator"]

_MOST_BYTES: Final = 1 << 30


class Span(NamedTuple):
    """Consecutive rows of one layer."""

    layer: int
    start: int
    stop: int


class Translator:
    """One lens on one device.

    Row `h` of a layer becomes `h + A h + b` (tuned) or `J h` (jacobian).
    """

    def __init__(self, lens: EngineLens, device: torch.device) -> None:
        """Upload the tensors.

        Args:
            lens: to apply.
            device: of the rows.
        """
        self._at = {layer: i for i, layer in enumerate(lens.layers)}
        self._last = lens.n_layers - 1
        self._is_residual = lens.kind == "tuned"
        tensors = {name: to_torch(tensor).to(device) for name, tensor in lens.tensors.items()}
        self._matrix, self._bias = tensors["matrix"], tensors.get("bias")
        self.nbytes = sum(tensor.nbytes for tensor in tensors.values())
        """Of the tensors on the device."""

    def __call__(self, rows: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        """Translate rows.

        Args:
            rows: (rows, hidden) of any dtype.
            spans: the layer of each row; together they are all rows.

        Returns:
            (rows, hidden) of the same dtype, computed in float32. Rows of the last layer are
            those that came.
        """
        out = torch.empty_like(rows)
        for layer, start, stop in spans:
            part = rows[start:stop]
            if (at := self._at.get(layer)) is None:
                assert layer == self._last
                out[start:stop] = part
                continue
            wide = part.float()
            made = wide @ self._matrix[at].float().T
            if self._is_residual:
                made += wide
            if self._bias is not None:
                made += self._bias[at].float()
            out[start:stop] = made
        return out


class LensStore:
    """Lenses that a worker knows, by content hash."""

    def __init__(self, device: torch.device, most_bytes: int = _MOST_BYTES) -> None:
        """Start empty.

        Args:
            device: of the rows.
            most_bytes: of tensors on the device.
        """
        self.most_bytes = most_bytes
        self._device = device
        self._known: dict[str, Translator] = {}

    @property
    def nbytes(self) -> int:
        """Of tensors on the device that are registered."""
        return sum(translator.nbytes for translator in self._known.values())

    def add(self, lens: EngineLens) -> None:
        """Make a lens known; twice is fine.

        Raises:
            CapacityError: there is no room for it on the device.
        """
        entry = lens.entry
        if entry.sha256 in self._known:
            return
        if self.nbytes + entry.nbytes > self.most_bytes:
            raise CapacityError(
                f"the lens has {entry.nbytes} bytes, others on the device have {self.nbytes}, and "
                f"allowed are {self.most_bytes}; remove some, store it as float16, or raise "
                "INSPECT_LENS_LENS_BYTES"
            )
        try:
            self._known[entry.sha256] = Translator(lens, self._device)
        except torch.OutOfMemoryError:
            raise CapacityError(
                f"the device has no {entry.nbytes} bytes for the lens; register it at the engine's "
                "start with INSPECT_LENS_REGISTER, so that vLLM leaves room for it, or lower "
                "gpu_memory_utilization"
            ) from None

    def remove(self, sha256: str) -> None:
        """Forget a lens; running requests keep what they have."""
        self._known.pop(sha256, None)

    def get(self, sha256: str) -> Translator:
        """A lens.

        Raises:
            SpecError: it is not known here.
        """
        known = self._known.get(sha256)
        if known is None:
            raise SpecError(
                f"lens: this worker does not know {sha256[:12]}; register it with this engine again"
            )
        return known
