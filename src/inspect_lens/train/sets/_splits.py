"""Splits that no group straddles."""

from __future__ import annotations

import numpy as np
from sklearn.model_selection import StratifiedGroupKFold

from inspect_lens.errors import SpecError
from inspect_lens.probe import required_negatives

from ._dataset import ActivationSet

__all__ = [
    "require_disjoint",
    "require_other_samples",
    "require_same_origin",
    "split_by_group",
    "split_control",
]


def require_same_origin(one: ActivationSet, other: ActivationSet) -> None:
    """Refuse two sets of different weights or of different tokens, as far as they are known.

    Args:
        one: a set.
        other: another set.

    Raises:
        SpecError: model or positions differ.
    """
    known = one.model_sha256 and other.model_sha256
    if one.model_sha256 != other.model_sha256 if known else one.model != other.model:
        weights = [f" (weights {d.model_sha256[:12]})" if known and d.model_sha256 else ""
                   for d in (one, other)]  # fmt: skip
        raise SpecError(
            f"{other.name}: activations of model {other.model!r}{weights[1]}; allowed is the model "
            f"of {one.name!r}, {one.model!r}{weights[0]}; collect all sets with one model"
        )
    if not other.reads(one.positions, raw=one.raw):
        raise SpecError(
            f"{other.name}: tokens at positions {other.positions!r}; allowed are those of "
            f"{one.name!r}, {one.positions!r}; collect all sets at the same positions"
        )


def require_disjoint(one: ActivationSet, other: ActivationSet, *, key: str = "group") -> None:
    """Refuse two sets that share a group: a probe could know the scenario, not the concept.

    Args:
        one: a set.
        other: another set.
        key: `group`, `id`, or a column of both sets.

    Raises:
        SpecError: a value straddles the sets.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, require_disjoint

        train, test = (ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "test"))
        require_disjoint(train, test)  # raises where they share a group
        ```
    """
    shared = sorted(set(one.key(key)) & set(other.key(key)))
    if shared:
        raise SpecError(
            f"{key}: {len(shared)} values are in {one.name!r} and in {other.name!r}, such as "
            f"{shared[:3]}; allowed are sets that share none; split by {key}, or name the key "
            "that does keep them apart in disjoint="
        )


def require_other_samples(one: ActivationSet, other: ActivationSet) -> None:
    """Refuse two sets that share a sample, by its name or, where both sets know it, its content.

    Args:
        one: a set.
        other: another set.

    Raises:
        SpecError: a sample is in both.
    """
    require_disjoint(one, other, key="id")
    if one.contents and other.contents:
        at = {content: i for i, content in enumerate(one.contents)}
        shared = [(at[c], j) for j, c in enumerate(other.contents) if c in at]
        if shared:
            pairs = ", ".join(f"{one.ids[i]!r} and {other.ids[j]!r}" for i, j in shared[:3])
            raise SpecError(
                f"content: {len(shared)} of {len(other)} samples of {other.name!r} are also in "
                f"{one.name!r} under another name, such as {pairs}; allowed are sets that share "
                "none; leave them out of one set"
            )


def split_by_group(
    data: ActivationSet, *, fraction: float = 0.25, seed: int = 0
) -> tuple[ActivationSet, ActivationSet]:
    """Split off a part with whole groups, both classes in about the same proportion.

    Args:
        data: the set.
        fraction: share of samples to split off, at most 0.5; met as nearly as groups allow.
        seed: of the shuffle.

    Returns:
        The rest, and the part.

    Raises:
        SpecError: too few groups, or a class is missing on one side.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, require_disjoint, split_by_group

        train, selection = split_by_group(
            ActivationSet.load("acts/train.safetensors"), fraction=0.25
        )
        require_disjoint(train, selection)
        assert 30 <= len(selection) <= 50
        ```
    """
    if not 0.0 < fraction <= 0.5:
        raise SpecError(f"fraction={fraction!r}; allowed is above 0 and up to 0.5; 0.25 is usual")
    folds = max(2, round(1.0 / fraction))
    n_groups = len(set(data.groups))
    if n_groups < folds or min(data.n_positive, data.n_negative) < folds:
        raise SpecError(
            f"{data.name}: {n_groups} groups, {data.n_positive} positive and {data.n_negative} "
            f"negative samples; allowed are {folds} or more of each for fraction={fraction:g}; "
            "use finer groups, or pass selection= yourself"
        )
    splitter = StratifiedGroupKFold(n_splits=folds, shuffle=True, random_state=seed)
    rest, part = next(splitter.split(np.zeros(len(data)), data.labels, data.groups))
    made = (data.subset(rest), data.subset(part, name=f"{data.name}/selection"))
    for side in made:
        if 0 in (side.n_positive, side.n_negative):
            raise SpecError(
                f"{side.name}: one class is missing after the split by group; allowed are groups "
                "that leave both on each side; use finer groups, or another seed"
            )
    return made


def split_control(
    control: ActivationSet, fpr: float, *, seed: int = 0
) -> tuple[ActivationSet, ActivationSet]:
    """Parts of a control set that choose a layer and set a threshold.

    A layer chosen because few control samples score high there makes the threshold too low for
    new ones, so the two take different samples: a third of the groups, and the others. Where those
    others are too few to show the rate, the whole set does both.

    Args:
        control: harmless samples only.
        fpr: rate of the threshold.
        seed: of the shuffle.

    Returns:
        What chooses, and what sets the threshold; the same set where it is not split.

    Source:
        arXiv:2104.13871 calls the two ways validity first and efficiency first.
    """
    names = sorted(set(control.groups))
    order = np.random.default_rng(seed).permutation(len(names))
    part = {names[i] for i in order[: len(names) // 3]}
    chooses = np.array([group in part for group in control.groups])
    if not part or len(names) - len(part) < required_negatives(fpr):
        return control, control
    return control.subset(np.flatnonzero(chooses)), control.subset(np.flatnonzero(~chooses))
