"""A row as a few token directions of a lens: which ones, how many, and exchanging one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens._base.arguments import judged_arguments
from inspect_lens.errors import SpecError
from inspect_lens.spec import as_array

__all__ = [
    "CoordinatePatch",
    "Decomposition",
    "Occupancy",
    "coordinate_patch",
    "decompose",
    "estimate_occupancy",
]

Floats: TypeAlias = NDArray[np.float64]

_ACTIVE: Final = float(np.sqrt(np.finfo(np.float64).eps))
"""Share of the row's length that a direction has to contribute to count as active."""
_CORRELATED: Final = float(np.sqrt(np.finfo(np.float32).eps))
"""Correlation with the rest, over the row's length, at which no direction is added any more."""


class Decomposition(NamedTuple):
    """A row as a sum of few directions with positive coordinates."""

    support: tuple[int, ...]
    """Directions with a coordinate that counts, in the order in which they were chosen; indices of
    rows of the dictionary, so token ids where it has one row for each token."""
    coordinates: Floats
    """(support,); factors of the directions as they are, not of unit vectors."""
    selected: tuple[int, ...]
    """Every direction that was chosen, also where its coordinate became 0."""
    reconstruction: Floats
    """(hidden,); the sum."""
    component: Floats
    """(hidden,); projection of the row onto the span of all that were chosen."""
    explained: float
    """Squared length of the component over that of the row, 0 to 1."""


class Occupancy(NamedTuple):
    """How many directions a row holds beyond what random ones would explain."""

    occupancy: int
    """Number of directions at which the row's explained share is furthest above that of the
    controls."""
    explained: Floats
    """(max_atoms,); share of the row's squared length that the first n directions explain."""
    control: Floats
    """(max_atoms,); the same of random directions, averaged over the draws."""
    support: tuple[int, ...]
    """Directions in the order in which they were chosen."""


class CoordinatePatch(NamedTuple):
    """A row in which the coordinate of one direction was given to another."""

    patched: Floats
    """(hidden,); the row with the change."""
    delta: Floats
    """(hidden,); what was added: a vector to steer this position with."""
    decomposition: Decomposition
    before: float
    """Coordinate that the target had; 0 where it was not active."""
    moved: float
    """Coordinate that the source had."""
    cosine: float
    """Between both directions; near 1 a swap hardly changes anything."""


@judged_arguments
def decompose(row: ArrayLike, dictionary: ArrayLike, *, k: int = 25) -> Decomposition:
    """Write a row as a sum of at most k directions with positive coordinates.

    At each step the direction that correlates most with what is left is added, as if all had unit
    length, and all coordinates are solved for again by non-negative least squares (orthogonal
    matching pursuit). It ends early where no direction is left that points the same way.

    Args:
        row: (hidden,); of the residual stream behind a layer.
        dictionary: (directions, hidden); `Lens.token_direction` of the rows of the unembedding at
            that layer, one for each token.
        k: most directions; fewer where the dictionary has fewer.

    Raises:
        SpecError: shapes do not fit, a value is not finite, or a direction is zero.

    Source:
        "Verbalizable Representations Form a Global Workspace in Language Models" (Anthropic 2026).

    Example:
        ```python
        import numpy as np

        from inspect_lens.lens import decompose

        found = decompose([3.0, 0.0, 2.0, -1.0], np.eye(4))
        assert found.support == (0, 2) and found.coordinates.tolist() == [3.0, 2.0]
        ```
    """
    target, atoms, norms, k = _checked(row, dictionary, k, "k")
    least = float(np.linalg.norm(target)) * _CORRELATED
    selected: list[int] = []
    coordinates = np.zeros(0)
    rest = target
    while len(selected) < k:
        best, correlation = _most_correlated(atoms, norms, rest, selected)
        if correlation <= least:
            break
        selected.append(best)
        chosen = _columns(atoms, selected)
        coordinates = _positive_solution(chosen, target)
        rest = target - chosen @ coordinates
    chosen = _columns(atoms, selected)
    active = coordinates * norms[selected] > _ACTIVE * np.linalg.norm(target)
    component = _project(chosen, target)
    return Decomposition(
        support=tuple(one for one, on in zip(selected, active, strict=True) if on),
        coordinates=coordinates[active],
        selected=tuple(selected),
        reconstruction=chosen[:, active] @ coordinates[active],
        component=component,
        explained=_share(component, target),
    )


