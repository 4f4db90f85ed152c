"""Classifiers of scikit-learn train probes as our own families do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import NearestCentroid
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from inspect_lens.data import planted_activations
from inspect_lens.errors import SpecError
from inspect_lens.probe import Probe, ProbeCard
from inspect_lens.train import (
    ActivationSet,
    LogisticProbe,
    SklearnProbe,
    fit_on,
    select_layer,
    train_probe,
)

H = 16


def planted(name: str, n: int, *, seed: int, **more: Any) -> ActivationSet:
    made = planted_activations(n=n, hidden=H, seed=seed, tokens=(2, 5))
    return ActivationSet(
        name=name, model="m", layers=(0, 1, 2), acts=made.acts, labels=made.labels,
        groups=tuple(f"{name}-{g}" for g in made.groups),
        ids=tuple(f"{name}-{i}" for i in range(n)), **more,
    )  # fmt: skip


def pipeline(**settings: Any) -> Any:
    return make_pipeline(StandardScaler(), LogisticRegression(**settings))


def test_train_probe_takes_a_pipeline() -> None:
    train, control, test = (
        planted(n, s, seed=i) for i, (n, s) in enumerate((("a", 160), ("b", 640), ("c", 80)))
    )
    common: dict[str, Any] = {
        "control": control, "held_out": [test], "name": "m/p",
    }  # fmt: skip
    probe = train_probe(pipeline(C=0.1, fit_intercept=False), train, **common)
    ours = train_probe(LogisticProbe(), train, **common)
    assert isinstance(probe, Probe)
    assert isinstance(ours, Probe)
    assert probe.layers == ours.layers == (1,)
    np.testing.assert_allclose(probe.weight, ours.weight, rtol=1e-5, atol=1e-6)
    assert probe.card.source == "scikit-learn"
    assert "StandardScaler" in probe.card.method
    assert probe.card.evaluations[0].auroc == ours.card.evaluations[0].auroc


def test_folds_of_a_search_keep_groups_whole() -> None:
    """Tokens of one sample in both halves of a fold would reward learning the sample by heart."""
    train = planted("a", 60, seed=0)
    search = GridSearchCV(pipeline(), {"logisticregression__C": [1e-3, 1e-1]}, cv=4)
    fitted: Any = fit_on(SklearnProbe(search), train, 1)
    _, _, groups = train.rows(1)
    assert len(fitted.estimator_.cv) == 4
    made = fitted.to_probe(ProbeCard(name="m/s", layers=(1,), hidden=H)).card.method
    assert "cv=4" in made
    assert "best {'logisticregression__C': " in made
    for fit, held in fitted.estimator_.cv:
        assert not set(groups[fit]) & set(groups[held])
    assert search.cv == 4
    with pytest.raises(SpecError, match="choose fewer folds"):
        fit_on(SklearnProbe(GridSearchCV(pipeline(), {}, cv=40)), train, 1)
    calibrated = CalibratedClassifierCV(pipeline(), ensemble=False)
    probe: Any = fit_on(SklearnProbe(calibrated), train, 1).to_probe(
        ProbeCard(name="m/c", layers=(1,), hidden=H)
    )
    assert probe.card.calibration.method == "platt"


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("rows", ["tokens", "mean"])
def test_weights_count_as_copies_do(search: bool, rows: Any) -> None:
    """A sample of weight 2 is the sample twice; a weight of 0 leaves it out."""
    weights = [(0, 1, 2)[i % 3] for i in range(60)]
    data = planted("a", 60, seed=0, columns={"weight": [float(w) for w in weights]})
    copies = data.subset([i for i, w in enumerate(weights) for _ in range(w)])

    def scores(estimator: Any, on: ActivationSet) -> Any:
        card = ProbeCard(name="m/w", layers=(1,), hidden=H)
        return data.scores(fit_on(estimator, on, 1, rows=rows).to_probe(card))

    made = LogisticRegression(C=0.1, tol=1e-8)
    model = GridSearchCV(made, {"C": [0.1]}, cv=2) if search else made
    weighted = scores(SklearnProbe(model, sample_weight="weight"), data)
    np.testing.assert_allclose(weighted, scores(SklearnProbe(made), copies), atol=1e-3)
    assert not np.allclose(weighted, scores(SklearnProbe(made), data), atol=1e-2)


def test_class_weights_move_the_intercept() -> None:
    data = planted("a", 90, seed=0).subset([i for i in range(90) if i % 2 or i < 20])
    card = ProbeCard(name="m/c", layers=(1,), hidden=H)
    means = [
        data.scores(fit_on(SklearnProbe(pipeline(class_weight=w)), data, 1).to_probe(card)).mean()
        for w in (None, "balanced")
    ]
    assert means[1] < means[0] - 0.5


def test_what_cannot_be_a_probe_is_refused() -> None:
    data = planted("a", 40, seed=0, columns={"weight": ["much"] * 40})
    card = ProbeCard(name="m/x", layers=(1,), hidden=H)
    with pytest.raises(SpecError, match="not linear"):
        select_layer(RandomForestClassifier(3), data, planted("b", 20, seed=1), card=card)
    with pytest.raises(SpecError, match="are no weights"):
        fit_on(SklearnProbe(LogisticRegression(), sample_weight="weight"), data, 1)
    with pytest.raises(SpecError, match="has no key 'nothing'"):
        fit_on(SklearnProbe(LogisticRegression(), sample_weight="nothing"), data, 1)
    ones = planted("a", 40, seed=0, columns={"weight": ["1"] * 40})
    with pytest.raises(SpecError, match="NearestCentroid takes none"):
        fit_on(SklearnProbe(NearestCentroid(), sample_weight="weight"), ones, 1)
    with pytest.raises(SpecError, match="is no family"):
        select_layer("lr", data, planted("b", 20, seed=1), card=card)  # type: ignore[arg-type]
