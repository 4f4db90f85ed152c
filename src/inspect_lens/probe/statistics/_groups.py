"""How many independent groups there are, and when they are too few to judge by."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens.errors import SpecError

__all__ = [
    "MIN_EFFECTIVE",
    "MIN_GROUPS",
    "MIN_GROUPS_PER_CLASS",
    "GroupCounts",
    "count_groups",
    "group_codes",
    "kish",
    "stretch",
]

MIN_GROUPS: Final = 8
"""Fewest groups for a test or an interval."""
MIN_GROUPS_PER_CLASS: Final = 5
"""Fewest groups per class for a test or an interval."""
MIN_EFFECTIVE: Final = 3.0
"""Fewest effective groups (Kish) per class for a test or an interval."""


class GroupCounts(NamedTuple):
    """How many independent groups of samples a labelled set has."""

    total: int
    positive: int
    """Groups with a positive sample."""
    negative: int
    """Groups with a negative sample; a group can hold both classes."""
    several: bool
    """Some group holds several samples, so that samples are not independent."""
    effective: float = 0.0
    """Groups of equal size that those of a class are worth, (sum of sizes)^2 over the sum of their
    squares (Kish 1965); of the class that has fewer."""

    @property
    def smaller(self) -> int:
        """Groups of the class that has fewer."""
        return min(self.positive, self.negative)

    @property
    def too_few(self) -> str:
        """Why draws of these groups say nothing, in words; empty where they do.

        Needed are `MIN_GROUPS` groups, and `MIN_GROUPS_PER_CLASS` with each class. With fewer
        the cluster bootstrap draws the same few sets again and again, and is far too sure.
        Groups of one sample each are samples, and never too few. Groups of unequal size are too
        few as well where those of a class are worth fewer than `MIN_EFFECTIVE`.
        """
        enough = self.total >= MIN_GROUPS and self.smaller >= MIN_GROUPS_PER_CLASS
        if not self.several or (enough and self.effective >= MIN_EFFECTIVE - 1e-9):
            return ""
        worth = f"; worth {self.effective:.1f} of equal size" if enough else ""
        return (
            f"too few groups ({self.total}; {self.positive} with positives, {self.negative} with "
            f"negatives{worth})"
        )


def count_groups(labels: ArrayLike, groups: Sequence[Hashable] | None) -> GroupCounts:
    """Count the groups of a labelled set.

    Args:
        labels: (samples,) 0 and 1, or bools.
        groups: (samples,) what is independent, such as the scenario; None takes samples.

    Returns:
        The counts; `too_few` says whether a test can be made of them. The limits, 8 groups and 5
        with each class, are ours: in simulation two equal probes on 2 groups are found different
        at 5% in 45 of 100 sets, on 5 groups in 12 to 18, and on 10 in 8 to 9, which the spread of
        draws in `compare_auroc` brings to 4 or 5.

    Raises:
        SpecError: lengths disagree.

    Example:
        ```python
        from inspect_lens.probe import count_groups

        found = count_groups([0, 1, 0, 1], groups=["kitchen", "kitchen", "garden", "garden"])
        assert (found.total, found.positive, found.negative) == (2, 2, 2)
        assert found.too_few.startswith("too few groups (2")
        assert count_groups([0, 1, 0, 1], groups=None).too_few == ""
        ```
    """
    y = np.asarray(labels).astype(bool).tolist()
    if groups is None:
        n = sum(y)
        return GroupCounts(len(y), n, len(y) - n, several=False, effective=min(n, len(y) - n))
    codes, total = group_codes(len(y), groups)
    mark = np.array(y, dtype=bool)
    sizes = [np.bincount(codes[side], minlength=total) for side in (mark, ~mark)]
    positive, negative = (int((size > 0).sum()) for size in sizes)
    worth = min(kish(size) for size in sizes)
    return GroupCounts(total, positive, negative, several=total < len(y), effective=worth)


def kish(sizes: NDArray[np.int64]) -> float:
    """How many groups of equal size these sizes (groups,) are worth; 0 for none."""
    return float(sizes.sum() ** 2 / (sizes**2).sum()) if sizes.any() else 0.0


def group_codes(n_samples: int, groups: Sequence[Hashable]) -> tuple[NDArray[np.int64], int]:
    """Number the groups in the order in which they come.

    Args:
        n_samples: how many there are.
        groups: (samples,) of any kind; those of one group need not stand together.

    Returns:
        (samples,) number of each sample's group, and how many groups there are.

    Raises:
        SpecError: lengths disagree.
    """
    if len(groups) != n_samples:
        raise SpecError(
            f"groups: {len(groups)} groups for {n_samples} samples; allowed is one group per "
            "sample; pass the groups of the same samples as the labels"
        )
    number: dict[Hashable, int] = {}
    codes = [number.setdefault(group, len(number)) for group in groups]
    return np.array(codes, dtype=np.int64), len(number)


def stretch(k: int) -> float:
    """How much too little k groups vary in draws: sqrt(k / (k - 1)), and t over normal at 95%."""
    z, free = 1.96, k - 1
    t_over_z = 1.0 + (z**2 + 1.0) / (4.0 * free)  # Cornish-Fisher
    t_over_z += (5.0 * z**4 + 16.0 * z**2 + 3.0) / (96.0 * free**2)
    return math.sqrt(k / free) * t_over_z