@judged_arguments
def estimate_occupancy(
    row: ArrayLike,
    dictionary: ArrayLike,
    *,
    max_atoms: int = 25,
    n_controls: int = 32,
    seed: int = 0,
) -> Occupancy:
    """Estimate how many token directions a row holds.

    Directions are chosen one after another, as `decompose` does, but the rest is what is left of
    the row beside the span of all of them, so that coordinates may be negative, and none is left
    out. The same is done with dictionaries of random directions. The occupancy is the number at
    which the row's directions explain most beyond those.

    Args:
        row: (hidden,), not zero.
        dictionary: (directions, hidden).
        max_atoms: directions to choose; fewer where the dictionary has fewer.
        n_controls: random dictionaries of the same size.
        seed: of the controls.

    Raises:
        SpecError: as `decompose`, or the row is zero.

    Source:
        As `decompose`; the controls as in TransformerLens 4.3.

    Example:
        ```python
        import numpy as np

        from inspect_lens.lens import estimate_occupancy

        rng = np.random.default_rng(0)
        directions = rng.standard_normal((200, 32))
        row = directions[[3, 50, 120]].sum(axis=0)  # three of them
        found = estimate_occupancy(row, directions, max_atoms=8, n_controls=4)
        assert found.occupancy == 3 and set(found.support[:3]) == {3, 50, 120}
        ```
    """
    target, atoms, norms, n = _checked(row, dictionary, max_atoms, "max_atoms")
    if n_controls < 1:
        raise SpecError(f"n_controls={n_controls}; allowed is 1 or more")
    if not np.any(target):
        raise SpecError("row: it is zero, so that no direction explains a share of it")
    explained, support = _shares(target, atoms, norms, n)
    rng = np.random.default_rng(seed)
    controls = np.zeros(n)
    for _ in range(n_controls):
        drawn = rng.standard_normal(atoms.shape, dtype=np.float32)
        controls += _shares(target, drawn, np.linalg.norm(drawn, axis=1), n)[0]
    controls /= n_controls
    return Occupancy(int(np.argmax(explained - controls)) + 1, explained, controls, support)


@judged_arguments
def coordinate_patch(
    row: ArrayLike,
    dictionary: ArrayLike,
    source: int,
    target: int,
    *,
    mode: Literal["substitute", "swap"] = "substitute",
    strength: float = 1.0,
    k: int = 25,
) -> CoordinatePatch:
    """Give the coordinate of one token direction to another, and leave all else of a row.

    `substitute` sets the source's coordinate to 0 and the target's to what the source had; `swap`
    exchanges both. What `decompose` did not explain stays as it is. `Add(vector=delta[None],
    layers=(layer,), positions=(position,))` makes the same change in the engine.

    Args:
        row: (hidden,).
        dictionary: (directions, hidden).
        source: index of a direction that is active in the row.
        target: another index.
        mode: `substitute` or `swap`.
        strength: 1 makes the whole change, 0 none.
        k: as for `decompose`.

    Raises:
        SpecError: as `decompose`, or the source is not active; the error lists those that are.

    Source:
        As `decompose`.

    Example:
        ```python
        import numpy as np

        from inspect_lens.lens import coordinate_patch

        patch = coordinate_patch([3.0, 0.0, 2.0, -1.0], np.eye(4), source=0, target=1)
        assert patch.patched.tolist() == [0.0, 3.0, 2.0, -1.0]
        ```
    """
    if not np.isfinite(strength):
        raise SpecError(f"strength={strength}; allowed are finite numbers")
    wide, atoms, norms, k = _checked(row, dictionary, k, "k")
    if source == target or not 0 <= source < len(atoms) or not 0 <= target < len(atoms):
        raise SpecError(
            f"source={source}, target={target}; allowed are two indices from 0 to {len(atoms) - 1}"
        )
    found = decompose(wide, atoms, k=k)
    coordinates = dict(zip(found.support, found.coordinates.tolist(), strict=True))
    if source not in coordinates:
        raise SpecError(
            f"source={source} is not active in this row; active are {sorted(coordinates)}"
        )
    moved, before = coordinates[source], coordinates.get(target, 0.0)
    left = before if mode == "swap" else 0.0
    first, second = (atoms[at].astype(np.float64) for at in (source, target))
    delta = strength * ((left - moved) * first + (moved - before) * second)
    cosine = float(first @ second / (norms[source] * norms[target]))
    return CoordinatePatch(wide + delta, delta, found, before, moved, cosine)


