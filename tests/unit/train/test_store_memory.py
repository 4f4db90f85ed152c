"""Families that are fitted in memory where rows fit are fitted from disk where they do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC

from benchmarks.store_scale import make_store
from inspect_lens.errors import SpecError
from inspect_lens.probe import ProbeCard
from inspect_lens.train import (
    FAMILIES,
    EnsembleProbe,
    LATProbe,
    LDAProbe,
    LogisticProbe,
    MeanDifferenceProbe,
    PressureLogisticProbe,
    SAEFeatureProbe,
    SklearnProbe,
    SparseEncoder,
    StoreSet,
    TorchLogisticProbe,
    fit_layers,
    fit_on,
    make_estimator,
)

from .test_store_fits import GB, stores
from .test_store_set import LAYERS, H

LINEAR = ("coef_", "mean_", "scale_", "intercept_")


def tight(**settings: Any) -> LogisticRegression:
    return LogisticRegression(tol=1e-9, max_iter=500, **settings)


def encoder(**how: Any) -> SparseEncoder:
    rng = np.random.default_rng(3)
    weight = rng.normal(size=(40, H)).astype(np.float32)
    return SparseEncoder(weight=weight, bias=rng.normal(size=40).astype(np.float32), **how)


def close(ours: Any, theirs: Any, *, rtol: float, names: tuple[str, ...] = LINEAR) -> None:
    for name in names:
        a, b = np.asarray(getattr(ours, name)), np.asarray(getattr(theirs, name))
        limit = rtol * max(np.abs(b).max(), 1e-12)
        np.testing.assert_allclose(a, b, rtol=0, atol=limit, err_msg=name)


def without(memory: float, family: Any, folder: Path, **how: Any) -> tuple[Any, Any]:
    """A fit in memory, and one in a stated memory."""
    rows = how.pop("rows", None)
    large, small = stores(folder, memory=memory, **how)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="memory=")
        ours = fit_on(clone(family), large, 4, rows=rows)
    return ours, fit_on(clone(family), small, 4, rows=rows)


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        (TorchLogisticProbe(epochs=12), "tokens"),
        (TorchLogisticProbe(epochs=12, center=False), "mean"),
    ],
    ids=str,
)
def test_descent_takes_the_same_steps(family: Any, rows: str, tmp_path: Path) -> None:
    ours, whole = without(0.0, family, tmp_path, rows=rows)
    close(ours, whole, rtol=1e-6)
    assert ours.loss_ == pytest.approx(whole.loss_, rel=1e-6)


@pytest.mark.parametrize(
    "family",
    [
        SAEFeatureProbe(encoder=encoder(), k=6), SAEFeatureProbe(encoder=encoder(top_k=5), k=6),
        SAEFeatureProbe(encoder=encoder(threshold=np.full(40, 0.5, dtype=np.float32)), k=50),
        SAEFeatureProbe(encoder=encoder(), raw=True), SAEFeatureProbe(k=3),
    ],
    ids=["relu", "top-k", "jump", "raw", "columns"],
)  # fmt: skip
def test_features_are_chosen_and_weighed_alike(family: Any, tmp_path: Path) -> None:
    ours, whole = without(1_000_000 * GB, family, tmp_path)
    assert ours.features_.tolist() == whole.features_.tolist()
    # liblinear stops at its own tolerance.
    close(ours, whole, rtol=1e-3, names=("coef_", "intercept_"))
    with pytest.raises(SpecError, match=r"features of \d+ rows take .* a smaller k"):
        without(GB, SAEFeatureProbe(encoder=encoder(), k=6), tmp_path / "small")


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        (tight(C=0.3), "tokens"), (tight(solver="newton-cholesky"), "last"),
        (tight(C=0.1, fit_intercept=False, class_weight="balanced"), "tokens"),
        (tight(class_weight={False: 1.0, True: 4.0}), "mean"),
        (make_pipeline(StandardScaler(), tight(C=0.05)), "tokens"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("column", ["", "topic"])
def test_logistic_regression_of_scikit_learn_has_its_optimum(
    family: Any, rows: Any, column: str, tmp_path: Path
) -> None:
    balanced = getattr(family, "class_weight", None) == "balanced"
    wrapped = SklearnProbe(family, sample_weight=column)
    if balanced and column:  # which releases of scikit-learn count differently
        with pytest.raises(SpecError, match="memory=0: LogisticRegression is fitted on all"):
            without(0.0, wrapped, tmp_path, rows=rows)
        return
    large, small = stores(tmp_path, memory=0.0)
    ours: Any = fit_on(wrapped, large, 4, rows=rows)
    x, labels, _ = small.rows(4)
    counts = [int(m.sum()) for m in small.mask]
    if rows != "tokens":
        x, labels, counts = small.pooled(4, rows), small.labels, [1] * len(small)
    weight = {}
    if column:
        name = "logisticregression__sample_weight" if hasattr(family, "steps") else "sample_weight"
        weight = {name: np.repeat([float(v) for v in small.columns[column]], counts)}
    whole = clone(family).fit(x.astype(np.float64), labels, **weight)
    last, theirs = (f[-1] if hasattr(f, "steps") else f for f in (ours.estimator_, whole))
    close(last, theirs, rtol=1e-4, names=("coef_", "intercept_"))
    assert vars(last).keys() == vars(theirs).keys()
    new = np.random.default_rng(0).normal(size=(200, H))
    scores = ours.to_probe(ProbeCard(name="m/p", layers=(4,), hidden=H)).score_tokens(new)
    np.testing.assert_allclose(scores, whole.decision_function(new), atol=1e-4)
    np.testing.assert_array_equal(ours.estimator_.predict(new), whole.predict(new))
    if hasattr(whole, "steps"):
        close(ours.estimator_[0], whole[0], rtol=1e-5, names=("mean_", "scale_", "var_"))


@pytest.mark.parametrize(
    ("rows", "memory"), [("tokens", 0.0), ("tokens", 1.0), ("mean", 0.0), ("last", 0.0)]
)
def test_logistic_probes_have_their_optimum(rows: str, memory: float, tmp_path: Path) -> None:
    """With matrices of hidden x hidden and without."""
    for i, family in enumerate((LogisticProbe(), PressureLogisticProbe(C=0.1))):
        ours, whole = without(memory, family, tmp_path / str(i), rows=rows)
        close(ours, whole, rtol=3e-3)


@pytest.mark.parametrize("rows", ["mean", "last"])
@pytest.mark.parametrize("family", [LDAProbe(), LATProbe(n_pairs=20), MeanDifferenceProbe()],
                         ids=str)  # fmt: skip
def test_pooled_rows_stream_as_tokens_do(family: Any, rows: str, tmp_path: Path) -> None:
    ours, whole = without(0.0, family, tmp_path, rows=rows)
    close(ours, whole, rtol=1e-4)


@pytest.mark.parametrize(
    ("base", "rows", "stack"),
    [
        (LDAProbe(), "mean", "lr"), (LATProbe(), "tokens", "mean"),
        (TorchLogisticProbe(epochs=3), "tokens", "lr"), (LogisticProbe(), "tokens", "mean"),
    ],
    ids=str,
)  # fmt: skip
def test_ensembles_are_made_of_members_that_stream(
    base: Any, stack: Any, rows: Any, tmp_path: Path
) -> None:
    large, small = stores(tmp_path, memory=0.0)
    family = EnsembleProbe(base=base, n_layers=2, stack=stack, folds=3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="memory=")
        ours: Any = fit_on(clone(family), large, (2, 4), rows=rows)
    whole: Any = fit_on(clone(family), small, (2, 4), rows=rows)
    rtol = 5e-3 if isinstance(base, LogisticProbe) else 1e-5
    for a, b in zip(ours.estimators_, whole.estimators_, strict=True):
        close(a, b, rtol=rtol)
    close(ours, whole, rtol=rtol, names=("slope_", "intercept_"))
    with pytest.raises(SpecError, match="n_layers=2: 3 layers are read"):
        fit_on(clone(family), large, LAYERS)
    with pytest.raises(SpecError, match="stack='no'"):
        fit_on(clone(family).set_params(stack="no"), large, (2, 4))


def test_what_does_not_fit_is_said_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, small = stores(tmp_path, memory=12_000 * GB)
    others = [
        RandomForestClassifier(n_estimators=3, random_state=0), LinearSVC(),
        LogisticRegression(solver="liblinear"), make_pipeline(StandardScaler(), LinearSVC()),
    ]  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(StoreSet, "_blocks", None)
        for other in others:
            with pytest.raises(SpecError, match=r"rows='mean', .* state that much memory"):
                next(fit_layers(SklearnProbe(other), large, LAYERS))
        with pytest.raises(SpecError, match=r"is fitted on all \d+ rows at once"):
            fit_on(LDAProbe(), large, (2, 4))
    # As it says: one row per sample fits, and so do all in more memory.
    fit_on(SklearnProbe(LinearSVC()), large, 4, rows="mean")
    object.__setattr__(large, "memory", 1.0)
    ours: Any = fit_on(SklearnProbe(LinearSVC(random_state=0)), large, 4)
    whole: Any = fit_on(SklearnProbe(LinearSVC(random_state=0)), small, 4)
    np.testing.assert_array_equal(ours.estimator_.coef_, whole.estimator_.coef_)
    object.__setattr__(large, "memory", 0.0)
    with pytest.warns(UserWarning, match=r"TorchLogisticProbe reads the rows of a layer 2 times"):
        fit_on(TorchLogisticProbe(epochs=2), large, 4)


def test_every_family_has_a_way_in_little_memory(tmp_path: Path) -> None:
    large, _ = stores(tmp_path, memory=40_000 * GB)
    few: dict[str, dict[str, Any]] = {"lr-got": {"epochs": 2},
                                      "ensemble": {"n_layers": 1}, "sae": {"k": 2}}  # fmt: skip
    for name in FAMILIES:
        made = make_estimator(name, **few.get(name, {}))
        if "steps" in made.get_params():  # type: ignore[attr-defined]
            made.set_params(steps=2)  # type: ignore[attr-defined]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="memory=")
            assert [layer for layer, _ in fit_layers(made, large, [2, 4])] == [2, 4], name


@pytest.mark.parametrize(
    "family",
    [TorchLogisticProbe(epochs=3), SAEFeatureProbe(k=2)],
    ids=lambda f: type(f).__name__,
)
def test_what_was_learnt_is_kept(
    family: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, _ = stores(tmp_path, memory=20_000 * GB)
    object.__setattr__(large, "work", tmp_path / "w")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="memory=")
        first: Any = fit_on(clone(family), large, 4)
    monkeypatch.setattr(StoreSet, "_blocks", None)
    again: Any = fit_on(clone(family), large, 4)
    assert vars(again).keys() == vars(first).keys()
    for name, value in vars(first).items():
        if isinstance(value, np.ndarray | float | bool):
            np.testing.assert_array_equal(getattr(again, name), value, err_msg=name)
            assert type(getattr(again, name)) is type(value), name


PEAKS = """
import json, sys, warnings
from pathlib import Path
import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from inspect_lens.probe import ProbeCard
from inspect_lens.train import *
from inspect_lens.train.sets import _store_set

