"""Splits that no group straddles, samples that no probe has seen, labels that a model followed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import hypergeom
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import pairwise_distances_chunked
from sklearn.model_selection import StratifiedGroupKFold
from sklearn.neighbors import NearestNeighbors

from inspect_lens._base.arguments import judged_arguments, warn_caller
from inspect_lens.errors import SpecError
from inspect_lens.probe import (
    AnyProbe,
    LabelSource,
    SeenSamples,
    find_label_source,
    required_negatives,
)
from inspect_lens.spec import Numerics
from inspect_lens.vector import Vector

from ._dataset import ActivationSet

__all__ = ["refuse_seen", "require_disjoint", "split_by_group"]

_FEWEST: Final = 20
_WORDS: Final = re.compile(r"\w+")


def followed(data: ActivationSet) -> tuple[float, float] | None:
    """Shares of honest answers that name the truth, and of lies that do not."""
    if len(data) < _FEWEST or not {"condition", "truth", "completion"} <= set(data.columns):
        return None
    rows = zip(data.columns["truth"], data.columns["completion"], strict=True)
    said = np.array([_names(truth, answer) for truth, answer in rows])
    told = np.array(data.columns["condition"])
    honest, lies = said[told == "honest"], ~said[told == "lie"]
    if not honest.size or not lies.size or honest.size + lies.size < len(data):
        return None
    return float(honest.mean()), float(lies.mean())


def differing(data: ActivationSet) -> float | None:
    """Share of the questions whose answer under an instruction to lie is not the honest one."""
    # For sets that do not say what is true: no more of them than this are lies.
    if len(data) < _FEWEST or not {"condition", "completion"} <= set(data.columns):
        return None
    said: dict[str, dict[str, str]] = {}
    rows = zip(data.groups, data.columns["condition"], data.columns["completion"], strict=True)
    for group, condition, answer in rows:
        said.setdefault(group, {})[condition] = " ".join(_WORDS.findall(answer.casefold()))
    pairs = [found for found in said.values() if found.keys() == {"honest", "lie"}]
    if 2 * len(pairs) < 0.9 * len(data):
        return None
    return float(np.mean([found["honest"] != found["lie"] for found in pairs]))


def behaviour_share(data: ActivationSet) -> float | None:
    """Share of the answers that do what an instruction asks; None where the truth is not known."""
    shares = followed(data)
    return None if shares is None else min(shares)


def labels_from(data: ActivationSet) -> LabelSource | Literal[""]:
    """What says which samples are positive, as the set says it or its columns show it."""
    told = data.columns.get("condition", [None] * len(data))
    return find_label_source(data.label_source, told, list(data.labels))


def require_followed(data: ActivationSet, floor: float) -> str:
    """What is to be said of a training set, or refuse it: a label is no behaviour."""
    shares = followed(data)
    if shares is not None:
        least = min(shares)
        text = (
            f"of {data.name!r}, {shares[0]:.0%} of the answers under an instruction to be honest "
            f"name the truth, and {shares[1]:.0%} of those under an instruction to lie do not"
        )
    elif (share := differing(data)) is not None:
        least = share
        text = (
            f"of {data.name!r}, {share:.0%} of the answers under an instruction to lie differ from "
            "the honest answer to the same question"
        )
    else:
        return ""
    if least < floor:
        raise SpecError(
            f"behaviour_floor={floor:g}: {text}, so a probe would learn the instruction and not "
            "what the model does; allowed is a model that follows both instructions; train on what "
            "it said (labels by the answer), take a larger model, or lower the floor"
        )
    return text


def _names(truth: str, answer: str) -> bool:
    return bool(re.search(rf"(?<!\w){re.escape(truth)}(?!\w)", answer, re.IGNORECASE))


def require_same_origin(one: ActivationSet, other: ActivationSet) -> None:
    """Refuse two sets of different weights or of different tokens, as far as they are known."""
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


def warn_otherwise(
    data: ActivationSet, *sets: ActivationSet, made: Mapping[str, Numerics | None] | None = None
) -> tuple[str, ...]:
    """Warn where another engine, dtype or quantisation computed a set than others, and say it."""
    others = {**(made or {}), **{other.name: other.capture for other in sets}}
    said = data.capture.unlike(others, name=data.name) if data.capture else ()
    for text in said:
        warn_caller(text)
    return said


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
        instead = (
            f"split by {key}, or name the key that does keep them apart in disjoint= of train_probe"
        )
        if key == "id":
            instead = (
                "leave them out of one set, or give other samples other names (ids=, or a name= of "
                "the set, by which samples without ids are numbered)"
            )
        raise SpecError(
            f"{key}: {len(shared)} values are in {one.name!r} and in {other.name!r}, such as "
            f"{shared[:3]}; allowed are sets that share none; {instead}"
        )


def require_apart(one: ActivationSet, other: ActivationSet) -> None:
    """Refuse a set to choose on that shares samples or groups with another, or is of other rows."""
    require_same_origin(one, other)
    require_disjoint(one, other)
    require_other_samples(one, other)


def require_other_samples(one: ActivationSet, other: ActivationSet) -> None:
    """Refuse two sets that share a sample, by its name, and its content or the rows of a layer."""
    require_disjoint(one, other, key="id")
    by, layers = "content", sorted(set(one.layers) & set(other.layers))[-1:]
    if not (one.contents and other.contents):
        by = "activations"
        if not layers or one.hidden != other.hidden:
            return
    first, second = (data.shown(by, layers) or [] for data in (one, other))
    at = {shown: i for i, shown in enumerate(first)}
    shared = [(at[shown], j) for j, shown in enumerate(second) if shown in at]
    if shared:
        pairs = ", ".join(f"{one.ids[i]!r} and {other.ids[j]!r}" for i, j in shared[:3])
        raise SpecError(
            f"{by}: {len(shared)} of {len(other)} samples of {other.name!r} are also in "
            f"{one.name!r} under another name, such as {pairs}; allowed are sets that share none; "
            "leave them out of one set"
        )


@judged_arguments
def split_by_group(
    data: ActivationSet, *, fraction: float = 0.25, seed: int = 0
) -> tuple[ActivationSet, ActivationSet]:
    """Split off a part with whole groups and about the same share of positives; the rest is first.

    Args:
        data: the set.
        fraction: share of samples to split off, at most 0.5; met as nearly as groups allow.
        seed: of the shuffle.

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
            "use finer groups or more samples, or a set of its own to choose on (selection=)"
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
    """Parts of a control set that choose a layer and set a threshold: a third of it, and the rest.

    A layer chosen because few control samples score high there makes the threshold too low for new
    ones. Where the rest is too small to show the rate, the whole set does both (arXiv:2104.13871).
    """
    names = sorted(set(control.groups))
    order = np.random.default_rng(seed).permutation(len(names))
    part = {names[i] for i in order[: len(names) // 3]}
    chooses = np.array([group in part for group in control.groups])
    if not part or len(names) - len(part) < required_negatives(fpr):
        return control, control
    return control.subset(np.flatnonzero(chooses)), control.subset(np.flatnonzero(~chooses))


_DONE: Final = {
    "training": "were in training",
    "selection": "chose the layer",
    "control": "set the threshold",
    "calibration": "fitted the probabilities",
}


def list_seen(layers: Sequence[int], **sets: ActivationSet | None) -> SeenSamples:
    """The samples of sets by their role, for the card."""
    there = {role: data for role, data in sets.items() if data is not None}
    known = all(data.contents for data in there.values())
    by: Literal["content", "activations"] = "content" if known else "activations"
    shown = {role: data.shown(by, layers) or [] for role, data in there.items()}
    return SeenSamples.of(by, **shown)


def count_seen(probe: AnyProbe | Vector, data: ActivationSet) -> int | None:
    """Samples of a set that took part in making it; None where that cannot be told."""
    found = find_seen(probe, data)
    return None if found is None else len({i for part in found.values() for i in part})


def refuse_seen(
    probe: AnyProbe | Vector,
    data: ActivationSet,
    *,
    roles: tuple[str, ...] = ("training", "selection", "control", "calibration"),
) -> None:
    """Refuse a set that holds samples which took part in making a probe or a vector.

    Args:
        probe: or vector, with or without a list of its samples.
        data: the set.
        roles: parts that count.

    Raises:
        SpecError: there are such samples; the message counts and names them.

    Example:
        ```python
        from inspect_lens.errors import SpecError
        from inspect_lens.train import ActivationSet, LDAProbe, refuse_seen, train_probe

        train, control, test = (
            ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "control", "test")
        )
        probe = train_probe(LDAProbe(), train, name="mine/lda", control=control)
        refuse_seen(probe, test)
        try:
            refuse_seen(probe, train)
        except SpecError as error:
            print(error)
        ```
    """
    found = {role: part for role, part in (find_seen(probe, data) or {}).items() if role in roles}
    if not found:
        return
    kind = "vector" if isinstance(probe, Vector) else "probe"
    n, parts = len(data), []
    for role, part in found.items():
        names = ", ".join(repr(data.ids[i]) for i in part[:3])
        parts.append(f"{len(part)} of {n} samples {_DONE[role]}, such as {names}")
    raise SpecError(
        f"{data.name}: {'; '.join(parts)} ({kind} {probe.name!r}); allowed are samples that took "
        f"no part in making the {kind}; leave these out, or pass allow_seen=True to "
        "measure on what it knows"
    )


def find_seen(probe: AnyProbe | Vector, data: ActivationSet) -> dict[str, list[int]] | None:
    seen = probe.card.seen
    shown = None if seen is None else data.shown(seen.by, probe.layers)
    return None if seen is None or shown is None else seen.find(shown)


_NEAR: Final = 0.02
"""Distance that counts as none, in units of the median distance of unrelated samples."""
_SHARES: Final = (0.1, 0.25, 0.5)
"""Of the groups with the least ratios, which are counted."""
_LEVEL: Final = 1e-3
_SKETCH: Final = 32
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
    """Find sets that were judged on what is all but the training set."""
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
    shared = _shared_keys(known, data, key)
    for what, rows in (("words", _words(known, data)), ("activations", _rows(probe, known, data))):
        if rows is None:
            continue
        first = _Side(rows[0], np.array(units), [np.array(known.key(k)) for k in shared])
        second = _Side(rows[1], np.array(theirs), [np.array(data.key(k)) for k in shared])
        if _counterparts(first, second) < _LEVEL:
            return (
                f"more groups of {data.name!r} (by {key!r}) than chance gives have one of "
                f"{known.name!r} that is far nearer by its {what} than all others, as altered "
                "copies do"
            )
    return ""


def _shared_keys(known: ActivationSet, data: ActivationSet, key: str) -> list[str]:
    """Other keys by which the two sets openly share values, such as the entity in a template."""
    # Samples that share one are alike by design, so they are no counterparts. A key of few values,
    # such as a condition, makes nothing alike.
    names = {"group", *known.columns} & {"group", *data.columns}
    names -= {key, "prompt_text", "completion"}
    found = []
    for name in sorted(names):
        values = set(known.key(name))
        if len(values) >= _FEWEST and values & set(data.key(name)):
            found.append(name)
    return found


class _Side(NamedTuple):
    rows: Any
    units: Strings
    shared: list[Strings]
    """Values (samples,) of the keys that both sets share."""

    def part(self, picks: NDArray[Any]) -> _Side:
        return _Side(self.rows[picks], self.units[picks], [v[picks] for v in self.shared])

    def one_each(self, rng: np.random.Generator) -> _Side:
        order = rng.permutation(len(self.units))
        _, first = np.unique(self.units[order], return_index=True)
        return self.part(order[first])


def _counterparts(known: _Side, data: _Side) -> float:
    """P value that groups of a set have no closer counterpart in the other than its own have."""
    # Half of the groups are looked up in the other half, and so are those of the other set, each by
    # one of its samples: of many, one is nearer to something. Where all are alike, the least ratios
    # are as often of one as of the other: a hypergeometric test.
    rng = np.random.default_rng(0)
    names = rng.permutation(np.unique(known.units))
    data = data.one_each(rng)
    least = 1.0
    for half in (names[::2], names[1::2]):
        inside = np.isin(known.units, half)
        rest = known.part(~inside)
        own, other = _ratios(rest, known.part(inside).one_each(rng)), _ratios(rest, data)
        # Texts tie often; ties count for the set's own groups.
        lowest = np.argsort(np.concatenate([own, other]), kind="stable") >= len(own)
        for share in _SHARES:
            n = max(1, int(share * len(lowest)))
            hits = int(lowest[:n].sum())
            least = min(least, float(hypergeom.sf(hits - 1, len(lowest), len(other), n)))
    return min(1.0, 2 * len(_SHARES) * least)


def _ratios(known: _Side, data: _Side) -> Floats:
    """For each sample, how far its nearest group is over how far the next one is."""
    made: list[Floats] = []

    def reduce(gaps: Floats, start: int) -> None:
        part = slice(start, start + len(gaps))
        for ours, theirs in zip(known.shared, data.shared, strict=True):
            gaps[theirs[part, None] == ours] = np.inf
        rows = np.arange(len(gaps))
        nearest = gaps.argmin(axis=1)
        first = gaps[rows, nearest]
        gaps[known.units[nearest][:, None] == known.units] = np.inf
        beyond = gaps.min(axis=1)
        usable = (beyond > 0.0) & np.isfinite(beyond)
        made.append(np.divide(first, beyond, out=np.ones(len(gaps)), where=usable))

    for _ in pairwise_distances_chunked(data.rows, known.rows, reduce_func=reduce):
        pass
    return np.concatenate(made)


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
    first, second = _scaled(probe, known, data)
    look = np.random.default_rng(1).normal(size=(first.shape[1], 2 * _SKETCH))
    return first @ look, second @ look


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
    first, second = _scaled(probe, known, data)
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
    near = NearestNeighbors(radius=2.0 * limit).fit(one)
    for j, candidates in enumerate(near.radius_neighbors(two, return_distance=False)):
        for i in sorted(candidates.tolist()):
            same = lengths[0][i] == lengths[1][j]
            if same and np.linalg.norm(first[i] - second[j]) < limit:
                found[j] = i
    return found


def _scaled(probe: AnyProbe, known: ActivationSet, data: ActivationSet) -> tuple[Floats, Floats]:
    """Means (samples, layers · hidden) of each sample in units of the first set's deviations."""
    first, second = (
        np.empty((len(part), len(probe.layers) * part.hidden)) for part in (known, data)
    )
    for made, part in ((first, known), (second, data)):
        for i, rows in part.selected(probe.layers):
            made[i] = rows.mean(axis=1, dtype=np.float64).ravel()
    spread = first.std(axis=0)
    spread[spread == 0.0] = 1.0
    return first / spread, second / spread
