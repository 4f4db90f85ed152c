"""What chance alone would do: labels shuffled, or two probes swapped."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens.errors import SpecError

from ._bootstrap import CELLS, areas_of_counts
from ._groups import group_codes
from ._metrics import auroc, midranks, split_classes

__all__ = ["paired_permutation_test", "permutation_test"]


def permutation_test(
    labels: ArrayLike,
    scores: ArrayLike,
    *,
    groups: Sequence[Hashable] | None = None,
    n_permutations: int = 10_000,
    seed: int = 0,
) -> float:
    """Probability of an AUROC this large if labels meant nothing.

    Args:
        labels: (samples,) 0 and 1, both.
        scores: (samples,) float.
        groups: (samples,) what is independent. Labels are shuffled within groups of both classes
            only, which keeps what groups differ by; where every group has one class, whole groups
            exchange their labels, as samples of one group go together. None shuffles all.
        n_permutations: shuffles.
        seed: of the generator.

    Returns:
        One-sided p, never below 1 / (n_permutations + 1).

    Raises:
        SpecError: shapes disagree, a score is NaN, or a class is missing.

    Source:
        Exchangeability blocks, Winkler et al. 2014, NeuroImage 92, 381-397.

    Example:
        ```python
        import numpy as np

        from inspect_lens.probe import permutation_test

        labels = np.arange(40) % 2
        scores = np.random.default_rng(0).standard_normal(40) + 2 * labels
        assert permutation_test(labels, scores, n_permutations=500) < 0.01
        ```
    """
    positive, negative = split_classes(labels, scores)
    y, s = np.asarray(labels).astype(bool), np.asarray(scores, dtype=np.float64)
    if not positive.size or not negative.size:
        raise SpecError("labels: one class is missing; allowed are both; there is nothing to tell")
    ranks, rng = midranks(s), np.random.default_rng(seed)
    observed = float(ranks[y].sum())
    strata = [np.arange(y.size)]
    if groups is not None:
        codes, n_groups = group_codes(y.size, groups)
        members = [np.flatnonzero(codes == code) for code in range(n_groups)]
        strata = [m for m in members if 0 < y[m].sum() < m.size]
        if not strata:
            return _whole_groups(y, ranks, codes, n_groups, n_permutations, rng)
    # Groups of one class keep their labels, so their part of the sum is fixed.
    mixed = np.concatenate(strata)
    fixed = observed - float(ranks[mixed][y[mixed]].sum())
    step = max(1, CELLS // mixed.size)
    above = 0
    for first in range(0, n_permutations, step):
        b = min(step, n_permutations - first)
        total = np.full(b, fixed)
        for part in strata:
            shuffled = rng.permuted(np.broadcast_to(ranks[part], (b, part.size)), axis=1)
            total += shuffled[:, : int(y[part].sum())].sum(axis=1)
        above += int((total >= observed - 1e-9).sum())
    return (above + 1) / (n_permutations + 1)


def _whole_groups(
    y: NDArray[np.bool_],
    ranks: NDArray[np.float64],
    codes: NDArray[np.int64],
    n_groups: int,
    n_permutations: int,
    rng: np.random.Generator,
) -> float:
    """P where groups of one class each exchange their labels; sizes may differ, so areas count."""
    total = np.bincount(codes, weights=ranks, minlength=n_groups)
    size = np.bincount(codes, minlength=n_groups).astype(np.float64)
    label = np.bincount(codes, weights=y, minlength=n_groups) > 0

    def areas(labels: NDArray[np.bool_]) -> NDArray[np.float64]:
        m = labels @ size
        made: NDArray[np.float64] = (labels @ total - m * (m + 1.0) / 2.0) / (m * (y.size - m))
        return made

    observed, above = float(areas(label[None])[0]), 0
    step = max(1, CELLS // n_groups)
    for first in range(0, n_permutations, step):
        b = min(step, n_permutations - first)
        drawn = rng.permuted(np.broadcast_to(label, (b, n_groups)), axis=1)
        above += int((areas(drawn) >= observed - 1e-12).sum())
    return (above + 1) / (n_permutations + 1)


def paired_permutation_test(
    labels: ArrayLike,
    a: ArrayLike,
    b: ArrayLike,
    *,
    groups: Sequence[Hashable] | None = None,
    n_permutations: int = 2000,
    seed: int = 0,
) -> float:
    """Probability of a difference in AUROC this large if the probes were interchangeable.

    Scores become ranks first, so that probes of different scale can be swapped. With `groups` the
    two probes are swapped in whole groups, as samples of one group go together. Unlike draws of
    groups, swaps are exact for every number of them, so no number is too few; but k groups have
    2^(k - 1) distinct swaps and no p below 1 / 2^(k - 1), so that 5 of them show nothing at 5%.

    Args:
        labels: (samples,) 0 and 1, both.
        a: (samples,) scores of one probe.
        b: (samples,) scores of the other.
        groups: (samples,) what is independent, such as the scenario; None takes samples.
        n_permutations: how often the two scores of each sample, or group, are swapped at random.
            Where there are no more distinct swaps, each is made once, and p is exact.
        seed: of the generator.

    Returns:
        Two-sided p; drawn swaps show none below 1 / (n_permutations + 1).

    Raises:
        SpecError: shapes disagree, a score is NaN, or a class is missing.

    Source:
        Ernst 2004, Statistical Science 19, 676-685; whole clusters as in Winkler et al. 2015.

    Example:
        ```python
        import numpy as np

        from inspect_lens.probe import paired_permutation_test

        rng = np.random.default_rng(0)
        labels = np.arange(100) % 2
        good, bad = (rng.standard_normal(100) + strength * labels for strength in (3.0, 0.0))
        assert paired_permutation_test(labels, good, bad, n_permutations=200) < 0.01
        scenario = (np.arange(100) // 10).tolist()
        assert paired_permutation_test(labels, good, bad, groups=scenario) == 1 / 2**9
        ```
    """
    for scores in (a, b):
        positive, negative = split_classes(labels, scores)
        if not positive.size or not negative.size:
            raise SpecError("labels: one class is missing; allowed are both; nothing to compare")
    y = np.asarray(labels).astype(bool)
    first, second = (midranks(np.asarray(s, dtype=np.float64)) for s in (a, b))
    unit, k = np.arange(y.size), y.size
    if groups is not None:
        unit, k = group_codes(y.size, groups)
    observed = abs(auroc(y, first) - auroc(y, second))
    # Swapping all makes the same difference of the other sign, so the last one may stay.
    whole = 2 ** (k - 1) <= n_permutations
    n = 2 ** (k - 1) if whole else n_permutations
    values, codes = np.unique(np.stack([first, second]), return_inverse=True)
    one, two = codes.reshape(2, y.size)
    rng, above, step = np.random.default_rng(seed), 0, max(1, CELLS // (2 * values.size))
    for start in range(0, n, step):
        b = min(step, n - start)
        if whole:
            swapped = (np.arange(start, start + b)[:, None] >> np.arange(k)) % 2 == 1
        else:
            swapped = rng.random((b, k)) < 0.5
        swap = swapped[:, unit]
        sides = (np.where(swap, two, one), np.where(swap, one, two))
        areas = [_areas_of(side, y, values.size) for side in sides]
        above += int((np.abs(areas[0] - areas[1]) >= observed - 1e-12).sum())
    return above / n if whole else (above + 1) / (n + 1)


def _areas_of(codes: NDArray[np.int64], y: NDArray[np.bool_], k: int) -> NDArray[np.float64]:
    """AUROC of each row of codes (draws, samples), numbers below k in the order of the scores."""
    at = codes + np.arange(len(codes))[:, None] * k
    counted = [
        np.bincount(at[:, side].ravel(), minlength=len(codes) * k).reshape(-1, k).astype(np.float64)
        for side in (y, ~y)
    ]
    return areas_of_counts(*counted)
