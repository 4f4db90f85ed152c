"""What a worker and a front-end have to know of one request's lens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

from inspect_lens.errors import SpecError
from inspect_lens.spec import (
    RESID_POST,
    DType,
    EngineFacts,
    LogitLens,
    ResolvedLens,
    TapPoint,
    resolve_positions,
    tap_points,
)

from .interning import written

__all__ = ["LENS_KEY", "LensEnvelope", "LensForm", "seal_lens"]


LENS_KEY = "lens"
"""Of a packed envelope: hash of the lens that is asked for, empty for the logit lens, None without
one. All ranks read together."""


class LensForm(NamedTuple):
    """What is made of a row; requests that want the same are read together."""

    layers: tuple[int, ...]
    """Whose streams are read, ascending."""
    top_k: int
    tokens: tuple[int, ...]
    """Ids of the chosen tokens."""
    lens: str = ""
    """Hash of the lens that translates rows first; empty where none does."""

    @property
    def columns(self) -> int:
        """Numbers of a row: ids and log-probabilities, then log-probabilities and ranks."""
        return 2 * (self.top_k + len(self.tokens))

    @property
    def taps(self) -> tuple[TapPoint, ...]:
        """Whose rows are read, in tap order."""
        return tap_points((RESID_POST,), self.layers)


@dataclass(frozen=True)
class LensEnvelope:
    """Rows to read."""

    layers: tuple[int, ...]
    top_k: int
    tokens: tuple[int, ...]
    lo: int
    """First position of the range; with `positions`, the smallest of them."""
    hi: int
    """End of the range, exclusive; with `positions`, one past the largest."""
    positions: tuple[int, ...] | None
    """Sorted explicit positions, or None for the whole range."""
    transport: str
    """How the response carries the result; the worker does not care."""
    lens: str = ""
    """Hash of the registered lens that translates rows first; empty for the logit lens."""
    kind: str = "logit"
    """Which lens it is, for the receipt."""
    name: str | None = None
    """Under which it is registered, for the receipt."""

    @property
    def form(self) -> LensForm:
        """What is made of each row."""
        return LensForm(self.layers, self.top_k, self.tokens, self.lens)

    @property
    def taps(self) -> tuple[TapPoint, ...]:
        """The taps that are read, in tap order."""
        return self.form.taps

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of a token, and their width, of what a worker sends."""
        return len(self.layers), self.form.columns

    @property
    def wire(self) -> DType:
        """Type of these numbers; ids and ranks are exact, as vocabularies are below 2^24."""
        return "float32"

    def fed(self, n_fed: int) -> Sequence[int]:
        """Positions read, ascending, of a request that fed `n_fed` tokens to the model."""
        if self.positions is not None:
            return self.positions[: bisect_left(self.positions, n_fed)]
        return range(self.lo, max(self.lo, min(self.hi, n_fed)))

    @cached_property
    def alike(self) -> bytes:
        """What the requests of a batch have in common."""
        return written(tuple(self.form))

    def pack(self) -> tuple[Any, ...]:
        """As msgpack-able data."""
        return tuple([getattr(self, field.name) for field in fields(self)])

    @classmethod
    def unpack(cls, values: Sequence[Any]) -> LensEnvelope:
        """Read what `pack` made, with tuples in the place of lists."""
        return cls(*values)


def seal_lens(
    lens: LogitLens | None, facts: EngineFacts, n_prompt: int, n_max: int
) -> LensEnvelope | None:
    """Resolve a judged lens against its prompt.

    Args:
        lens: what was asked for; texts of tokens have become ids.
        facts: of the engine.
        n_prompt: prompt tokens.
        n_max: tokens that are fed at most.

    Raises:
        SpecError: a position lies outside the request, a mask is not as long as the prompt, or the
            name of the lens has not been looked up.
    """
    if lens is None:
        return None
    where = resolve_positions(
        lens.positions, n_prompt=n_prompt, n_max=n_max, field="lens.positions"
    )
    listed: tuple[int, ...] | None = None
    if isinstance(where, range):
        lo, hi = where.start, max(where.start, where.stop)
    else:
        listed = tuple(sorted(where))
        lo, hi = (listed[0], listed[-1] + 1) if listed else (0, 0)
    entry = lens.entry if isinstance(lens, ResolvedLens) else None
    if entry is None and lens.name is not None:
        raise SpecError(f"lens.name: {lens.name!r} has not been looked up")
    return LensEnvelope(
        layers=tuple(range(facts.n_layers)) if lens.layers == "all" else lens.layers,
        top_k=lens.top_k,
        tokens=lens.ids,
        lo=lo,
        hi=hi,
        positions=listed,
        transport=lens.transport,
        lens="" if entry is None else entry.sha256,
        kind="logit" if entry is None else entry.kind,
        name=lens.name,
    )
