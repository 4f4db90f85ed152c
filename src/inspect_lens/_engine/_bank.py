"""The table of steering rows: which vector lies where, shared by content, counted by use.

A row is a float32 vector that is added as it is, or scaled to the norm of the stream first.
The vectors of one request that meet at one token are summed here, when the request arrives,
so that a tap never has to apply more than one row of each kind: a row may name a second one
(`link`), and that one never links on. Row 0 means "nothing".
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from inspect_lens.errors import CapacityError
from inspect_lens.spec import TapPoint, tap_order

from ._envelope import Envelope, SteerEnvelope
from ._plan import SteerRule

__all__ = ["Bank", "BankTensors"]

Row = NDArray[np.float32]


@dataclass(frozen=True)
class BankTensors:
    """The device side of the bank.

    Attributes:
        vectors: (rows, hidden) float32.
        norm: (rows,) int32; 1 where the row is scaled by the norm of the stream.
        link: (rows,) int32; a second row for the same token, or 0.
    """

    vectors: torch.Tensor
    norm: torch.Tensor
    link: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, hidden: int, device: torch.device) -> BankTensors:
        """Allocate a zeroed bank of `rows` vectors."""
        return cls(
            torch.zeros(rows, hidden, dtype=torch.float32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class _Vectors:
    """One spec, widened to float32 once, with its positions indexed."""

    spec: SteerEnvelope
    values: NDArray[np.float32]
    index: dict[int, int]

    @classmethod
    def load(cls, spec: SteerEnvelope) -> _Vectors:
        index = {p: i for i, p in enumerate(spec.positions or ())}
        return cls(spec, spec.vectors.to_float32(), index)

    def row_at(self, position: int | None) -> int | None:
        """Which of the vectors a token gets: an index, -1 for the shared one, None for none."""
        if self.spec.positions is None:
            return -1
        i = None if position is None else self.index.get(position)
        return -1 if i is not None and self.values.ndim == 2 else i

    def at(self, tap: TapPoint, position: int | None) -> Row | None:
        """The vector for a token; `position` None asks for tokens that nothing names."""
        rows = cast("Row", self.values[self.spec.taps.index(tap)])
        if self.spec.positions is None:
            return rows
        i = None if position is None else self.index.get(position)
        if i is None:
            return None
        return rows if rows.ndim == 1 else cast("Row", rows[i])


class Bank:
    """Host side of the bank: allocation, sharing by content, and reference counts."""

    def __init__(self, tensors: BankTensors) -> None:
        self._tensors = tensors
        self._free = list(range(tensors.vectors.shape[0] - 1, 0, -1))
        self._by_content: dict[tuple[bytes, int, int], int] = {}
        self._content: dict[int, tuple[bytes, int, int]] = {}
        self._uses: dict[int, int] = {}

    @property
    def rows_in_use(self) -> int:
        """Rows that some request holds."""
        return len(self._uses)

    def admit(
        self, envelope: Envelope, site_of: Mapping[TapPoint, int]
    ) -> tuple[SteerRule, list[int]]:
        """Place the vectors of one request.

        Args:
            envelope: the request.
            site_of: index of each tap of this worker; on a pipeline other stages have the rest.

        Returns:
            The rule for the plan, and the rows to give back with `release`.

        Raises:
            CapacityError: the table is full; nothing was taken.
        """
        held: list[int] = []
        placed: dict[tuple[object, ...], int] = {}
        vectors = [_Vectors.load(s) for s in envelope.steer]
        sites: list[int] = []
        every: list[int] = []
        named: list[tuple[NDArray[np.int64], NDArray[np.int32]] | None] = []
        try:
            named_taps = {tap for v in vectors for tap in v.spec.taps}
            for tap in sorted(named_taps & site_of.keys(), key=tap_order):
                here = [v for v in vectors if tap in v.spec.taps]
                sites.append(site_of[tap])
                every.append(self._place(here, tap, None, held, placed))
                positions = sorted({p for v in here for p in v.index})
                named.append(
                    (
                        np.asarray(positions, dtype=np.int64),
                        np.asarray(
                            [self._place(here, tap, p, held, placed) for p in positions],
                            dtype=np.int32,
                        ),
                    )
                    if positions
                    else None
                )
        except BaseException:
            self.release(held)
            raise
        return SteerRule(tuple(sites), tuple(every), tuple(named), envelope.steer_until), held

    def release(self, rows: list[int]) -> None:
        """Give rows back; a row is free again when its last user has gone."""
        for row in rows:
            self._uses[row] -= 1
            if not self._uses[row]:
                del self._uses[row]
                del self._by_content[self._content.pop(row)]
                self._free.append(row)

    def _place(
        self,
        vectors: list[_Vectors],
        tap: TapPoint,
        position: int | None,
        held: list[int],
        placed: dict[tuple[object, ...], int],
    ) -> int:
        """Row for one token: the sum of what applies there; 0 when nothing does.

        A vector that many positions share is summed and hashed once: the step loop waits.
        """
        what = (tap, *(v.row_at(position) for v in vectors))
        if what not in placed:
            placed[what] = self._sum(vectors, tap, position, held)
        return placed[what]

    def _sum(
        self, vectors: list[_Vectors], tap: TapPoint, position: int | None, held: list[int]
    ) -> int:
        plain: Row | None = None
        matched: Row | None = None
        for v in vectors:
            vector = v.at(tap, position)
            if vector is None:
                continue
            if v.spec.norm_match:
                term = (v.spec.scale / np.linalg.norm(vector.astype(np.float64)) * vector).astype(
                    np.float32
                )
                matched = term if matched is None else matched + term
            else:
                term = np.float32(v.spec.scale) * vector
                plain = term if plain is None else plain + term
        second = 0 if matched is None else self._take(matched, True, 0, held)
        return second if plain is None else self._take(plain, False, second, held)

    def _take(self, vector: Row, norm: bool, link: int, held: list[int]) -> int:
        vector = np.ascontiguousarray(vector, dtype=np.float32)
        content = (hashlib.sha256(vector.tobytes()).digest(), int(norm), link)
        row = self._by_content.get(content)
        if row is None:
            if not self._free:
                total = self._tensors.vectors.shape[0] - 1
                raise CapacityError(
                    f"steer: the steering table is full ({total} rows, all held by running "
                    "requests); try again when some have finished, or raise "
                    "INSPECT_LENS_BANK_BYTES"
                )
            row = self._free.pop()
            self._tensors.vectors[row].copy_(torch.from_numpy(vector))
            self._tensors.norm[row] = int(norm)
            self._tensors.link[row] = link
            self._by_content[content] = row
            self._content[row] = content
        self._uses[row] = self._uses.get(row, 0) + 1
        held.append(row)
        return row
