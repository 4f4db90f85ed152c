"""Parts of a row that an edit may be held to: heads, neurons, experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import SpecError
from inspect_lens.spec.asks._positions import Positions, TokenMatch
from inspect_lens.spec.engine._facts import SITE_TABLE, Site, SiteWidth

from ._instruction import Instruction, Kind, Row

__all__ = [
    "Chosen",
    "chosen_numbers",
    "sampled_match",
    "token_gate",
    "token_gate_key",
]

Choice = Literal["heads", "neurons", "experts"]
CHOICES: tuple[Choice, ...] = ("heads", "neurons", "experts")
"""Fields of an edit, of which one may be given."""


class Chosen(NamedTuple):
    """The numbers of a row that an edit acts on, as if they were the whole row."""

    numbers: NDArray[np.int64]
    """Ascending within each part, in the order in which the parts were named."""
    width: int
    """Of the row."""

    def widen(self, program: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
        """Let a program that was written for the chosen numbers act on whole rows.

        Args:
            program: its directions are as wide as there are chosen numbers.

        Returns:
            The same edit of these numbers, which leaves the others alone.
        """
        return tuple(self._widen(one) for one in program)

    def _widen(self, one: Instruction) -> Instruction:
        kind, read = one.kind, one.read
        if kind == Kind.BLEND:
            kind, read = Kind.PART, np.ones(len(self.numbers), dtype=np.float32)
        return Instruction(
            kind, self._row(read), self._row(one.write), one.params, one.sees_edits, one.gate
        )

    def _row(self, values: Row | None) -> Row | None:
        if values is None:
            return None
        row = np.zeros(self.width, dtype=np.float32)
        row[self.numbers] = values
        return row


def choice_sites(choice: Choice) -> tuple[Site, ...]:
    """Sites whose rows have such parts."""
    return tuple(site for site, info in SITE_TABLE.items() if info.choice == choice)


def chosen_numbers(
    choice: Mapping[Choice, tuple[int, ...]], width: SiteWidth, field: str
) -> Chosen | None:
    """Find the numbers that an edit acts on."""
    for name, parts in choice.items():
        n = width.heads if name == "heads" else width.width
        what = f"key {name}" if width.site in ("k", "v") else name
        wrong = [part for part in parts if not 0 <= part < n]
        if wrong:
            raise SpecError(
                f"{field}.{name}: {wrong[0]}; {width.site} of this model has {n} {what}, numbered "
                f"0 to {n - 1}"
            )
        size = width.width // n
        numbers = np.asarray(parts, dtype=np.int64)[:, None] * size + np.arange(size)
        return Chosen(numbers.reshape(-1), width.width)
    return None


_END: Final = 1 << 24
"""Ids are below: float32 holds these numbers, and no others, exactly."""


def sampled_match(positions: Positions) -> TokenMatch | None:
    """Find the token match of an edit that acts on sampled tokens."""
    if isinstance(positions, TokenMatch) and positions.among == "completion":
        return positions
    return None


def check_token_ids(match: TokenMatch, width: SiteWidth, vocab: int, field: str) -> None:
    """Refuse ids that the model does not have, or more than a row has room for."""
    ids, room = _ids(match), width.width // width.shards
    end = vocab or _END - 1
    wrong = [one for one in ids if not 0 <= one < end]
    if wrong:
        raise SpecError(
            f"{field}.positions.token_ids: {wrong[0]}; the model has tokens 0 to {end - 1}"
        )
    if len(ids) > room:
        raise SpecError(
            f"{field}.positions.token_ids: {len(ids)} ids; {room} at most at {width.site}, which "
            "has as many numbers on a rank"
        )


def token_gate_key(match: TokenMatch) -> tuple[object, ...]:
    """Key that is equal for edits that can share one gate."""
    return frozenset(match.token_ids or ()), match.exclude


def token_gate(match: TokenMatch, width: SiteWidth, register: int) -> Instruction:
    """Make the gate that opens for tokens with one of some ids.

    It needs nothing but the token, so each tap of an edit has one of its own, and so has each
    stage of a pipeline. Ranks that share a row each have all ids in their part of it.
    """
    ids = _ids(match)
    row = np.zeros((width.shards, width.width // width.shards), dtype=np.float32)
    row[:, : len(ids)] = np.asarray(ids) + 1
    whole = np.zeros(width.width, dtype=np.float32)
    whole[: row.size] = row.reshape(-1)
    params = (float(match.exclude), 0.0, 0.0, 0.0)
    return Instruction(Kind.TOKEN_GATE, whole, None, params, True, register)


def _ids(match: TokenMatch) -> list[int]:
    return sorted(set(match.token_ids or ()))
