"""A promise that several surfaces make, and the test that each of them keeps it.

Surfaces are found in the code, not listed, so that a new one fails until somebody has written its
cell. A file of `tests/unit/promises` is one promise:

    PROMISE = Promise("an unknown option is refused", surfaces=options())

    @PROMISE.on("-M", "INSPECT_LENS_*")
    def _(surface: str, request: pytest.FixtureRequest) -> None:
        ...

    test_promise = PROMISE.test()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import pytest

__all__ = ["Promise"]

Cell: TypeAlias = Callable[[str, pytest.FixtureRequest], None]


class Promise:
    """One promise, its surfaces, and a test for each."""

    def __init__(self, text: str, *, surfaces: Iterable[str]) -> None:
        """Name the promise in the words of its users, and find who makes it."""
        self.text = text
        self.surfaces = frozenset(surfaces)
        self.cells: dict[str, Cell] = {}

    def on(self, *surfaces: str) -> Callable[[Cell], Cell]:
        """Register a function as the test of these surfaces."""

        def register(cell: Cell) -> Cell:
            for surface in surfaces:
                assert surface in self.surfaces, f"{self.text}: {surface} makes it no longer"
                assert surface not in self.cells, f"{self.text}: {surface} has a test"
                self.cells[surface] = cell
            return cell

        return register

    def test(self) -> Callable[..., None]:
        """The test of the whole row, one case a surface."""
        assert self.surfaces, f"{self.text}: no surface was found"

        @pytest.mark.parametrize("surface", sorted(self.surfaces))
        def test_promise(surface: str, request: pytest.FixtureRequest) -> None:
            assert surface in self.cells, f"{self.text}: nothing tests it on {surface}"
            self.cells[surface](surface, request)

        return test_promise
