"""Fits on a store are those of a fit in memory, within the stated memory, or refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.svm import LinearSVC

from benchmarks.store_scale import make_store
from inspect_lens.errors import SpecError
from inspect_lens.probe import ProbeCard
from inspect_lens.train import (
    FAMILIES,
    ActivationSet,
    EnsembleProbe,
    LATProbe,
    LDAProbe,
    LogisticProbe,
    MassMeanProbe,
    MeanDifferenceProbe,
    SAEFeatureProbe,
    SklearnProbe,
    StoreSet,
    TorchLogisticProbe,
    extract_vector,
    fit_layers,
    fit_on,
    make_estimator,
    select_layer,
)
from inspect_lens.train.families._direction import Moments
from inspect_lens.train.fitting._fit import _ahead

from .test_store_set import LAYERS, H, plant

GB = 1e-9
"""A memory of one byte."""
# What is held beside the pieces is more than so little, and is warned of.
pytestmark = pytest.mark.filterwarnings("ignore:memory=:UserWarning")


def stores(
    folder: Path, n: int = 120, *, memory: float = 4.0, **how: Any
) -> tuple[StoreSet, ActivationSet]:
    """A set on disk and in memory, whose samples are neither all nor in the store's order."""
    made = plant(folder / "s", n, seed=0, **how)
    small = ActivationSet.from_store(made)
    picks = np.random.default_rng(1).permutation(len(small))[: len(small) * 4 // 5]
    large = StoreSet(made, memory=memory, work=None, progress=False)
    return large.subset(picks, name="part"), small.subset(picks, name="part")


STREAMED = [
    LATProbe(), LATProbe(n_pairs=30, scaling="standard"), LDAProbe(shrinkage="ridge"),
    LDAProbe(shrinkage=0.2, scaling="standard"), LDAProbe(shrinkage=None, equal_priors=False),
    MassMeanProbe(iid=True, scaling="standard"), MeanDifferenceProbe(scaling="standard"),
    MeanDifferenceProbe(normalize=True), LogisticProbe(), LogisticProbe(fit_intercept=True),
    LogisticProbe(standardize=False), make_estimator("lr-pressure", C=0.1),
]  # fmt: skip


@pytest.mark.parametrize("family", STREAMED, ids=str)
def test_what_is_read_piece_by_piece_equals_the_fit_in_memory(family: Any, tmp_path: Path) -> None:
    large, small = stores(tmp_path, memory=0.0)
    fits: dict[int, Any] = dict(fit_layers(family, large, LAYERS, rows="tokens"))
    assert list(fits) == list(LAYERS)
    rtol = 3e-3 if isinstance(family, LogisticProbe) else 1e-4
    for layer in LAYERS:
        x, labels, groups = small.rows(layer)
        whole = clone(family).fit(x, labels, groups)
        for key in ("coef_", "mean_", "scale_", "intercept_"):
            ours, theirs = getattr(fits[layer], key), getattr(whole, key)
            limit = rtol * max(np.abs(theirs).max(), 1e-12)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=limit, err_msg=key)
    # In enough memory it is the fit in memory, and with matrices for whitening the same optimum.
    object.__setattr__(large, "memory", 4.0)
    x, labels, groups = small.rows(4)
    held: Any = fit_on(clone(family), large, 4, rows="tokens")
    np.testing.assert_array_equal(held.coef_, clone(family).fit(x, labels, groups).coef_)
    if isinstance(family, LogisticProbe):
        object.__setattr__(large, "memory", 8 * 8 * H**2 * GB + GB)
        whitened: Any = fit_on(clone(family), large, 4, rows="tokens")
        np.testing.assert_allclose(
            whitened.coef_, held.coef_, rtol=0, atol=rtol * abs(held.coef_).max()
        )


def test_huge_dimensions_are_scaled_as_in_memory(tmp_path: Path) -> None:
    """A store that stays on disk once had the direction of the huge dimension."""
    large, small = stores(tmp_path, memory=0.0)
    original = StoreSet.passes
    factor = np.where(np.arange(H) == 3, 1000.0, 1.0).astype(np.float32)

    def huge(self: StoreSet, layer: int) -> Iterator[Any]:
        for index, rows in original(self, layer):
            yield index, rows * factor

    x, labels, groups = small.rows(4)
    for family in (MeanDifferenceProbe(), LDAProbe(shrinkage="ridge"), LATProbe()):
        with pytest.warns(UserWarning, match="divided by its standard deviation"):
            whole = clone(family).fit(x * factor, labels, groups)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StoreSet, "passes", huge)
            with pytest.warns(UserWarning, match="divided by its standard deviation"):
                fitted: Any = fit_on(clone(family), large, 4)
        assert whole.scale_.max() > 100 * whole.scale_.min()
        np.testing.assert_allclose(fitted.coef_, whole.coef_, atol=1e-4 * abs(whole.coef_).max())


def test_a_stop_before_the_end_is_said(tmp_path: Path) -> None:
    large, _ = stores(tmp_path, memory=0.0)
    with pytest.warns(ConvergenceWarning, match="max_iter=1"):
        fit_on(LogisticProbe(max_iter=1, C=100.0), large, 4)


