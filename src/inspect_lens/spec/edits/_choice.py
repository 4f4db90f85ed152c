"""Parts of a row that an edit may be held to: heads, neurons, experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import SpecError
from inspect_lens.spec.engine._sites import SITE_TABLE, Site, SiteWidth

from ._instruction import Instruction, Kind, Row

__all__ = ["CHOICES", "Choice", "Chosen", "choice_sites", "chosen_numbers"]

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
    """Find the numbers that an edit acts on.

    Args:
        choice: the field that was given, if any, and what it names.
        width: of the site in the engine.
        field: path of the edit, for error messages.

    Returns:
        The numbers; None for the whole row.

    Raises:
        SpecError: the model does not have such a part.

    Example:
        ```python
        from inspect_lens.spec import SiteWidth, chosen_numbers

        # Two heads of four numbers each, on one rank.
        width = SiteWidth("z", 8, 1, 2)
        assert chosen_numbers({"heads": (1,)}, width, "edits[0]").numbers.tolist() == [4, 5, 6, 7]
        assert chosen_numbers({}, width, "edits[0]") is None
        ```
    """
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
