"""A probe of one model made into a probe of another, by a map between their streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import RidgeCV
from sklearn.metrics import r2_score
from sklearn.model_selection import GroupKFold, GroupShuffleSplit
from sklearn.preprocessing import StandardScaler

from inspect_lens._base.arguments import judged_arguments, refuse_idle, warn_caller
from inspect_lens.errors import SpecError
from inspect_lens.probe import ModelRef, Probe
from inspect_lens.train.sets._dataset import ActivationSet
from inspect_lens.train.sets._splits import (
    require_other_samples,
    require_same_origin,
    warn_otherwise,
)

from ._thresholds import calibrate_thresholds

__all__ = ["CarriedProbe", "transfer_probe"]

_PENALTIES: Final = tuple(10.0 ** np.arange(-1, 7))
_WEAK: Final = 0.5
"""Share of the score's variance below which the map is said to be of little use. Ours."""
_FOLDS: Final = 5

Floats = NDArray[np.float64]


class CarriedProbe(NamedTuple):
    """A probe for another model, and how well its scores follow those of the first."""

    probe: Probe
    """Reads the other model. Its threshold is that of the control set, if one was given."""
    r2: float
    """Share of the variance of the first probe's scores that the carried one explains, on pairs
    that the map was not fitted on; 0 or less where it explains nothing."""
    n_pairs: int
    """Samples that both models read."""
    n_held: int
    """Of these, what `r2` was measured on: whole groups."""
    penalty: float
    """Of the ridge regression, chosen by cross-validation."""


@judged_arguments
def transfer_probe(
    probe: Probe,
    source: ActivationSet,
    target: ActivationSet,
    *,
    layer: int,
    name: str = "",
    control: ActivationSet | None = None,
    fpr: float = 0.01,
    penalties: Sequence[float] = _PENALTIES,
    allow_few: bool = False,
    seed: int = 0,
) -> CarriedProbe:
    """Translate a linear probe to another model, with texts that both models have read.

    An affine map from the target's stream to that of the source is fitted by ridge regression on
    the mean of each sample's tokens, and the probe is read through it, which is the same as a
    regression of the probe's score on the target's stream. Labels take no part: any text will do,
    as long as it holds what the probe is about.

    The map is one more thing that may fail. So read `r2`, set a threshold on control samples of the
    target, and judge the probe on labelled samples of the target (`evaluate_probe`).

    Args:
        probe: linear, of one layer, of the source's model.
        source: what the first model makes of the texts; holds the probe's layer.
        target: what the other model makes of the same texts, in the same order. Samples are
            compared by content where both sets know it, else by id.
        layer: of the target to read; choose it by `r2`, which needs no labels.
        name: of the new probe; that of the old one with the target's model by default.
        control: harmless samples of the target's model, for the threshold; positive ones are left
            out. None leaves the probe without a threshold.
        fpr: false positive rate of the threshold.
        penalties: of the squared weights of standardised rows, to choose from.
        allow_few: accept a control set that is too small to show `fpr`.
        seed: of the pairs that are held back.

    Returns:
        The probe and the quality of the map. The card keeps method and training facts of the
        first probe; what was measured with the first model is dropped, and a note names both.

    Raises:
        SpecError: the sets do not pair, a layer is missing, there are fewer than 20 groups, the
            probe has several layers, or control samples are of another model or among the pairs.

    Warns:
        UserWarning: `r2` is below 0.5, or another engine, dtype or quantisation computed `control`
            than `target`.

    Source:
        Affine maps between the streams of language models: arXiv:2503.04429, arXiv:2506.06609.

    Example:
        ```python
        import numpy as np

        from inspect_lens.probe import auroc
        from inspect_lens.train import ActivationSet, LDAProbe, train_probe, transfer_probe

        train, control, test = (
            ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "control", "test")
        )
        probe = train_probe(LDAProbe(), train, name="mine/lda", control=control)
        # The other model here is the same one with its axes turned.
        turn = np.linalg.qr(np.random.default_rng(0).normal(size=(32, 32)))[0].astype(np.float32)


        def turned(data: ActivationSet) -> ActivationSet:
            return ActivationSet(
                name=data.name,
                model="other",
                layers=data.layers,
                labels=data.labels,
                acts=tuple(a @ turn for a in data.acts),
                groups=data.groups,
                ids=data.ids,
            )


        made = transfer_probe(probe, train, turned(train), layer=probe.layers[0])
        assert made.r2 > 0.9
        assert auroc(test.labels, turned(test).scores(made.probe)) > 0.8
        ```
    """
    _check(probe, source, target, layer)
    if control is None:
        refuse_idle(transfer_probe, "without control=", fpr=fpr, allow_few=allow_few)
    scores = np.array(
        [probe.score(a[:, m], source.layers, pool="mean")
         for a, m in zip(source.acts, source.mask, strict=True)]
    )  # fmt: skip
    rows = target.pooled(layer, "mean").astype(np.float64)
    groups = np.array(source.groups)
    split = GroupShuffleSplit(n_splits=1, test_size=0.2, random_state=seed)
    fit, held = next(split.split(rows, scores, groups))
    scaler, ridge = _fit(rows[fit], scores[fit], groups[fit], penalties)
    r2 = float(r2_score(scores[held], ridge.predict(scaler.transform(rows[held]))))
    # All pairs make the probe; those held back have told what such a map is worth.
    scaler, ridge = _fit(rows, scores, groups, [float(ridge.alpha_)])
    seen = probe.card.seen
    note = (
        f"Carried over from {probe.name} of {source.model} (layer {probe.layers[0]}, sha256 "
        f"{probe.sha256[:12]}) by ridge regression on {len(source)} texts of {source.name} that "
        f"both models read; on texts held back it explains {r2:.2f} of the score's variance."
    )
    own, model = probe.name.rpartition("/")[2], target.model.rstrip("/").rpartition("/")[2]
    facts: dict[str, Any] = {
        "name": name or f"{model}/{own}",
        "method": f"{probe.card.method}; carried over by ridge regression",
        "layers": (layer,),
        "hidden": target.hidden,
        "positions": target.positions or probe.card.positions,
        "model": ModelRef(name=target.model, sha256=target.model_sha256),
        "capture": target.capture,
        # Rows of another model tell nothing about samples of this one; contents do.
        "seen": seen if seen is not None and seen.by == "content" else None,
        "calibration": None,
        "notes": (*probe.card.notes, note),
    } | dict.fromkeys(("sweep", "thresholds", "evaluations", "transfers"), ())
    carried = Probe(
        weight=np.asarray(ridge.coef_)[None],
        bias=np.array([float(ridge.intercept_)]),
        mean=np.asarray(scaler.mean_)[None],
        scale=np.asarray(scaler.scale_)[None],
        card=probe.card.model_copy(update=facts),
    )
    if control is not None:
        require_same_origin(target, control)
        warn_otherwise(control, target)
        harmless = control.negatives()
        require_other_samples(target, harmless)
        thresholds = calibrate_thresholds(carried, control, fpr, allow_few=allow_few)
        if (seen := carried.card.seen) is not None:
            seen = seen.with_control(harmless.shown(seen.by, carried.layers))
        carried = carried.with_card(thresholds=thresholds, seen=seen)
    if r2 < _WEAK:
        warn_caller(
            f"r2={r2:.2f}: the stream of {target.model!r} at layer {layer} explains little of the "
            f"scores of {probe.name!r}, so the new probe finds something else or nothing; try "
            "another layer, or more pairs",
        )
    return CarriedProbe(carried, r2, len(rows), len(held), float(ridge.alpha_))


