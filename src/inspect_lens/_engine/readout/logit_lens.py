"""From logits to the few numbers that a logit lens returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from inspect_lens._base.to_torch import to_torch
from inspect_lens._engine.protocol.readouts import LensForm, removed
from inspect_lens._engine.tap.splice import Autoencoder
from inspect_lens.errors import CapacityError, UnsupportedError
from inspect_lens.spec import EngineAutoencoder, EngineLens

LOGIT_BYTES: Final = 512 << 20
"""Of the logits of rows read at once, were they float32. More pieces read the matrix more often."""
_TILE: Final = 128
_PADDING: Final = 64
_PIECE: Final = 256
"""Logits whose largest stands for all of them, at first."""


def rows_at_once(vocab: int) -> int:
    """Rows whose logits are made at once: whole tiles of a GPU's products, where that is many."""
    rows = LOGIT_BYTES // (4 * vocab)
    return rows // _TILE * _TILE or max(1, rows)


def read_logits(logits: torch.Tensor, form: LensForm) -> torch.Tensor:
    peaks, total = _scanned(logits)
    out = torch.empty(len(logits), form.columns, dtype=torch.float32, device=logits.device)
    k, n = form.top_k, len(form.tokens)
    if k:
        values, ids = _largest(logits, peaks, k)
        out[:, :k] = ids
        torch.sub(values, total, out=out[:, k : 2 * k])
    for i, token in enumerate(form.tokens):
        # One token at a time: all of them together would need as many times the memory.
        own = logits[:, token, None]
        out[:, 2 * k + i] = (own.float() - total)[:, 0]
        out[:, 2 * k + n + i] = (logits > own).sum(dim=-1)
    return out


def warm_up_lens(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile what reads logits on a GPU: no running request must wait for that."""
    if device.type == "cuda":
        # vLLM cuts logits out of padded rows; how far apart these lie is part of what is compiled.
        padded = -(-vocab // _PADDING) * _PADDING
        _scanned(torch.zeros(1, padded, dtype=dtype, device=device)[:, :vocab])


def _scanned(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each whole piece of a row, and its `logsumexp`, (rows, 1), in float32."""
    if logits.is_cuda:
        from .kernels.logits_triton import launch

        peaks, totals = launch(logits, _PIECE)
        return peaks, torch.logsumexp(totals, dim=-1, keepdim=True)
    wide, n = logits.float(), logits.shape[1] // _PIECE
    total = torch.logsumexp(wide, dim=-1, keepdim=True)
    pieces = wide[:, : n * _PIECE].reshape(len(wide), n, _PIECE)
    return pieces.amax(dim=-1), total


def _largest(
    logits: torch.Tensor, peaks: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`torch.topk` of long rows, which it would read several times."""
    # The k largest lie in the k pieces with the largest maxima, or in what is left behind the last
    # whole piece. Where these are more than a quarter of the row, it is no saving.
    n_pieces = peaks.shape[1]
    if n_pieces < 4 * k:
        values, ids = torch.topk(logits, k, dim=-1)
        return values.float(), ids
    chosen = torch.topk(peaks, k, dim=-1).indices
    inside = torch.arange(_PIECE, device=logits.device)
    ids = (chosen[:, :, None] * _PIECE + inside).flatten(1)
    rest = torch.arange(n_pieces * _PIECE, logits.shape[1], device=logits.device)
    ids = torch.cat([ids, rest.expand(len(logits), -1)], dim=1)
    values, at = torch.topk(logits.gather(1, ids), k, dim=-1)
    return values.float(), ids.gather(1, at)


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
        self._at = {layer: i for i, layer in enumerate(lens.layers)}
        self._last = lens.n_layers - 1
        self._is_residual = lens.kind == "tuned"
        tensors = {name: to_torch(tensor).to(device) for name, tensor in lens.tensors.items()}
        self._matrix, self._bias = tensors["matrix"], tensors.get("bias")
        self.nbytes = sum(tensor.nbytes for tensor in tensors.values())

    def __call__(self, rows: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
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
    """Lenses and autoencoders that a worker knows, by content hash; they share one bound."""

    def __init__(self, device: torch.device, most_bytes: int = _MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._device = device
        self._known: dict[str, Translator | Autoencoder] = {}
        self.refusals: dict[type, str] = {}
        """By kind of item: why this worker could do nothing with one."""

    @property
    def nbytes(self) -> int:
        """Of tensors on the device that are registered."""
        return sum(one.nbytes for one in self._known.values())

    def add(self, item: EngineLens | EngineAutoencoder) -> None:
        """Make a lens or an autoencoder known; twice is fine."""
        if (reason := self.refusals.get(type(item))) is not None:
            raise UnsupportedError(f"{item.what}: {reason}")
        entry = item.entry
        if entry.sha256 in self._known:
            return
        if self.nbytes + entry.nbytes > self.most_bytes:
            raise CapacityError(
                f"the {item.what} has {entry.nbytes} bytes, others on the device have "
                f"{self.nbytes}, and allowed are {self.most_bytes}; remove some, store it as "
                "float16, or raise INSPECT_LENS_LENS_BYTES"
            )
        try:
            if isinstance(item, EngineLens):
                self._known[entry.sha256] = Translator(item, self._device)
            else:
                self._known[entry.sha256] = Autoencoder(item, self._device)
        except torch.OutOfMemoryError:
            raise CapacityError(
                f"the device has no {entry.nbytes} bytes for the {item.what}; register it at the "
                "engine's start with INSPECT_LENS_REGISTER, so that vLLM leaves room for it, or "
                "lower gpu_memory_utilization"
            ) from None

    def remove(self, sha256: str) -> None:
        """Forget one of them; running requests keep what they have."""
        self._known.pop(sha256, None)

    def get(self, sha256: str) -> Translator:
        known = self._known.get(sha256)
        if not isinstance(known, Translator):
            raise removed("lens", [sha256[:12]])
        return known

    def autoencoder(self, sha256: str) -> Autoencoder:
        known = self._known.get(sha256)
        if not isinstance(known, Autoencoder):
            raise removed("edits", [sha256[:12]])
        return known
