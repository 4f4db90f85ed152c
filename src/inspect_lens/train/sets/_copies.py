"""Samples of a judged set that are all but copies of samples which made a probe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import hypergeom
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.neighbors import NearestNeighbors

from inspect_lens.probe import AnyProbe

from ._dataset import ActivationSet
from ._store_set import StoreSet

__all__ = ["near_copies"]

_NEAR: Final = 0.02
"""Distance that counts as none, in units of the median distance of unrelated samples."""
_SHARES: Final = (0.1, 0.25, 0.5)
"""Of the groups with the least ratios, which are counted."""
_LEVEL: Final = 1e-3
_NEIGHBOURS: Final = 8
_FEWEST: Final = 20
"""Groups from which on there is something to compare with."""
_SKETCH: Final = 32
_CELLS: Final = 4_000_000
_FILLER: Final = re.compile(r"[\W_]+")
Floats = NDArray[np.float64]
Strings = NDArray[np.str_]


def near_copies(
    probe: AnyProbe,
    made_by: Sequence[ActivationSet],
    judged: Sequence[ActivationSet],
    *,
    disjoint: Mapping[str, str] | None = None,
) -> dict[str, tuple[str, ...]]:
    """Find sets that were judged on what is all but the training set.

    Two samples are copies where their texts agree but for case, space and punctuation, or where
    they have as many tokens and the means of these, at the probe's layers, lie closer than 2% of
    the median distance of samples of the set that made the probe. That number is ours.

    Copies that were changed more show by their number. A copy has one sample that is far nearer
    than the next one, by the words of their texts (tf-idf) or by their activations. Groups of the
    set that made the probe are looked up in another half of it, and so are those of the judged set;
    a hypergeometric test asks whether the latter have more such counterparts, at a level of 0.001.

    Args:
        probe: whose layers are compared.
        made_by: sets that made it.
        judged: sets that it is judged on.
        disjoint: by name of a judged set, the key that keeps it apart; `group` by default.

    Returns:
        By name of a judged set, a sentence for each set that it shares samples with.
    """
    said: dict[str, tuple[str, ...]] = {}
    for data in judged:
        key = (disjoint or {}).get(data.name, "group")
        for known in made_by:
            pairs = _same_text(known, data) | _same_activations(probe, known, data)
            if pairs:
                first = sorted(pairs.items())[:3]
                shown = ", ".join(f"{known.ids[i]!r} and {data.ids[j]!r}" for j, i in first)
                what = f"{len(pairs)} of {len(data)} samples of {data.name!r} are all but copies of"
                what += f" samples of {known.name!r}, such as {shown}"
            elif not (what := _too_near(probe, known, data, key)):
                continue
            what += "; what is measured on them says little of new samples."
            said[data.name] = (*said.get(data.name, ()), what)
    return said


def _too_near(probe: AnyProbe, known: ActivationSet, data: ActivationSet, key: str) -> str:
    """What is said where more groups of a set have a counterpart in another than chance gives."""
    units, theirs = known.key(key), data.key(key)
    if set(units) & set(theirs) or len(set(units)) < _FEWEST:
        return ""  # something else keeps them apart, and nobody says what
    for what, rows in (("words", _words(known, data)), ("activations", _rows(probe, known, data))):
        if rows is not None and _counterparts(*rows, np.array(units), np.array(theirs)) < _LEVEL:
            return (
                f"more groups of {data.name!r} (by {key!r}) than chance gives have one of "
                f"{known.name!r} that is far nearer by its {what} than all others, as altered "
                "copies do"
            )
    return ""


def _counterparts(known: Any, data: Any, units: Strings, theirs: Strings) -> float:
    """P value that groups of a set have no closer counterpart in the other than its own have.

    Half of the groups are looked up in the other half, and so are those of the other set. Where
    all are alike, the least ratios are as often of one as of the other: a hypergeometric test.
    """
    names = np.random.default_rng(0).permutation(np.unique(units))
    least = 1.0
    for half in (names[::2], names[1::2]):
        inside = np.isin(units, half)
        rest = known[np.flatnonzero(~inside)]
        own = _ratios(rest, units[~inside], known[np.flatnonzero(inside)], units[inside])
        other = _ratios(rest, units[~inside], data, theirs)
        # Texts tie often; ties count for the set's own groups.
        lowest = np.argsort(np.concatenate([own, other]), kind="stable") >= len(own)
        for share in _SHARES:
            n = max(1, int(share * len(lowest)))
            hits = int(lowest[:n].sum())
            least = min(least, float(hypergeom.sf(hits - 1, len(lowest), len(other), n)))
    return min(1.0, 2 * len(_SHARES) * least)


def _ratios(known: Any, units: Strings, data: Any, theirs: Strings) -> Floats:
    """For each group of a set, how far its nearest group is over how far the next one is."""
    search = NearestNeighbors(n_neighbors=min(_NEIGHBOURS, known.shape[0]), algorithm="brute")
    gaps, at = search.fit(known).kneighbors(data)
    other = units[at] != units[at[:, :1]]
    second = np.where(other.any(axis=1), other.argmax(axis=1), -1)
    beyond = gaps[np.arange(len(gaps)), second]
    ratio = np.divide(gaps[:, 0], beyond, out=np.ones(len(gaps)), where=beyond > 0.0)
    return np.array([ratio[theirs == unit].min() for unit in np.unique(theirs)])


def _words(known: ActivationSet, data: ActivationSet) -> tuple[Any, Any] | None:
    """Unit rows of the words of each text; None where texts are not known."""
    theirs, ours = _texts(known), _texts(data)
    if theirs is None or ours is None or not any(theirs):
        return None
    # Of both: words that one set lacks have to count for their texts, too.
    vectorizer = TfidfVectorizer(token_pattern=r"\S+", sublinear_tf=True).fit([*theirs, *ours])
    return vectorizer.transform(theirs), vectorizer.transform(ours)


def _rows(probe: AnyProbe, known: ActivationSet, data: ActivationSet) -> tuple[Any, Any]:
    """Means of each sample in units of the first set's deviations, in few random directions."""
    first, second = (_means(probe, part) for part in (known, data))
    spread = first.std(axis=0)
    spread[spread == 0.0] = 1.0
    look = np.random.default_rng(1).normal(size=(first.shape[1], 2 * _SKETCH))
    return first / spread @ look, second / spread @ look


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
