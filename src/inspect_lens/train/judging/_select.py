"""Choosing the layer on data that neither trains nor tests the probe, and cross-validation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata
from sklearn.base import BaseEstimator, clone
from sklearn.model_selection import StratifiedGroupKFold

from inspect_lens._base.arguments import judged_arguments, one_or_several, refuse_idle
from inspect_lens.errors import SpecError
from inspect_lens.probe import (
    AnyProbe,
    FitRows,
    Interval,
    LayerScore,
    ProbeCard,
    auroc,
    compare_auroc,
    count_groups,
    delong_interval,
    recall_draws,
)
from inspect_lens.spec import check_word
from inspect_lens.train.families._binary import BinaryEstimator
from inspect_lens.train.families._ensemble import EnsembleProbe, layers_at
from inspect_lens.train.families._logistic import LogisticProbe, as_family
from inspect_lens.train.fitting._fit import fit_layers, fit_on
from inspect_lens.train.sets._dataset import ActivationSet
from inspect_lens.train.sets._splits import (
    require_apart,
    require_disjoint,
    require_other_samples,
    require_same_origin,
    split_by_group,
    warn_otherwise,
)

__all__ = ["CrossValidated", "FoldScore", "LayerChoice", "cross_validate_probe", "select_layer"]

SelectBy = Literal["recall", "auroc"]
"""What a layer is chosen by."""


class LayerChoice(NamedTuple):
    """Result of `select_layer`: the chosen layer, and all that were tried."""

    probe: AnyProbe
    """Fitted on the training set at the chosen layer, or the layers of an ensemble, without
    threshold."""
    sweep: tuple[LayerScore, ...]
    """Every layer, measured on the selection set."""
    by: SelectBy | None = None
    """What it was chosen by; None where nothing was, as of an ensemble."""
    tied: tuple[int, ...] = ()
    """Other layers that the selection set does not show to be worse than the best."""
    computed_otherwise: tuple[str, ...] = ()
    """As `TrainingFacts` has it."""


@judged_arguments
def select_layer(
    estimator: BinaryEstimator | BaseEstimator,
    train: ActivationSet,
    selection: ActivationSet,
    *,
    card: ProbeCard,
    control: ActivationSet | None = None,
    select_by: SelectBy | None = None,
    fpr: float = 0.01,
    layers: Sequence[int] | None = None,
    pools: str | Sequence[str] | None = None,
    rows: FitRows | None = None,
    n_draws: int = 400,
    seed: int = 0,
) -> LayerChoice:
    """Fit one probe per layer and keep the one that does best on the selection set.

    By `recall`, that is the layer whose threshold, set on `control` for the rate `fpr`, lies below
    most positives of the selection set, in the mean over draws of groups of both sets. By `auroc`,
    the AUROC on the selection set counts, though a layer with a larger one can miss most positives
    at a rate of 1%.

    Layers that the selection set does not show to be worse than the best count as equal
    (`LayerChoice.tied` names them): recalls within one standard error of it, or one positive
    sample; and AUROCs whose paired difference to it has 0 in its 95% interval (`compare_auroc`). Of
    these the one wins whose positives lie farthest from both the selection set's and the control
    set's negatives, in pooled standard deviations; then the lowest layer.

    An `EnsembleProbe` reads several layers at once, so nothing is chosen: it is fitted on
    `layers`, or at 20, 35, 50, 65 and 80% of the set's layers, and the sweep is that of its base.

    Args:
        estimator: unfitted, one of scikit-learn too; it is cloned for each layer.
        train: what the directions are fitted on.
        selection: what the layer is chosen on; shares no group and no sample with `train`.
        card: facts for the probe; its layers are replaced by the chosen one.
        control: harmless samples, which may be in no other set; positive ones are left out.
        select_by: `recall`, which needs a control set and is the default with one, or `auroc`.
        fpr: false positive rate at which recall counts.
        layers: layers to try; all of `train` by default.
        pools: pools to try at each layer, such as `("mean", "max")`; that of the card by default.
        rows: what one row of a fit is, for families that read rows; that of the family's source by
            default.
        n_draws: of both sets, for the recall and its interval.
        seed: of the draws.

    Source:
        One-standard-error rule, for recalls: Breiman et al. 1984, section 3.4.3.

    Raises:
        SpecError: a group straddles the sets, one of them has a sample of another, they are of
            different models or positions, a class is missing, there is no layer to try, no control
            set for `recall`, or several pools for a family that learns its own.

    Warns:
        UserWarning: the sets were computed with different engines, dtypes or quantisations.

    Example:
        ```python
        from inspect_lens.probe import ProbeCard
        from inspect_lens.train import ActivationSet, LDAProbe, select_layer

        train, selection, control = (
            ActivationSet.load(f"acts/{name}.safetensors")
            for name in ("train", "selection", "control")
        )
        card = ProbeCard(name="mine/lda", layers=(0,), hidden=32)
        choice = select_layer(LDAProbe(), train, selection, card=card, control=control)
        assert choice.probe.layers == (1,)
        assert [score.layer for score in choice.sweep] == [0, 1, 2]
        print([(score.recall, score.auroc) for score in choice.sweep])
        ```
    """
    estimator = as_family(estimator)
    by = _how(select_by, control)
    if control is None:
        refuse_idle(select_layer, "without control=", fpr=fpr, n_draws=n_draws)
    require_apart(train, selection)
    if control is not None:
        control = control.negatives()
        for data in (train, selection):  # groups may be shared, by a key that keeps them apart
            require_same_origin(data, control)
            require_other_samples(data, control)
    otherwise = warn_otherwise(selection, train)
    otherwise += warn_otherwise(control, train, selection) if control else ()
    for data in (train, selection):
        if 0 in (data.n_positive, data.n_negative):
            raise SpecError(
                f"{data.name}: {data.n_positive} positive and {data.n_negative} negative samples; "
                "allowed are both classes; check the labels"
            )
    tried = tuple(train.layers if layers is None else sorted(set(layers)))
    single: BinaryEstimator = estimator
    if isinstance(estimator, EnsembleProbe):
        single = LogisticProbe() if estimator.base is None else estimator.base
    pooled = tuple(dict.fromkeys(one_or_several(pools or card.pool)))
    if len(pooled) > 1 and (single.reads == "sequences" or single is not estimator):
        raise SpecError(
            f"pools={list(pooled)}: {estimator!r} has one of its own; allowed are several pools "
            "for families of one direction; leave pools out"
        )
    measure = partial(_measure, control=control, fpr=fpr, n_draws=n_draws, seed=seed)
    fitted: list[_Tried] = []
    for layer, fit in fit_layers(single, train, tried, rows=rows):
        at_layer = card.model_copy(update={"layers": (layer,), "pool": pooled[0]})
        probe = fit.to_probe(at_layer)
        for pool in pooled:
            if pool != pooled[0]:
                probe = probe.with_card(pool=pool)
            scores = selection.scores(probe)
            fitted.append(_Tried(measure(probe, layer, selection, scores), probe, scores))
    fitted.sort(key=lambda tried: tried.score.layer)
    sweep = tuple(tried.score for tried in fitted)
    if isinstance(estimator, EnsembleProbe):
        read = tried if layers is not None else tuple(tried[i] for i in layers_at(len(tried)))
        joint = clone(estimator).set_params(n_layers=len(read))
        whole = fit_on(joint, train, read, rows=rows)
        return LayerChoice(
            whole.to_probe(card.model_copy(update={"layers": read})), sweep,
            computed_otherwise=otherwise,
        )  # fmt: skip
    near = _as_good(fitted, selection, by)
    best = max(near, key=lambda tried: (tried.score.separation, -tried.score.layer))
    tied = sorted({tried.score.layer for tried in near} - {best.score.layer})
    return LayerChoice(best.probe, sweep, by, tuple(tied), otherwise)


class _Tried(NamedTuple):
    """A probe of one layer, and how it did on the selection set."""

    score: LayerScore
    probe: AnyProbe
    scores: NDArray[np.float64]
    """(samples,) of the selection set."""


def _as_good(fitted: list[_Tried], selection: ActivationSet, by: SelectBy) -> list[_Tried]:
    """The best, and those that the selection set does not show to be worse."""
    if by == "recall":
        values = [tried.score.recall or 0.0 for tried in fitted]
        interval = fitted[values.index(max(values))].score.recall_interval
        error = 0.0 if interval is None else max(max(values) - interval.low, 0.0) / 1.96
        # One positive more or less of the selection set is no difference, either.
        enough = max(values) - max(error, 1.0 / selection.n_positive)
        return [tried for tried, value in zip(fitted, values, strict=True) if value >= enough]
    if min(selection.n_positive, selection.n_negative) < 2:  # which shows nothing
        return fitted
    first = max(fitted, key=lambda tried: tried.score.auroc)
    compare = partial(compare_auroc, selection.labels, first.scores, groups=selection.groups)
    return [tried for tried in fitted if compare(tried.scores).interval.low <= 0.0]


def _how(select_by: SelectBy | None, control: ActivationSet | None) -> SelectBy:
    if select_by is not None:
        check_word("select_by", select_by, SelectBy)
    if select_by == "recall" and control is None:
        raise SpecError(
            "select_by='recall': there is no control set; allowed is control=, harmless samples "
            "that the threshold would be set on; pass one, or select_by='auroc'"
        )
    return select_by or ("auroc" if control is None else "recall")


def _measure(
    probe: AnyProbe,
    layer: int,
    selection: ActivationSet,
    scores: NDArray[np.float64],
    *,
    control: ActivationSet | None,
    fpr: float,
    n_draws: int,
    seed: int,
) -> LayerScore:
    labels = selection.labels
    made = LayerScore(
        layer=layer,
        pool=probe.pool,
        auroc=auroc(labels, scores),
        separation=separation(scores, labels),
        auroc_interval=delong_interval(labels, scores, groups=selection.groups),
    )
    if control is None:
        return made
    positive, harmless = scores[labels], control.scores(probe)
    draws = recall_draws(
        positive, harmless, fpr, n_draws=n_draws, seed=seed,
        groups=[selection.groups[i] for i in np.flatnonzero(labels)],
        control_groups=control.groups,
    )  # fmt: skip
    low, high = np.quantile(draws, [0.025, 0.975]).tolist()
    both = np.concatenate([positive, harmless])
    of_both = np.arange(both.size) < positive.size
    return made.model_copy(
        update={
            "separation": min(made.separation, separation(both, of_both)),
            # A smoothed estimate, which one lucky control sample moves little.
            "recall": float(draws.mean()),
            "recall_interval": Interval(low=low, high=high, method="bootstrap of both sets"),
            "auroc_control": auroc(of_both, both),
        }
    )


def separation(scores: NDArray[np.float64], labels: NDArray[np.bool_]) -> float:
    """Difference of class means over the pooled standard deviation; finite always."""
    high, low = scores[labels], scores[~labels]
    spread = math.sqrt((float(high.var()) + float(low.var())) / 2.0)
    gap = float(high.mean() - low.mean())
    return gap / max(spread, 1e-12 * max(1.0, abs(gap)))


class FoldScore(NamedTuple):
    """What one fold's probe did on that fold."""

    layers: tuple[int, ...]
    """Chosen without the fold; several of an ensemble."""
    auroc: float
    n_positive: int
    n_negative: int