warnings.simplefilter("ignore")
_store_set._PIECE = 1 << 20
rng = np.random.default_rng(0)
encoder = SparseEncoder(weight=rng.normal(size=(64, 512)).astype(np.float32), bias=np.zeros(64))
linear = make_pipeline(StandardScaler(), LogisticRegression(max_iter=3))
families = [
    LogisticProbe(max_iter=3), SklearnProbe(linear), TorchLogisticProbe(epochs=2),
    SAEFeatureProbe(encoder=encoder, k=4),
    LDAProbe(shrinkage="ridge"), EnsembleProbe(base=MeanDifferenceProbe(), n_layers=2, folds=2),
]

def resident(field):
    text = Path("/proc/self/status").read_text()
    return int(text.partition(field + ":")[2].split()[0]) * 1024

def fit(family, data):
    layers = (0, 1) if isinstance(family, EnsembleProbe) else 1
    probe = fit_on(family, data, layers)
    card = ProbeCard(name="m/p", layers=(0, 1) if layers != 1 else (1,), hidden=512)
    data.scores(probe.to_probe(card))
    data.pooled(1, "mean")

whole = StoreSet(sys.argv[1], memory=0.012, progress=False)
few = whole.subset(range(0, len(whole), 41))
grown = {}
for family in families:
    fit(family, few)  # what is imported and cached on the way
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    fit(family, whole)
    grown[type(family).__name__] = resident("VmHWM") - before
held = StoreSet(sys.argv[1], memory=1.0, progress=False)
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
fit(TorchLogisticProbe(epochs=1), held)
print(json.dumps({"grown": grown, "held": resident("VmHWM") - before}))
"""


def test_resident_memory_stays_below_a_layer(tmp_path: Path) -> None:
    """Of a process of its own: torch's memory does not show in `tracemalloc`."""
    make_store(tmp_path, rows=24_000, hidden=512, layers=2, shard_rows=4_000)
    layer = 4 * 24_000 * 512
    small = {"MALLOC_TRIM_THRESHOLD_": "1000000", "MALLOC_MMAP_THRESHOLD_": "1000000",
             "OMP_NUM_THREADS": "1"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PEAKS, str(tmp_path)], env=os.environ | small, text=True,
        stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: size for name, size in found["grown"].items() if size > 0.5 * layer} == {}
    assert found["held"] > 2 * layer  # so the measure sees what is held
