"""Steering vectors from activations: mean difference, CAA, logistic, PCA and persona directions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens._base.arguments import judged_arguments, one_or_several
from inspect_lens.errors import SpecError
from inspect_lens.probe import FitRows, ModelRef, auroc, fingerprint_model
from inspect_lens.spec import RESID_POST, Site, check_word
from inspect_lens.train.families._direction import (
    DirectionEstimator,
    LATProbe,
    MeanDifferenceProbe,
    make_pairs,
)
from inspect_lens.train.families._logistic import LogisticProbe
from inspect_lens.train.judging._select import separation
from inspect_lens.train.sets._dataset import ActivationSet, numbered
from inspect_lens.train.sets._splits import (
    count_seen,
    list_seen,
    refuse_seen,
    require_apart,
    warn_otherwise,
)
from inspect_lens.vector import Vector, VectorCard, VectorTraining

__all__ = [
    "VectorMethod",
    "VectorRows",
    "VectorScore",
    "erase",
    "evaluate_vector",
    "extract_vector",
    "pair_set",
    "persona_vector",
]

VectorMethod = Literal["mean_difference", "caa", "logistic", "pca"]
"""`caa` is the mean of the differences of pairs; `pca` their first principal component (LAT)."""

VectorRows = FitRows | int
"""Which tokens make a row: each selected one, their mean, the last, or one by index."""

_CAA_ROW: Final = -2  # the letter of an answer such as "(A)"
_SOURCES: Final[dict[str, str]] = {
    "mean_difference": "arXiv:2310.06824",
    "caa": "arXiv:2312.06681",
    "logistic": "arXiv:2502.03407 (settings of the classifier)",
    "pca": "arXiv:2310.01405",
}


class PickedRows(NamedTuple):
    """Rows (rows, hidden) of a set at one layer, with class and group of each."""

    x: NDArray[np.float32]
    positive: NDArray[np.bool_]
    groups: NDArray[np.str_]

    def distance(self, along: NDArray[np.float64]) -> float:
        """Of the class means of a projection (rows,)."""
        return float(along[self.positive].mean() - along[~self.positive].mean())


@judged_arguments
def pair_set(
    positive: ArrayLike,
    negative: ArrayLike,
    *,
    layers: Sequence[int],
    model: str = "",
    name: str = "pairs",
) -> ActivationSet:
    """Make a set of one-token samples of two arrays, where row i of both is a pair, and a group.

    Args:
        positive: (pairs, layers, hidden) float; what a positive scale should move to.
        negative: (pairs, layers, hidden) float.
        layers: layer of each entry of the second axis, ascending.
        model: name or path of the model.
        name: of the set.

    Raises:
        SpecError: shapes disagree.

    Example:
        ```python
        import numpy as np

        from inspect_lens.train import pair_set

        rng = np.random.default_rng(0)
        negative = rng.standard_normal((50, 1, 64))  # (pairs, layers, hidden)
        data = pair_set(negative + 1.0, negative, layers=[12], model="my-model")
        assert (data.n_positive, data.n_negative) == (50, 50)
        ```
    """
    high, low = np.asarray(positive, dtype=np.float32), np.asarray(negative, dtype=np.float32)
    if high.ndim != 3 or high.shape != low.shape or high.shape[1] != len(layers):
        raise SpecError(
            f"positive, negative: shapes {high.shape} and {low.shape}; allowed are two equal "
            f"shapes (pairs, {len(layers)}, hidden) for layers {list(layers)}"
        )
    n = len(high)
    return ActivationSet(
        name=name,
        model=model,
        layers=tuple(layers),
        acts=tuple(row[:, None] for row in np.concatenate([high, low])),
        labels=np.repeat([True, False], n),
        groups=numbered(name, n) * 2,
        ids=tuple(f"{pair}{side}" for side in "+-" for pair in numbered(name, n)),
    )


@judged_arguments
def extract_vector(
    data: ActivationSet,
    *,
    name: str,
    method: VectorMethod = "mean_difference",
    rows: VectorRows | None = None,
    selection: ActivationSet | None = None,
    layers: Sequence[int] | None = None,
    layer: int | None = None,
    site: Site = RESID_POST,
    model: ModelRef | None = None,
    seed: int = 0,
    on_policy: bool = True,
    positions: str = "",
    description: str = "",
    notes: str | Sequence[str] = (),
    command: str = "",
) -> Vector:
    """Find a steering vector, one direction per layer, from labelled activations.

    `mean_difference` subtracts the class means. `caa` averages the differences within each group
    (rows at index -2: the letter of an answer such as "(A)" to an A/B question). `logistic` takes
    the normal of a logistic regression on standardised rows. `pca` takes the first principal
    component of differences within groups, sign by the labels. The length at each layer is the
    distance of the class means along the vector.

    Args:
        data: label 1 is what a positive scale moves to; groups are the pairs of `caa` and `pca`,
            and classes are paired at random where no group has both.
        name: `<model>/<name>`, for the card and the folder.
        method: how the direction is found.
        rows: what one row of a sample is; index -2 for `caa`, each token for the others.
        selection: samples that are not in `data`; they choose the layer, by AUROC and then by
            distance of the classes, and the AUROC of each layer goes into the card.
        layers: layers to keep; all of the set by default.
        layer: the card's layer, instead of one chosen on `selection`.
        site: where in the block the rows were captured.
        model: the model; by default its name is that of `data`, with the fingerprint where it is
            a local folder.
        seed: of the pairing.
        on_policy: whether the model itself wrote the text.
        positions: which tokens were compared, for the card; from `rows` by default.
        description: what a positive scale does.
        notes: for the card.
        command: that this can be repeated with.

    Raises:
        SpecError: an argument is wrong, a class is missing, sets share a group or a sample or are
            of different models or positions, or the classes do not differ at a layer.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, extract_vector

        train = ActivationSet.load("acts/train.safetensors")
        vector = extract_vector(train, name="mine/planted", rows="mean")
        assert vector.layers == (0, 1, 2)
        vector.save("vectors-of-mine/mine/planted")
        ```
    """
    check_word("method", method, VectorMethod)
    if not data.n_positive or not data.n_negative:
        raise SpecError(
            f"{data.name}: {data.n_positive} positive and {data.n_negative} negative samples; "
            "allowed is one of each at least"
        )
    if selection is not None:
        require_apart(data, selection)
        notes = (*one_or_several(notes), *warn_otherwise(selection, data))
    row = rows if rows is not None else (_CAA_ROW if method == "caa" else "tokens")
    kept = tuple(data.layers if layers is None else sorted(layers))
    units, lengths, norms, areas, gaps = [], [], [], [], []
    for n in kept:
        found = rows_at(data, n, row)
        unit = _direction(found, method, seed)
        length = found.distance(found.x.astype(np.float64) @ unit)
        if not length > 0.0:
            raise SpecError(
                f"layer {n}: the classes do not differ along it (distance {length:.3g}); "
                "leave the layer out of layers="
            )
        units.append(unit)
        lengths.append(length)
        norms.append(float(np.linalg.norm(found.x.astype(np.float64), axis=1).mean()))
        if selection is not None:
            held = rows_at(selection, n, row)
            scores = held.x.astype(np.float64) @ unit
            areas.append(auroc(held.positive, scores))
            gaps.append(separation(scores, held.positive))
    if layer is None and areas:
        # Several layers may separate perfectly; the classes lie furthest apart at one.
        layer = kept[max(range(len(kept)), key=lambda i: (round(areas[i], 3), gaps[i]))]
        ties = sum(round(area, 3) == round(max(areas), 3) for area in areas)
        if ties > 1 and selection is not None:
            notes = (
                *one_or_several(notes),
                f"{ties} of {len(kept)} layers have AUROC {max(areas):.3f} on {selection.name}, so "
                f"that chooses none of them; at layer {layer} the classes lie furthest apart. "
                "Which layer steers best is found by a sweep of doses.",
            )
    what = f"index {row}" if isinstance(row, int) else f"rows: {row}"
    card = VectorCard(
        name=name,
        description=description,
        method=f"{method} ({what}, seed={seed})",
        source=_SOURCES[method],
        layers=kept,
        layer=layer,
        hidden=data.hidden,
        site=site,
        positions=positions or (f"index {row}" if isinstance(row, int) else row),
        residual_norms=tuple(norms),
        model=model
        or ModelRef(
            name=data.model or "unknown",
            sha256=data.model_sha256 or (fingerprint_model(data.model) if data.model else None),
        ),
        training=VectorTraining(
            dataset=data.name,
            sha256=data.sha256,
            n_positive=data.n_positive,
            n_negative=data.n_negative,
            n_groups=len(set(data.groups)),
            on_policy=on_policy,
        ),
        separation=tuple(areas),
        seen=list_seen(kept, training=data, selection=selection),
        notes=one_or_several(notes),
        command=command,
    )
    return Vector.from_raw(np.stack(units), norm=lengths, card=card)


def _direction(rows: PickedRows, method: VectorMethod, seed: int) -> NDArray[np.float64]:
    """Unit normal (hidden,) float64 that points to the positive class."""
    if method == "caa":
        rng = np.random.default_rng(seed)
        high, low = make_pairs(rows.positive, rows.groups, n_pairs=None, rng=rng)
        raw = (rows.x[high].astype(np.float64) - rows.x[low]).mean(axis=0)
    else:
        estimators: dict[str, DirectionEstimator] = {
            "mean_difference": MeanDifferenceProbe(scaling="none"),
            "logistic": LogisticProbe(),
            "pca": LATProbe(random_state=seed, scaling="none"),
        }
        fitted = estimators[method].fit(rows.x, rows.positive, rows.groups)
        raw = np.asarray(fitted.coef_, dtype=np.float64) / fitted.scale_
    norm = float(np.linalg.norm(raw))
    if not norm > 0.0:
        raise SpecError(f"method={method!r}: the direction is zero; the classes do not differ")
    return np.asarray(raw / norm)


def rows_at(data: ActivationSet, layer: int, rows: VectorRows) -> PickedRows:
    """What `rows` picks of every sample at a layer."""
    if rows == "tokens":
        return PickedRows(*data.rows(layer))
    if rows in ("mean", "last"):
        picked = data.pooled(layer, str(rows))
    elif isinstance(rows, int) and not isinstance(rows, bool):
        sequences = data.sequences(layer)
        for sample, sequence in zip(data.ids, sequences, strict=True):
            if not -len(sequence) <= rows < len(sequence):
                raise SpecError(
                    f"rows={rows!r}: sample {sample} has {len(sequence)} tokens; capture more of it"
                )
        picked = np.stack([sequence[rows] for sequence in sequences])
    else:
        raise SpecError(f"rows={rows!r}; allowed are tokens, mean, last and an index such as -2")
    return PickedRows(picked, data.labels, np.array(data.groups))


_CONTROLS: Final = 20


class VectorScore(NamedTuple):
    """AUROC of one layer of a steering vector on a labelled set."""

    layer: int
    auroc: float
    """Of the projection on the direction."""
    separation: float
    """Distance of the class means in pooled standard deviations."""
    length: float
    """Distance of the class means along the direction, in units of the residual stream."""
    random_auroc: float
    """Largest AUROC, on either side of 0.5, of 20 random directions: what chance reaches."""
    n_seen: int | None = None
    """Samples of the set that made the vector; None where its card or the set does not tell."""


@judged_arguments
def evaluate_vector(
    vector: Vector,
    data: ActivationSet,
    *,
    rows: VectorRows = "mean",
    allow_seen: bool = False,
    seed: int = 0,
) -> tuple[VectorScore, ...]:
    """Measure how well a vector separates the classes of a set, at each layer that both have.

    A direction that separates need not steer: see `dose_response` for what it does to a model.

    Args:
        vector: with a direction at one of the set's layers at least.
        data: with both classes; label 1 is what a positive scale moves to.
        rows: what one row of a sample is.
        allow_seen: measure also on samples that the vector was found or its layer chosen on.
        seed: of the random directions.

    Raises:
        SpecError: no common layer, another width, a class is missing, or samples made the vector.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, evaluate_vector, extract_vector

        train, test = (ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "test"))
        vector = extract_vector(train, name="mine/planted", rows="mean")
        best = max(evaluate_vector(vector, test), key=lambda score: score.auroc)
        assert best.layer == 1
        assert best.auroc > best.random_auroc
        ```
    """
    shared = [n for n in vector.layers if n in data.layers]
    if not shared or vector.card.hidden != data.hidden or not (data.n_positive and data.n_negative):
        raise SpecError(
            f"{data.name}: layers {list(data.layers)} of width {data.hidden}, {data.n_positive} "
            f"positive and {data.n_negative} negative; vector {vector.name!r} allows layers "
            f"{list(vector.layers)} of width {vector.card.hidden}, and both classes"
        )
    if not allow_seen:
        refuse_seen(vector, data)
    rng = np.random.default_rng(seed)
    n_seen, made = count_seen(vector, data), []
    for layer in shared:
        found = rows_at(data, layer, rows)
        x = found.x.astype(np.float64)
        along = x @ vector.direction[vector.layers.index(layer)].astype(np.float64)
        chance = [
            auroc(found.positive, x @ rng.standard_normal(data.hidden)) for _ in range(_CONTROLS)
        ]
        made.append(
            VectorScore(
                layer=layer,
                auroc=auroc(found.positive, along),
                separation=separation(along, found.positive),
                length=found.distance(along),
                random_auroc=max(max(a, 1.0 - a) for a in chance),
                n_seen=n_seen,
            )
        )
    return tuple(made)


Floats = NDArray[np.float64]


def erase(
    x: ArrayLike,
    direction: ArrayLike,
    *,
    covariance: ArrayLike | None = None,
    mean: ArrayLike | None = None,
) -> Floats:
    """Remove one direction from rows (rows, hidden).

    Args:
        x: (rows, hidden).
        direction: (hidden,). Without a covariance it is projected out. With one it is the
            covariance of the rows with the concept, and what a linear predictor could read of
            the concept is taken out with the least change (LEACE of rank one).
        covariance: (hidden, hidden) of the rows that the concept was measured on.
        mean: (hidden,) of those rows, which a covariance needs: without it, what is taken out would
            move the mean.

    Raises:
        SpecError: the direction is zero, or a covariance comes without a mean.

    Source:
        LEACE: arXiv:2306.03819.

    Example:
        ```python
        import numpy as np

        from inspect_lens.train import erase

        rows = np.random.default_rng(0).standard_normal((10, 8))
        left = erase(rows, np.eye(8)[0])
        assert np.allclose(left[:, 0], 0.0)
        ```
    """
    if (covariance is None) != (mean is None):
        raise SpecError(
            "covariance and mean: one without the other; allowed are both, of the same rows, or "
            "neither; a covariance without the mean moves the mean of what is left"
        )
    rows, w = np.asarray(x, dtype=np.float64), np.asarray(direction, dtype=np.float64)
    reader = w if covariance is None else np.linalg.pinv(
        np.asarray(covariance, dtype=np.float64), hermitian=True
    ) @ w  # fmt: skip
    strength = float(w @ reader)
    if strength <= 0.0:
        raise SpecError("direction: is zero; allowed is a direction; the concept is not in x")
    centre = 0.0 if mean is None else np.asarray(mean, dtype=np.float64)
    return np.asarray(rows - np.outer((rows - centre) @ reader, w) / strength)


_SOURCE: Final = "arXiv:2507.21509"


def shown_pairs(
    data: ActivationSet, *, trait: str, coherence: str, threshold: float
) -> ActivationSet:
    """The pairs of responses in which a judge saw what the prompts asked for."""
    scores = {}
    for column in (trait, coherence):
        try:
            scores[column] = np.array([float(value) for value in data.key(column)])
        except ValueError as error:
            if isinstance(error, SpecError):
                raise
            raise SpecError(
                f"{column}: {data.name} holds values that are no numbers ({error}); allowed are "
                "scores of a judge from 0 to 100; leave samples without a score out"
            ) from None
    members: dict[str, dict[bool, list[int]]] = {}
    for i, (group, label) in enumerate(zip(data.groups, data.labels.tolist(), strict=True)):
        members.setdefault(group, {True: [], False: []})[label].append(i)
    kept: list[int] = []
    for group, sides in members.items():
        if [len(side) for side in sides.values()] != [1, 1]:
            raise SpecError(
                f"group {group!r}: {len(sides[True])} samples for the trait and "
                f"{len(sides[False])} against it; allowed is one of each; name groups by question, "
                "prompt pair and rollout"
            )
        high, low = sides[True][0], sides[False][0]
        shown = scores[trait][high] >= threshold and scores[trait][low] < 100.0 - threshold
        if shown and min(scores[coherence][[high, low]]) >= 50.0:
            kept += [high, low]
    if not kept:
        raise SpecError(
            f"{data.name}: none of {len(members)} pairs shows the trait under one prompt and not "
            "under the other, coherently; check the judge, or lower the threshold"
        )
    return data.subset(sorted(kept))


def persona_vector(
    data: ActivationSet,
    *,
    name: str,
    trait: str = "trait",
    coherence: str = "coherence",
    threshold: float = 50.0,
    **options: Any,
) -> Vector:
    """Difference of mean responses with and without a trait, in every layer.

    A pair is the answer to one question under a system prompt for the trait and under one against
    it. It is kept where a judge saw the trait in the first (at least `threshold`), not in the
    second (below 100 - `threshold`), and both as coherent (at least 50).

    Rows are means over the tokens of a response (collect with `positions="completion"`; for the
    source's other two kinds, `prompt` and `last_prompt`). The source chooses the layer by how much
    steering with it changes the trait; a `selection` set chooses it by separation instead.

    Args:
        data: the model's own responses; label 1 under the prompt for the trait. A group is a pair:
            the question, the number of the prompt pair, and that of the rollout.
        name: `<model>/<name>`, for the card.
        trait: column with the judge's score of the trait, 0 to 100.
        coherence: column with the judge's score of coherence, 0 to 100.
        threshold: of the trait.
        **options: of `extract_vector`, such as `layer` and `description`.

    Raises:
        SpecError: a column is missing or no number, a group is no pair, or none is kept; or as
            `extract_vector`.

    Example:
        ```python
        import numpy as np

        from inspect_lens.train import from_arrays, persona_vector

        rng, labels = np.random.default_rng(0), np.arange(40) % 2
        data = from_arrays(
            rng.standard_normal((40, 1, 8)) + labels[:, None, None],
            labels,
            layers=[3],
            groups=[str(i // 2) for i in range(40)],
            columns={"trait": labels * 90, "coherence": [95] * 40},
        )
        vector = persona_vector(data, name="mine/cheerful", layer=3)
        assert vector.layers == (3,)
        ```
    """
    kept = shown_pairs(data, trait=trait, coherence=coherence, threshold=threshold)
    notes = (
        f"{len(kept) // 2} of {len(data) // 2} pairs kept: trait at least {threshold:g} and below "
        f"{100 - threshold:g}, coherence at least 50, by column {trait!r}",
        f"source of the pipeline: {_SOURCE}",
        *one_or_several(options.pop("notes", ())),
    )
    return extract_vector(
        kept, name=name, method="mean_difference", rows="mean", notes=notes, **options
    )
