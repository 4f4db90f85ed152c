"""What a probe does on samples that it has not seen, where there are too few to put some aside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata
from sklearn.base import BaseEstimator
from sklearn.model_selection import StratifiedGroupKFold

from inspect_lens.errors import SpecError
from inspect_lens.probe import FitRows, Interval, ProbeCard, auroc, count_groups, delong_interval
from inspect_lens.train.families._binary import BinaryEstimator
from inspect_lens.train.sets._dataset import ActivationSet
from inspect_lens.train.sets._splits import (
    require_disjoint,
    require_other_samples,
    split_by_group,
)

from ._select import SelectBy, select_layer

__all__ = ["CrossValidated", "FoldScore", "cross_validate_probe"]


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

    With 30 layers and 200 samples, the best layer is the best by luck, too: its AUROC on the
    samples that chose it is too high, and a held-out set leaves few to train on. Here each fold in
    turn is put aside with whole groups; on the rest `select_layer` fits and chooses, on a quarter
    of its own; and what is reported is the AUROC of the folds that were aside. It is of the
    procedure and not of one probe, so train that with `train_probe` on all of the set.

    Scores of different folds come from different probes, so what is put together is their ranks
    within the fold, as for the words in `inspect_lens.probe.cross_validated_words`.

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

    Returns:
        AUROC, interval, and each fold.

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
        require_other_samples(data, control)
        require_disjoint(data, control)
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