def _check(probe: Probe, source: ActivationSet, target: ActivationSet, layer: int) -> None:
    if not isinstance(probe, Probe) or len(probe.layers) != 1:
        raise SpecError(
            f"probe: {probe.name!r} is of kind {probe.card.kind!r} with layers "
            f"{list(probe.layers)}; allowed is a linear probe of one layer"
        )
    for data, needed in ((source, probe.layers[0]), (target, layer)):
        if needed not in data.layers:
            raise SpecError(
                f"layer={needed}: {data.name} of {data.model!r} holds {list(data.layers)}; allowed "
                "is one of these; capture that layer too"
            )
    key = "content" if source.contents and target.contents else "id"
    if source.key(key) != target.key(key):
        raise SpecError(
            f"{target.name}: its samples are not those of {source.name!r}, by {key}; allowed are "
            "the same texts in the same order, read by both models"
        )
    n = len(set(source.groups))
    if n < 4 * _FOLDS:
        raise SpecError(
            f"{source.name}: {n} groups; allowed are {4 * _FOLDS} or more, as a fifth is held back "
            "to judge the map; collect more texts"
        )


def _fit(
    rows: Floats, scores: Floats, groups: NDArray[np.str_], penalties: Sequence[float]
) -> tuple[StandardScaler, RidgeCV]:
    scaler = StandardScaler().fit(rows)
    folds = list(GroupKFold(_FOLDS).split(rows, scores, groups))
    return scaler, RidgeCV(alphas=list(penalties), cv=folds).fit(scaler.transform(rows), scores)