@pytest.mark.parametrize("size", [1, 7, 200, 400])
def test_the_size_of_the_pieces_and_weights_that_are_counts_do_not_matter(size: int) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(400, 16)) @ rng.normal(size=(16, 16)) + 300.0, rng.random(400) < 0.4
    weight = rng.integers(1, 4, 400).astype(np.float64)
    made = Moments(16, covariance=True)
    for first in range(0, 400, size):
        part = slice(first, first + size)
        made.add(x[part], y[part], weight[part])
    wide, sides = (np.repeat(v, weight.astype(int), axis=0) for v in (x, y))
    mean, spread = made.standard()
    np.testing.assert_allclose(mean, wide.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(spread, wide.std(axis=0), rtol=1e-6)
    found = made.statistics()
    np.testing.assert_allclose(found.high, wide[sides].mean(axis=0), rtol=1e-9)
    centred = wide - np.where(sides[:, None], found.high, found.low)
    np.testing.assert_allclose(found.within, centred.T @ centred / len(wide), atol=1e-6)
    np.testing.assert_allclose(made.within_variance(), (centred**2).mean(axis=0), rtol=1e-6)


def test_sums_of_float32_rows_are_about_a_float32_number() -> None:
    """The mean that was taken away was rounded, and another one added back."""
    x = (np.random.default_rng(0).normal(size=(64, 3)) + 1e6 / 3).astype(np.float32)
    made = Moments(3)
    made.add(x, np.arange(64) % 2 == 0)
    np.testing.assert_allclose(made.standard()[0], x.mean(axis=0, dtype=np.float64), rtol=1e-9)


def test_a_stopped_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = plant(tmp_path / "train", 80, seed=0)
    test = ActivationSet.from_store(plant(tmp_path / "test", 80, seed=1))
    card = ProbeCard(name="m/p", layers=(2,), hidden=H)
    original, read, limit = StoreSet._blocks, [], -1

    def counted(self: StoreSet, layer: int) -> Any:
        read.append(layer)
        if len(read) == limit:
            raise KeyboardInterrupt
        return original(self, layer)

    monkeypatch.setattr(StoreSet, "_blocks", counted)
    families: list[tuple[Any, float]] = [
        (make_estimator("attention-lite", steps=15, batch=16), 4.0),
        (LATProbe(), 0.0), (LDAProbe(), 4.0),
        (TorchLogisticProbe(epochs=3), 4.0), (SAEFeatureProbe(k=2), 4.0),
    ]  # fmt: skip
    for i, (family, memory) in enumerate(families):
        folder = tmp_path / f"w{i}"

        def sweep(work: Path | None, family: Any = family, memory: float = memory) -> Any:
            data = StoreSet(store, work=work, memory=memory, progress=False)
            return select_layer(family, data, test, card=card)

        limit, read[:] = -1, []
        whole, each = sweep(None), len(read)
        limit, read[:] = each, []  # in the last layer
        with pytest.raises(KeyboardInterrupt):
            sweep(folder)
        limit, read[:] = -1, []
        again = sweep(folder)
        assert set(read) == {7}
        assert again.sweep == whole.sweep
        assert again.probe.sha256 == whole.probe.sha256
        for file in folder.iterdir():
            file.write_bytes(b"no")
        assert sweep(folder).probe.sha256 == whole.probe.sha256


def test_what_does_not_fit_is_said_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, small = stores(tmp_path, memory=20_000 * GB)
    with monkeypatch.context() as patch:
        patch.setattr(StoreSet, "_blocks", None)
        with pytest.raises(SpecError, match=r"rows='mean', .* state that much memory"):
            next(fit_layers(SklearnProbe(LinearSVC()), large, LAYERS))
        object.__setattr__(large, "memory", 10_000 * GB)
        for family, layer in (
            (EnsembleProbe(n_layers=2), (2, 4)), (LDAProbe(), 4),
            (make_estimator("attention-lite"), 4),
            (TorchLogisticProbe(), 4), (SAEFeatureProbe(), 4), (LogisticProbe(), (2, 4)),
        ):  # fmt: skip
            with pytest.raises(SpecError, match=r"is fitted on all [\d,]+ rows at once"):
                fit_on(family, large, layer)  # type: ignore[arg-type]
        with pytest.raises(SpecError, match="shrinkage='lw'"):
            fit_on(LDAProbe(shrinkage="lw"), large, 4)
        with pytest.raises(SpecError, match=r"shrinkage=1\.5"):
            fit_on(LDAProbe(shrinkage=1.5), large, 4)
    # As it says: one row per sample fits, and so do all in more memory.
    object.__setattr__(large, "memory", 20_000 * GB)
    fit_on(SklearnProbe(LinearSVC()), large, 4, rows="mean")
    object.__setattr__(large, "memory", 1.0)
    ours: Any = fit_on(SklearnProbe(LinearSVC(random_state=0)), large, 4)
    whole: Any = fit_on(SklearnProbe(LinearSVC(random_state=0)), small, 4)
    np.testing.assert_array_equal(ours.estimator_.coef_, whole.estimator_.coef_)
    for memory in (-1.0, float("nan")):
        with pytest.raises(SpecError, match="memory="):
            StoreSet(tmp_path / "s", memory=memory)


@pytest.mark.parametrize(
    ("family", "what"),
    [
        (LDAProbe(shrinkage="ridge", scaling="none"), "matrices"),
        (MassMeanProbe(iid=True, scaling="none"), "matrices"),
        (LATProbe(scaling="none"), "pairs"),
    ],
    ids=str,
)
def test_a_fit_piece_by_piece_that_holds_more_than_is_stated_says_so(
    family: Any, what: str, tmp_path: Path
) -> None:
    large, _ = stores(tmp_path, memory=0.0)
    with pytest.warns(UserWarning, match=rf"memory=0: .* holds about .* GB beside them \({what}"):
        fit_on(clone(family), large, 4)


def test_several_layers_take_more_than_one(tmp_path: Path) -> None:
    large, _ = stores(tmp_path)
    one = 5 * 4 * len(large.row_labels) * H * GB
    object.__setattr__(large, "memory", 1.5 * one)
    fit_on(TorchLogisticProbe(epochs=1), large, 4)
    with pytest.raises(SpecError, match="one layer of lr, mean-difference"):
        fit_on(TorchLogisticProbe(epochs=1), large, (2, 4))


def test_every_family_is_fitted_on_a_store(tmp_path: Path) -> None:
    large, _ = stores(tmp_path)
    few: dict[str, dict[str, Any]] = {"lr-got": {"epochs": 2},
                                      "ensemble": {"n_layers": 1}, "sae": {"k": 2}}  # fmt: skip
    for name in FAMILIES:
        made = make_estimator(name, **few.get(name, {}))
        if "steps" in made.get_params():  # type: ignore[attr-defined]
            made.set_params(steps=2)  # type: ignore[attr-defined]
        assert [layer for layer, _ in fit_layers(made, large, [2, 4])] == [2, 4], name


def test_rows_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    large, _ = stores(tmp_path)
    original = StoreSet._blocks

    def broken(self: StoreSet, layer: int) -> Iterator[Any]:
        for number, start, rows in original(self, layer):
            yield number, start, np.where(np.arange(H) == 2, np.nan, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreSet, "_blocks", broken)
        with pytest.raises(SpecError, match="holds NaN or infinity at layer 4"):
            fit_on(make_estimator("attention-lite", steps=2), large, 4)
        for rows in ("mean", "last", -1, "tokens"):
            with pytest.raises(SpecError, match="holds NaN or infinity at layer 4"):
                extract_vector(large, name="v", layers=[4], rows=rows)
        with pytest.raises(SpecError, match="holds NaN or infinity at layer 4"):
            fit_on(MeanDifferenceProbe(), large, 4, rows="mean")
        object.__setattr__(large, "memory", 0.0)
        with pytest.raises(SpecError, match="hold NaN or infinity"):
            fit_on(MeanDifferenceProbe(), large, 4)


def test_a_fault_of_the_reader_is_raised() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        list(_ahead(broken()))
    assert list(_ahead(iter([3, 0, 4]))) == [3, 0, 4]


PEAKS = """
import json, sys, warnings
from pathlib import Path
from inspect_lens.train import *
from inspect_lens.train.sets import _store_set

warnings.simplefilter("ignore")
_store_set._PIECE = 1 << 20

def resident(field):
    text = Path("/proc/self/status").read_text()
    return int(text.partition(field + ":")[2].split()[0]) * 1024

whole = StoreSet(sys.argv[1], memory=0.03, progress=False)
few = whole.subset(range(0, len(whole), 41))
object.__setattr__(few, "memory", 0.0)
grown = {}
for family in (LogisticProbe(max_iter=3), LDAProbe(shrinkage="ridge"), LATProbe(n_pairs=100)):
    fit_on(family, few, 1)  # what is imported and cached on the way
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    fit_on(family, whole, 1)
    whole.pooled(1, "mean")
    grown[type(family).__name__] = resident("VmHWM") - before
held = StoreSet(sys.argv[1], memory=1.0, progress=False)
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
fit_on(TorchLogisticProbe(epochs=1), held, 1)
print(json.dumps({"grown": grown, "held": resident("VmHWM") - before}))
"""


@pytest.mark.slow
def test_resident_memory_stays_below_a_layer(tmp_path: Path) -> None:
    make_store(tmp_path, rows=24_000, hidden=512, layers=2, shard_rows=4_000)
    layer = 4 * 24_000 * 512
    small = {"MALLOC_TRIM_THRESHOLD_": "1000000", "MALLOC_MMAP_THRESHOLD_": "1000000",
             "OMP_NUM_THREADS": "1"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PEAKS, str(tmp_path)], env=os.environ | small, text=True,
        stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: size for name, size in found["grown"].items() if size > 0.6 * layer} == {}
    assert found["held"] > 2 * layer  # so the measure sees what is held
