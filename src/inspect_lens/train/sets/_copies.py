"""Samples of a judged set that are all but copies of samples which made a probe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from inspect_lens.probe import AnyProbe

from ._dataset import ActivationSet
from ._store_set import StoreSet

__all__ = ["near_copies"]

_NEAR: Final = 0.02
"""Distance that counts as none, in units of the median distance of unrelated samples."""
_SKETCH: Final = 32
_CELLS: Final = 4_000_000
_FILLER: Final = re.compile(r"[\W_]+")
Floats = NDArray[np.float64]


def near_copies(
    probe: AnyProbe, made_by: Sequence[ActivationSet], judged: Sequence[ActivationSet]
) -> tuple[str, ...]:
    """Find samples that are the same but for noise, spelling or another name.

    Two samples are near copies where their texts agree but for case, space and punctuation, or
    where they have as many tokens and the means of these, at the probe's layers, lie closer than
    2% of the median distance of samples of the set that made the probe. So texts that were
    collected twice are found, and activations with jitter. The number is ours.

    Args:
        probe: whose layers are compared.
        made_by: sets that made it.
        judged: sets that it is judged on.

    Returns:
        A sentence for each pair of sets that shares some.
    """
    said = []
    for data in judged:
        for known in made_by:
            pairs = _same_text(known, data) | _same_activations(probe, known, data)
            if pairs:
                first = sorted(pairs.items())[:3]
                shown = ", ".join(f"{known.ids[i]!r} and {data.ids[j]!r}" for j, i in first)
                said.append(
                    f"{len(pairs)} of {len(data)} samples of {data.name!r} are all but copies of "
                    f"samples of {known.name!r}, such as {shown}; what is measured on them says "
                    "little of new samples."
                )
    return tuple(said)


def _texts(data: ActivationSet) -> list[str] | None:
    parts = [data.columns.get(key) for key in ("prompt_text", "completion")]
    if any(part is None for part in parts):
        return None
    return [_FILLER.sub(" ", " ".join(p).casefold()).strip() for p in zip(*parts, strict=True)]


def _same_text(known: ActivationSet, data: ActivationSet) -> dict[int, int]:
    ours, theirs = _texts(data), _texts(known)
    if ours is None or theirs is None:
        return {}
    at = {text: i for i, text in enumerate(theirs)}
    return {j: at[text] for j, text in enumerate(ours) if text in at}


def _same_activations(probe: AnyProbe, known: ActivationSet, data: ActivationSet) -> dict[int, int]:
    first, second = (_means(probe, part) for part in (known, data))
    spread = first.std(axis=0)
    spread[spread == 0.0] = 1.0
    first, second = first / spread, second / spread
    order = np.random.default_rng(0).permutation(len(first))
    apart = np.linalg.norm(first - first[order], axis=1)[order != np.arange(len(first))]
    limit = _NEAR * float(np.median(apart)) if apart.size else 0.0
    if limit <= 0.0:
        return {}
    # A sketch of a few random directions finds candidates; the whole rows decide.
    look = np.random.default_rng(1).normal(size=(first.shape[1], _SKETCH)) / np.sqrt(_SKETCH)
    one, two = first @ look, second @ look
    lengths = [np.array([int(m.sum()) for m in part.mask]) for part in (known, data)]
    found: dict[int, int] = {}
    for i, j in _close(one, two, 2.0 * limit):
        same = lengths[0][i] == lengths[1][j]
        if same and np.linalg.norm(first[i] - second[j]) < limit:
            found[j] = i
    return found


def _close(one: Floats, two: Floats, limit: float) -> Iterable[tuple[int, int]]:
    step = max(1, _CELLS // len(one))
    square = (one**2).sum(axis=1)
    for start in range(0, len(two), step):
        part = two[start : start + step]
        gaps = square[:, None] + (part**2).sum(axis=1) - 2.0 * one @ part.T
        for i, j in zip(*np.nonzero(gaps < limit**2), strict=True):
            yield int(i), start + int(j)


def _means(probe: AnyProbe, data: ActivationSet) -> Floats:
    """(samples, layers · hidden) of the selected tokens."""
    made = np.empty((len(data), len(probe.layers) * data.hidden))
    for k, layer in enumerate(probe.layers):
        for i, rows in _samples(data, layer):
            made[i, k * data.hidden : (k + 1) * data.hidden] = rows.mean(axis=0, dtype=np.float64)
    return made


def _samples(data: ActivationSet, layer: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Place and rows of each sample; of a store one after the other, as it lies there."""
    if isinstance(data, StoreSet):
        yield from ((i, rows) for _, i, rows in data.samples([layer]))
    else:
        yield from enumerate(data.sequences(layer))
