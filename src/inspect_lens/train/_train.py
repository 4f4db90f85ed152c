"""From activation sets to a probe with its card: fit, choose the layer, calibrate, evaluate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sklearn.base import BaseEstimator

from inspect_lens._base.arguments import judged_arguments, one_or_several, refuse_idle, warn_caller
from inspect_lens.errors import SpecError
from inspect_lens.probe import (
    FOLLOWED_FLOOR,
    RECALL_FLOOR,
    AnyProbe,
    FitRows,
    ModelRef,
    ProbeCard,
    TrainingFacts,
    fingerprint_model,
)
from inspect_lens.spec import Positions

from .families._binary import BinaryEstimator
from .families._logistic import as_family
from .fitting._fit import rows_of
from .fitting._thresholds import calibrate_thresholds
from .judging._domains import transfer_statement
from .judging._evaluate import evaluate_probe
from .judging._select import SelectBy, select_layer
from .sets._dataset import ActivationSet
from .sets._splits import (
    list_seen,
    near_copies,
    require_disjoint,
    require_followed,
    require_other_samples,
    require_same_origin,
    split_by_group,
    split_control,
)

__all__ = ["train_probe"]


@judged_arguments
def train_probe(
    estimator: BinaryEstimator | BaseEstimator,
    train: ActivationSet,
    *,
    name: str,
    control: ActivationSet,
    selection: ActivationSet | None = None,
    held_out: Sequence[ActivationSet] = (),
    disjoint: Mapping[str, str] | None = None,
    layers: Sequence[int] | None = None,
    rows: FitRows | None = None,
    pool: str = "mean",
    pools: str | Sequence[str] | None = None,
    positions: Positions | None = None,
    fpr: float = 0.01,
    select_by: SelectBy = "recall",
    recall_floor: float = RECALL_FLOOR,
    behaviour_floor: float = FOLLOWED_FLOOR,
    texts: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
    allow_few: bool = False,
    seed: int = 0,
    model: ModelRef | None = None,
    dropped: int = 0,
    on_policy: bool = True,
    description: str = "",
    notes: str | Sequence[str] = (),
    command: str = "",
) -> AnyProbe:
    """Train a probe, set its threshold, and measure it on held-out sets.

    One direction per layer is fitted on the tokens of `train`; the layer is chosen by its recall
    on `selection` at the rate `fpr` of `control`; the threshold is set on `control`; on each set of
    `held_out` the probe and baselines are only measured, with a verdict (`transfer_statement`). No
    sample of these four may be in another of them.

    A third of the control groups chooses the layer and the others set the threshold, where these
    are enough to show the rate; else all do both, and `Threshold.selected_on` says so. What that
    adds to the rate is in `benchmarks/results/probe-statistics.md`.

    Args:
        estimator: unfitted, such as `LogisticProbe()`, or a classifier of scikit-learn whose
            score is linear, see `SklearnProbe`.
        train: samples to fit; a part with whole groups is split off when `selection` is None.
        name: `<model>/<name>`, for the card and the folder.
        control: harmless samples written by the same model. Positive ones are left out, and
            `Threshold.n_left_out` counts them.
        selection: samples to choose the layer on.
        held_out: sets to evaluate.
        disjoint: by name of a control or held-out set, the key (`group`, `id`, or a column)
            that keeps it apart from the training and selection sets; `group` by default.
        layers: layers to try; all by default.
        rows: what one row of a fit is: each of the `tokens`, or a sample's `mean` or `last` one;
            by default what the family's source takes. Families that read whole sequences do not
            use it.
        pool: how token scores become one score.
        pools: pools to choose from, with the layer; `pool` alone by default.
        positions: what the masks of the sets select, for scorers; by default the positions of
            `train`, or `completion` where they are not known.
        fpr: false positive rate of the threshold.
        select_by: what the layer is chosen by (`select_layer`).
        recall_floor: recall at the threshold below which the card warns, and so does this.
        behaviour_floor: where labels come from an instruction to be honest or to lie, the least
            share of the answers of each kind that has to do what their label says.
        texts: of the training and held-out sets, for baselines (`measure_baselines`).
        allow_few: accept a control set that is too small to verify `fpr`; where its samples are
            enough and its groups are not, the threshold says so (`Threshold.few_groups`).
        seed: of the split, of the draws that choose the layer, and of random directions.
        model: the model; by default its name is that of `train`, with the fingerprint that
            the set knows, or that of a local folder.
        dropped: samples left out before, to report.
        on_policy: whether the model itself wrote the completions.
        description: what a large score means.
        notes: for the card.
        command: that this run can be repeated with.

    Warns:
        UserWarning: what `ProbeCard.warnings` says, such as a recall below the floor, and samples
            of judged sets that are all but copies of training samples; and sets that were computed
            with another engine, dtype or quantisation than the others.

    Raises:
        SpecError: the model did not do what its instructions asked for (`behaviour_floor`), a group
            straddles two sets, sets are of different models, positions or layers,
            or have the same name, a class is missing, no control sample is negative, or the
            control set is too small.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, LogisticProbe, train_probe

        train, selection, control, test = (
            ActivationSet.load(f"acts/{name}.safetensors")
            for name in ("train", "selection", "control", "test")
        )
        probe = train_probe(
            LogisticProbe(),
            train,
            name="mine/lr",
            selection=selection,
            control=control,
            held_out=[test],
        )
        assert probe.layers == (1,)
        assert probe.card.evaluations[0].auroc > 0.9
        probe.save("probes-of-mine/mine/lr")
        ```
    """
    estimator = as_family(estimator)
    if pools is not None and pool not in one_or_several(pools):
        refuse_idle(train_probe, f"beside pools={pools!r}", pool=pool)
    behaviour = require_followed(train, behaviour_floor)
    if selection is None:
        whole_train = train
        train, selection = split_by_group(train, seed=seed)
        texts = _texts_of_part(texts, whole_train, train)
    whole, control = control, control.negatives()
    _check_sets(train, selection, [control, *held_out], disjoint or {})
    for data in held_out:
        # Else the threshold would have seen what its false positive rate is measured on.
        require_other_samples(control, data)
    card = ProbeCard(
        name=name,
        description=description,
        layers=train.layers[:1],
        hidden=train.hidden,
        positions=positions or train.positions or "completion",
        pool=pool,
        model=model
        or ModelRef(name=train.model, sha256=train.model_sha256 or fingerprint_model(train.model)),
        capture=train.capture,
        notes=(*one_or_several(notes), *filter(None, [behaviour])),
        command=command,
        recall_floor=recall_floor,
    )
    choosing, setting = split_control(control, fpr, seed=seed)
    chosen = select_layer(
        estimator, train, selection, card=card, layers=layers, rows=rows, seed=seed,
        control=choosing, select_by=select_by, fpr=fpr, pools=pools or (pool,),
    )  # fmt: skip
    probe = chosen.probe
    more = {
        "control_sha256": control.sha256,
        "n_left_out": len(whole) - len(control),
        "selected_on": setting is choosing and chosen.by == "recall",
    }
    thresholds = tuple(
        threshold.model_copy(update=more)
        for threshold in calibrate_thresholds(probe, setting, fpr, allow_few=allow_few)
    )
    copies = near_copies(probe, [train, selection], [control, *held_out], disjoint=disjoint)
    facts = TrainingFacts(
        dataset=train.name,
        sha256=train.sha256,
        n_positive=train.n_positive,
        n_negative=train.n_negative,
        n_tokens=sum(int(m.sum()) for m in train.mask),
        n_groups=len(set(train.groups)),
        selection_n=len(selection),
        dropped=dropped,
        on_policy=on_policy,
        rows=rows_of(estimator, rows),
        selected_by=chosen.by or "",
        tied_layers=chosen.tied,
        near_duplicates=tuple(text for texts in copies.values() for text in texts),
        computed_otherwise=chosen.computed_otherwise,
    )
    seen = list_seen(probe.layers, training=train, selection=selection, control=control)
    probe = probe.with_card(sweep=chosen.sweep, thresholds=thresholds, training=facts, seen=seen)
    evaluations = tuple(
        evaluate_probe(
            probe,
            data,
            control=control,
            train=train,
            texts=texts,
            disjoint_by=(disjoint or {}).get(data.name, "group"),
            seed=seed,
        )
        for data in held_out
    )
    verdicts = tuple(
        transfer_statement(train.name, e, copies=copies.get(e.name, ()))
        for e in evaluations
        if e.auroc is not None
    )
    made = probe.with_card(evaluations=evaluations, transfers=verdicts)
    told = {*facts.computed_otherwise, *(t for e in evaluations for t in e.computed_otherwise)}
    for text in made.card.warnings:
        if text not in told:
            warn_caller(text)
    return made


def _texts_of_part(
    texts: Mapping[str, Mapping[str, Sequence[str]]] | None,
    whole: ActivationSet,
    part: ActivationSet,
) -> Mapping[str, Mapping[str, Sequence[str]]] | None:
    """Texts by set, with those of the part in the place of those of the whole."""
    place = {name: i for i, name in enumerate(whole.ids)}
    picks = [place[name] for name in part.ids]
    found = {kind: dict(by_set) for kind, by_set in (texts or {}).items()}
    for by_set in found.values():
        if len(by_set.get(whole.name, ())) == len(whole):
            by_set[part.name] = [by_set[whole.name][i] for i in picks]
    return found if texts is not None else None


def _check_sets(
    train: ActivationSet,
    selection: ActivationSet,
    judged: Sequence[ActivationSet],
    disjoint: Mapping[str, str],
) -> None:
    """Same model, tokens, layers and width everywhere; nothing shared between fit and judgement."""
    # Names are unique, too: texts of baselines, and all that a card says of a set, go by them.
    names = [data.name for data in judged]
    unknown = sorted(set(disjoint) - set(names))
    if unknown or len(set(names)) != len(names):
        raise SpecError(
            f"disjoint={dict(disjoint)!r} for the sets {names}; allowed are unique set names, and "
            "keys that are among them; correct the names"
        )
    for data in (selection, *judged):
        require_same_origin(train, data)
        if (data.layers, data.hidden) != (train.layers, train.hidden):
            raise SpecError(
                f"{data.name}: layers {data.layers}, width {data.hidden}; allowed is what "
                f"{train.name!r} has: {train.layers}, {train.hidden}; collect the same layers of "
                "all sets"
            )
    for data in judged:
        for seen in (train, selection):
            require_other_samples(seen, data)
            require_disjoint(seen, data, key=disjoint.get(data.name, "group"))
    every = [train.name, selection.name, *names]
    twice = sorted({name for name in every if every.count(name) > 1})
    if twice:
        raise SpecError(
            f"{twice[0]}: the name of {every.count(twice[0])} of the training, selection, control "
            "and held-out sets; allowed are unique names; rename one (a store has the name of its "
            "folder)"
        )