def _checked(
    row: ArrayLike, dictionary: ArrayLike, most: int, name: str
) -> tuple[Floats, NDArray[np.float32], Floats, int]:
    """The row, the directions (float32, for every token), their lengths, and how many to choose."""
    target = as_array(row).astype(np.float64)
    atoms = as_array(dictionary).astype(np.float32, copy=False)
    if target.ndim != 1 or atoms.ndim != 2 or atoms.shape[1] != target.size:
        raise SpecError(
            f"row: shape {target.shape}, dictionary: shape {atoms.shape}; allowed are (hidden,) "
            "and (directions, hidden)"
        )
    if most < 1 or not len(atoms):
        raise SpecError(f"{name}={most} of {len(atoms)} directions; allowed is 1 or more of each")
    norms = np.sqrt(np.einsum("ij,ij->i", atoms, atoms, dtype=np.float64))
    if not np.isfinite(target).all() or not np.isfinite(norms).all():
        raise SpecError("row, dictionary: a value is not finite")
    if not norms.all():
        raise SpecError(
            f"dictionary: direction {int(np.argmin(norms))} is zero; leave out tokens that the "
            "lens maps to zero"
        )
    return target, atoms, norms, min(most, len(atoms))


def _most_correlated(
    atoms: NDArray[np.float32], norms: Floats, rest: Floats, selected: list[int]
) -> tuple[int, float]:
    correlation = (atoms @ rest.astype(np.float32)) / norms
    correlation[selected] = -np.inf
    best = int(np.argmax(correlation))
    return best, float(correlation[best])


def _columns(atoms: NDArray[np.float32], selected: list[int]) -> Floats:
    return atoms[selected].astype(np.float64).T


def _positive_solution(columns: Floats, target: Floats) -> Floats:
    # On use: each front-end and whatever reads a log imports this folder.
    from scipy.optimize import nnls

    lengths = np.linalg.norm(columns, axis=0)
    solve: Callable[..., tuple[Floats, float]] = nnls
    made: Floats = solve(columns / lengths, target)[0] / lengths
    return made


def _project(columns: Floats, target: Floats) -> Floats:
    if not columns.size:
        return np.zeros_like(target)
    units = columns / np.linalg.norm(columns, axis=0)
    projected: Floats = units @ np.linalg.lstsq(units, target, rcond=_ACTIVE)[0]
    return projected


def _share(part: Floats, whole: Floats) -> float:
    total = float(whole @ whole)
    return float(part @ part) / total if total else 0.0


def _shares(
    target: Floats, atoms: NDArray[np.float32], norms: Floats, n: int
) -> tuple[Floats, tuple[int, ...]]:
    """Share of a row that the first directions explain, by their number, and which these are."""
    selected: list[int] = []
    shares = np.zeros(n)
    rest = target
    for i in range(n):
        selected.append(_most_correlated(atoms, norms, rest, selected)[0])
        projected = _project(_columns(atoms, selected), target)
        shares[i] = _share(projected, target)
        rest = target - projected
    return shares, tuple(selected)
