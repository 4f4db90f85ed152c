"""An AUROC of few samples and many layers: no better than chance where there is nothing to find."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from inspect_lens.errors import SpecError
from inspect_lens.probe import ProbeCard
from inspect_lens.train import (
    ActivationSet,
    MeanDifferenceProbe,
    cross_validate_probe,
    select_layer,
    split_by_group,
)

LAYERS = 30


def few(name: str, *, seed: int, signal: float = 0.0, n: int = 200) -> ActivationSet:
    """Two samples of each group; what there is to find is in layer 20."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(n) % 2 == 1)
    acts = rng.normal(size=(n, LAYERS, 1, 8))
    acts[:, 20, 0, 0] += signal * labels
    return ActivationSet(
        name=name, model="m", layers=tuple(range(LAYERS)), acts=tuple(acts), labels=labels,
        groups=tuple(f"{name}-{i // 2}" for i in range(n)),
        ids=tuple(f"{name}-{i}" for i in range(n)),
    )  # fmt: skip


def plain() -> MeanDifferenceProbe:
    return MeanDifferenceProbe(scaling="none")


def test_the_choice_of_the_layer_is_not_in_what_is_reported() -> None:
    """Of noise, the best layer has a large AUROC on what chose it; that of the folds is chance."""
    nested, chosen, inside = [], [], 0
    for seed in range(6):
        data = few("d", seed=seed)
        found = cross_validate_probe(plain(), data, seed=seed)
        nested.append(found.auroc)
        inside += found.interval.low <= 0.5 <= found.interval.high
        sides = split_by_group(data, seed=seed)
        card = ProbeCard(name="t/p", layers=(0,), hidden=8)
        chosen.append(max(s.auroc for s in select_layer(plain(), *sides, card=card).sweep))
    assert np.mean(chosen) > 0.62
    assert abs(np.mean(nested) - 0.5) < 0.04
    assert inside >= 4


def test_each_fold_is_judged_by_a_probe_that_has_not_seen_its_groups() -> None:
    data = few("d", seed=1, signal=2.5)
    found = cross_validate_probe(plain(), data, folds=4)
    assert [fold.layers for fold in found.folds] == [(20,)] * 4
    assert sum(fold.n_positive + fold.n_negative for fold in found.folds) == len(data)
    assert found.auroc == pytest.approx(roc_auc_score(data.labels, found.ranks))
    assert abs(found.auroc - 0.96) < 0.03, "two normal classes 2.5 apart"
    assert np.mean([fold.auroc for fold in found.folds]) == pytest.approx(found.auroc, abs=0.02)
    # Of labels that are those of the groups alone, nothing of a fold is known.
    rng = np.random.default_rng(0)
    marks = {group: rng.normal(size=8) * 3 for group in data.groups}
    acts = [np.tile(marks[g].astype(np.float32), (LAYERS, 1, 1)) for g in data.groups]
    by_group = {g: i % 2 == 1 for i, g in enumerate(marks)}
    known = ActivationSet(
        name="k", model="m", layers=data.layers, acts=tuple(acts), groups=data.groups,
        labels=np.array([by_group[g] for g in data.groups]), ids=data.ids,
    )  # fmt: skip
    assert abs(cross_validate_probe(plain(), known).auroc - 0.5) < 0.2


@pytest.mark.parametrize("folds", [1, 9])
def test_more_folds_than_groups_are_refused(folds: int) -> None:
    with pytest.raises(SpecError, match=rf"folds={folds}: d has \d groups of the rarer class"):
        cross_validate_probe(plain(), few("d", seed=0, n=14), folds=folds)


def test_a_sample_that_a_fold_is_judged_on_is_in_no_other_place() -> None:
    data = few("d", seed=0, n=40)
    other = replace(few("c", seed=1, n=40), ids=data.ids)
    for control, shared in ((other, "id: 20 values"), (replace(data, ids=other.groups), "group")):
        with pytest.raises(SpecError, match=shared):
            cross_validate_probe(plain(), data, control=control)
    contents = [f"text {i}" for i in range(40)]
    contents[-1] = contents[0]
    for seed in range(3):  # in whichever folds, and on whichever side of the split inside one
        copied = replace(data, contents=tuple(contents))
        with pytest.raises(
            SpecError,
            match=r"content: 1 of \d+ samples .* 'd-0' and 'd-39'|"
            r"content: 1 of \d+ samples .* 'd-39' and 'd-0'",
        ):
            cross_validate_probe(plain(), copied, seed=seed)
