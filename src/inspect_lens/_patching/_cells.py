"""The edit of one cell, and the runs of a whole sweep, made when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec import SITE_TABLE, Replace, Site, shown

from ._runs import Rows, Run

__all__ = ["CellRuns", "Stored", "check_site", "idle_runs", "patches", "spread", "windows"]


def check_site(site: Site, field: str) -> None:
    """Refuse a site that there is not.

    Args:
        site: that was asked for.
        field: name of the argument, for error messages.

    Raises:
        UnsupportedError: there is no such site.
    """
    if site not in SITE_TABLE:
        allowed = ", ".join(SITE_TABLE)
        raise UnsupportedError(f"{field}={shown(site)}: cannot be patched; that can be {allowed}")


def windows(
    layers: Sequence[int], served: Sequence[int], width: int
) -> tuple[tuple[int, ...], ...]:
    """For each layer those that are patched with it.

    Args:
        layers: to sweep.
        served: layers that there are.
        width: layers of a window, which is cut at the ends.

    Returns:
        Served layers in `[layer - width // 2, layer + ceil(width / 2))`, for each layer.

    Raises:
        SpecError: a width below 1.
    """
    if width < 1:
        raise SpecError(f"window={width}; allowed is 1 or more layers")
    spans = [range(at - width // 2, at + (width + 1) // 2) for at in layers]
    return tuple(tuple(n for n in served if n in span) for span in spans)


class Stored(NamedTuple):
    """Rows to put in, by layer and position of the patched prompt."""

    layers: tuple[int, ...]
    positions: tuple[int, ...]
    values: NDArray[np.float32]
    """(layers, positions, width)."""


def patches(
    stored: Stored, layers: Sequence[int], position: int, site: Site, alpha: float = 1.0
) -> tuple[Replace, ...]:
    """The edit of one cell.

    Args:
        stored: rows to put in.
        layers: that are patched together.
        position: in the patched prompt.
        site: that is written.
        alpha: share of the row.

    Returns:
        One edit.
    """
    at = [stored.layers.index(layer) for layer in layers]
    values = stored.values[at, stored.positions.index(position)][:, None]
    edit = Replace(rows=values, layers=tuple(layers), positions=(position,), site=site, alpha=alpha)
    return (edit,)


class CellRuns(Sequence[Run]):
    """Runs of all cells with the idle ones between them; an edit is made when its run is read.

    Made at once, the edits of a long prompt in a large model would take gigabytes.

    Args:
        ids: of the patched prompt.
        stored: rows to put in.
        near: layers that are patched together, for each layer that is swept.
        site: that is written.
        alpha: share of the row.
        idle: runs that change nothing.
    """

    def __init__(
        self, ids: Sequence[int], stored: Stored, near: Sequence[tuple[int, ...]], site: Site,
        alpha: float, idle: Sequence[Run],
    ) -> None:  # fmt: skip
        self._ids, self._stored, self._near = ids, stored, near
        self._site, self._alpha, self._idle = site, alpha, idle
        self.order = spread(len(near) * len(stored.positions), len(idle))
        """Index of the cell of each run, layers first, or -1, -2, … for idle ones."""

    def __len__(self) -> int:
        return len(self.order)

    @overload
    def __getitem__(self, at: int) -> Run: ...

    @overload
    def __getitem__(self, at: slice) -> list[Run]: ...

    def __getitem__(self, at: int | slice) -> Run | list[Run]:
        if isinstance(at, slice):
            return [self._run(k) for k in self.order[at]]
        return self._run(self.order[at])

    def _run(self, k: int) -> Run:
        if k < 0:
            return self._idle[-1 - k]
        layer, position = divmod(k, len(self._stored.positions))
        where = self._stored.positions[position]
        edits = patches(self._stored, self._near[layer], where, self._site, self._alpha)
        return Run(self._ids, edits)


def idle_runs(
    own: Rows, swept: Sequence[int], ids: Sequence[int], at: tuple[int, ...], site: Site,
    alpha: float, n: int,
) -> list[Run]:  # fmt: skip
    """Runs that change nothing: repeats, and runs patched with their own rows.

    Args:
        own: rows of the prompt that is patched.
        swept: layers of the sweep.
        ids: of the prompt that is patched.
        at: positions of the sweep.
        site: that is written.
        alpha: share of the row.
        n: of each kind.
    """
    made: list[Run] = []
    for k in range(n):
        layer = swept[k * len(swept) // n]
        rows = own.values[own.layers.index(layer), list(at)][None]
        edit = Replace(rows=rows, layers=(layer,), positions=at, site=site, alpha=alpha)
        made += [Run(ids), Run(ids, (edit,))]
    return made


def spread(n_cells: int, n_idle: int) -> list[int]:
    """The order of runs: two idle ones first, and the others evenly between the cells.

    Between them they meet the batches that cells meet; the first two say early what noise there is.

    Args:
        n_cells: cells.
        n_idle: idle runs, 2 or more.

    Returns:
        Indices of cells, with idle runs as -1, -2, ….
    """
    order = [-1, -2]
    left = list(range(2, n_idle))
    for i in range(n_cells):
        while left and (left[0] - 1) * n_cells // (n_idle - 1) <= i:
            order.append(-1 - left.pop(0))
        order.append(i)
    return order + [-1 - k for k in left]