class CrossValidated(NamedTuple):
    """Result of `cross_validate_probe`."""

    auroc: float
    """Of `ranks`: of all samples, each scored by a probe that has not seen its group."""
    interval: Interval
    """Its 95% interval, which takes the probes as given and groups as independent."""
    folds: tuple[FoldScore, ...]
    """Each by itself. Layers that differ from fold to fold say that the samples do not tell which
    layer is best."""
    ranks: NDArray[np.float64]
    """(samples,) in (0, 1): the mid-rank of a sample's score within its fold, over its size."""


@judged_arguments
def cross_validate_probe(
    estimator: BinaryEstimator | BaseEstimator,
    data: ActivationSet,
    *,
    control: ActivationSet | None = None,
    select_by: SelectBy | None = None,
    fpr: float = 0.01,
    layers: Sequence[int] | None = None,
    pool: str = "mean",
    rows: FitRows | None = None,
    folds: int = 5,
    seed: int = 0,
) -> CrossValidated:
    """Judge a family of probes on a small set, with the choice of the layer inside each fold.

    Each fold in turn is put aside with whole groups; on the rest `select_layer` fits and chooses,
    on a quarter of its own; and what is reported is the AUROC of the folds that were aside. It is
    of the procedure and not of one probe, so train that with `train_probe` on all of the set.

    Scores of different folds come from different probes, so their ranks within the fold are put
    together.

    Args:
        estimator: unfitted, one of scikit-learn too.
        data: the samples. Those of one group are never on both sides, and copies of a sample, as
            far as the set knows their content, are refused where they are.
        control: harmless samples, for `select_layer`; they share no group and no sample with
            `data`.
        select_by: what a layer is chosen by, see `select_layer`.
        fpr: false positive rate at which recall counts.
        layers: layers to try; all of the set by default.
        pool: how token scores become one score.
        rows: what one row of a fit is, for families that read rows.
        folds: at least 2, and at most as many as the groups of either class.
        seed: of the folds, and of the split inside each.

    Source:
        Nested cross-validation: Varma and Simon 2006, BMC Bioinformatics 7:91.

    Raises:
        SpecError: too few samples or groups for so many folds, sets or folds that share a sample,
            or as for `select_layer`.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, LDAProbe, cross_validate_probe

        data = ActivationSet.load("acts/train.safetensors")
        found = cross_validate_probe(LDAProbe(), data, folds=4)
        print(f"{found.auroc:.3f} [{found.interval.low:.3f}, {found.interval.high:.3f}]")
        assert [fold.layers for fold in found.folds] == [(1,)] * 4
        ```
    """
    counts = count_groups(data.labels, data.groups)
    fewest = min(counts.positive, counts.negative)
    if not 2 <= folds <= fewest:
        raise SpecError(
            f"folds={folds}: {data.name} has {fewest} groups of the rarer class; allowed are 2 "
            "folds to as many as these groups; use fewer folds, or finer groups"
        )
    if control is not None:
        control = control.negatives()
        require_disjoint(data, control)
        require_other_samples(data, control)
    card = ProbeCard(
        name=f"{data.name}/fold", layers=data.layers[:1], hidden=data.hidden, pool=pool
    )
    splitter = StratifiedGroupKFold(n_splits=folds, shuffle=True, random_state=seed)
    ranks, made = np.full(len(data), np.nan), []
    for rest, aside in splitter.split(np.zeros(len(data)), data.labels, data.groups):
        seen, judged = data.subset(rest), data.subset(aside, name=f"{data.name}/fold")
        require_other_samples(seen, judged)
        train, selection = split_by_group(seen, seed=seed)
        chosen = select_layer(
            estimator, train, selection, card=card, control=control, select_by=select_by, fpr=fpr,
            layers=layers, rows=rows, seed=seed,
        )  # fmt: skip
        scores = judged.scores(chosen.probe)
        ranks[aside] = (rankdata(scores) - 0.5) / len(aside)
        area = auroc(judged.labels, scores)
        made.append(FoldScore(chosen.probe.layers, area, judged.n_positive, judged.n_negative))
    return CrossValidated(
        auroc=auroc(data.labels, ranks),
        interval=delong_interval(data.labels, ranks, groups=data.groups),
        folds=tuple(made),
        ranks=ranks,
    )
