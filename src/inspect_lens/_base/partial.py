"""What has come of a running request: put on its outputs, in its events, and read from these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import pybase64

from inspect_lens.errors import SpecError
from inspect_lens.spec import GateReceipt, TensorData, decode_tensor, encode_frame, judging

from .http import json_bytes
from .to_torch import Tensors

T = TypeVar("T")

PARTIAL_KEY = "inspect_lens_partial"
"""Of an event of a stream: what has come of each choice, as a list."""


@dataclass(frozen=True)
class Partial:
    """What has come of a running request since its last output, or its last event.

    Parts of one request follow each other without a gap, so put together along the tokens they are
    its whole result.
    """

    scores: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By probe that was asked with `tokens`, scores of further tokens."""
    tensors: Mapping[str, TensorData] = field(default_factory=dict)
    """Rows, queries and keys, and lens tables of further tokens, which are the second axis."""
    positions: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Of each tensor, the positions of its tokens."""
    gates: tuple[GateReceipt, ...] = ()
    """Gates that last and have fired; how long they stay open is told at the end."""
    n_rows: int = 0
    """Captured rows, counted as a receipt counts them; an event does not say it."""
    transport: str = "inline"
    """How an event has its tensors: `binary` where a client fetches them beside it."""

    @property
    def activations(self) -> Tensors:
        """The tensors for torch."""
        return Tensors(self.tensors)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def __bool__(self) -> bool:
        return bool(self.scores or self.tensors or self.gates)

    def copy(self) -> Partial:
        """The same with rows of its own, which keep no others in memory."""
        tensors = {n: TensorData(t.storage.copy(), t.dtype) for n, t in self.tensors.items()}
        return replace(self, tensors=tensors)

    def split(self, most_bytes: int) -> Iterator[Partial]:
        """The same in pieces of about so many bytes at most, along the tokens."""
        n = -(-self.nbytes // most_bytes)
        if n <= 1:
            if self:
                yield self
            return
        for i in range(n):
            tensors: dict[str, TensorData] = {}
            positions: dict[str, Sequence[int]] = {}
            for name, tensor in self.tensors.items():
                first, end = (k * tensor.shape[1] // n for k in (i, i + 1))
                if first < end:
                    tensors[name] = TensorData(tensor.storage[:, first:end], tensor.dtype)
                    positions[name] = self.positions[name][first:end]
            piece = Partial(tensors=tensors, positions=positions)
            if not i:
                piece = replace(piece, scores=self.scores, gates=self.gates, n_rows=self.n_rows)
            if piece:
                yield piece

    def to_json(self, kept: Mapping[str, dict[str, Any]] | None = None) -> list[bytes]:
        """An object of JSON, as it stands in an event, in pieces of which the first is its brace.

        Rows of many streams are hundreds of megabytes in the event loop of all, which joins them
        once, with what stands around them.
        """
        fields: list[tuple[bytes, ...]] = []
        if self.scores:
            scores = {name: list(scores) for name, scores in self.scores.items()}
            fields.append((b'"probes":', json_bytes(scores)))
        if self.tensors:
            entries: list[tuple[bytes, ...]] = []
            for name, tensor in self.tensors.items():
                said = _said(self.positions[name])
                spelled = (
                    _spelled(tensor, said) if kept is None else (json_bytes(kept[name] | said),)
                )
                entries.append((json_bytes(name), b":", *spelled))
            fields.append((b'"activations":{', *listed(entries), b"}"))
        if self.gates:
            gates = [gate.model_dump(mode="json") for gate in self.gates]
            fields.append((b'"gates":', json_bytes(gates)))
        return [b"{", *listed(fields), b"}"]

    @classmethod
    def from_json(
        cls,
        value: Mapping[str, Any],
        fetch: Callable[[str, Mapping[str, Any]], Any] = lambda name, entry: None,
    ) -> Partial:
        """Read what `to_json` made; SpecError where it is something else."""
        tensors: dict[str, TensorData] = {}
        positions: dict[str, Sequence[int]] = {}
        with judging(PARTIAL_KEY):
            for name, entry in (value.get("activations") or {}).items():
                field_name = f"{PARTIAL_KEY}.activations.{name}"
                raw = fetch(name, entry)
                tensors[name] = tensor = decode_tensor(entry, field=field_name, raw=raw)
                positions[name] = _read(entry, tensor, field_name)
            gates = tuple(map(GateReceipt.model_validate, value.get("gates") or ()))
            scores = {
                k: [float(v) for v in some] for k, some in (value.get("probes") or {}).items()
            }
        return cls(scores, tensors, positions, gates)


def listed(items: Iterable[Sequence[T]]) -> Iterator[T | bytes]:
    """Pieces of JSON, with commas between items."""
    for i, item in enumerate(items):
        if i:
            yield b","
        yield from item


def _spelled(tensor: TensorData, said: dict[str, Any]) -> tuple[bytes, ...]:
    """A tensor as JSON, put together by hand: nothing in base64 has to be looked at again."""
    entry, frame = encode_frame(tensor)
    return b'{"data":"', pybase64.b64encode(frame), b'",', json_bytes(entry | said)[1:]


def _said(positions: Sequence[int]) -> dict[str, Any]:
    first = positions[0]
    if positions[-1] - first + 1 == len(positions):
        return {"first_position": first}
    return {"positions": list(positions)}


def _read(entry: Mapping[str, Any], tensor: TensorData, field_name: str) -> Sequence[int]:
    n = tensor.shape[1] if len(tensor.shape) > 1 else 0
    first, listed = entry.get("first_position"), entry.get("positions")
    if isinstance(first, int):
        return range(first, first + n)
    if not isinstance(listed, list) or len(listed) != n:
        raise SpecError(f"{field_name}: comes without the positions of its {n} tokens")
    return tuple(listed)


class Joined:
    """All parts of one choice, as they come."""

    def __init__(self) -> None:
        self.scores: dict[str, list[float]] = {}
        """By probe, of all tokens so far."""
        self._tensors: dict[str, list[TensorData]] = {}

    def add(self, part: Partial) -> None:
        for name, scores in part.scores.items():
            self.scores.setdefault(name, []).extend(scores)
        for name, tensor in part.tensors.items():
            self._tensors.setdefault(name, []).append(tensor)

    def tensors(self) -> dict[str, TensorData]:
        """Each tensor whole: its parts behind one another along the tokens."""
        return {
            name: TensorData(np.concatenate([p.storage for p in parts], axis=1), parts[0].dtype)
            for name, parts in self._tensors.items()
        }
