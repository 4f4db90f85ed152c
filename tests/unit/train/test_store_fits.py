"""Fits on a store at several layers are those of a fit in memory, within the stated memory."""

from __future__ import annotations

import tracemalloc
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone

from inspect_lens.errors import SpecError
from inspect_lens.probe import ProbeCard
from inspect_lens.train import (
    ActivationSet,
    AttentionLiteProbe,
    AttentionProbe,
    LATProbe,
    LDAProbe,
    MassMeanProbe,
    MeanDifferenceProbe,
    MLPProbe,
    MultiMaxProbe,
    StoreSet,
    fit_layers,
    fit_on,
    select_layer,
)
from inspect_lens.train.families import _binary
from inspect_lens.train.sets import _store_set

from .test_store_set import LAYERS, H, plant

GB = 1e-9
"""A memory of one byte."""


def stores(
    folder: Path, n: int = 120, *, memory: float = 4.0, **how: Any
) -> tuple[StoreSet, ActivationSet]:
    """A set on disk and in memory, whose samples are neither all nor in the store's order."""
    made = plant(folder / "s", n, seed=0, **how)
    small = ActivationSet.from_store(made)
    picks = np.random.default_rng(1).permutation(len(small))[: len(small) * 4 // 5]
    large = StoreSet(made, memory=memory, work=None, progress=False)
    return large.subset(picks, name="part"), small.subset(picks, name="part")


def skewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows have the medians of a scale, so that strides are met with few rows in all."""
    monkeypatch.setattr(_binary, "_ROWS", 20)


FORMULAS = [
    LATProbe(), LATProbe(n_pairs=30), LATProbe(scaling="robust"), LDAProbe(),
    LDAProbe(equal_priors=False), LDAProbe(scaling="robust"),
]  # fmt: skip
SUMMED = [
    LDAProbe(shrinkage="ridge"), LDAProbe(shrinkage=0.2, scaling="robust"),
    LDAProbe(shrinkage=None, equal_priors=False), MassMeanProbe(iid=True, scaling="robust"),
    MeanDifferenceProbe(scaling="robust"), MeanDifferenceProbe(normalize=True),
]  # fmt: skip


@pytest.mark.parametrize("memory", [4.0, 25_000 * GB])
@pytest.mark.parametrize("family", [*FORMULAS, *SUMMED], ids=str)
def test_formulas_equal_the_fit_in_memory(
    family: Any, memory: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skewed(monkeypatch)
    large, small = stores(tmp_path, memory=memory)
    # Sums of pooled covariances are of float32 blocks, as `fit_stream` has them.
    rtol = 1e-6 if family in FORMULAS else 1e-4
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="memory=")
        fits = dict(fit_layers(family, large, LAYERS))
    assert list(fits) == list(LAYERS)
    for layer in LAYERS:
        x, labels, groups = small.rows(layer)
        whole = clone(family).fit(x, labels, groups)
        for key in ("coef_", "mean_", "scale_", "intercept_"):
            ours, theirs = getattr(fits[layer], key), getattr(whole, key)
            limit = rtol * np.abs(theirs).max()
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=limit, err_msg=key)
        if isinstance(family, LATProbe):
            share = whole.explained_variance_ratio_
            assert fits[layer].explained_variance_ratio_ == pytest.approx(share, rel=1e-9)


def test_huge_dimensions_are_scaled_as_in_memory(tmp_path: Path) -> None:
    """A store that stays on disk once had the direction of the huge dimension."""
    large, small = stores(tmp_path)
    original = StoreSet.passes

    def huge(self: StoreSet, layers: Sequence[int]) -> Iterator[Any]:
        for layer, index, rows in original(self, layers):
            yield layer, index, rows * np.where(np.arange(H) == 3, 1000.0, 1.0).astype(np.float32)

    x, labels, groups = small.rows(4)
    x = x * np.where(np.arange(H) == 3, 1000.0, 1.0).astype(np.float32)
    for family in (MeanDifferenceProbe(), LDAProbe(), LATProbe()):
        with pytest.warns(UserWarning, match="divided by its median deviation"):
            whole = clone(family).fit(x, labels, groups)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StoreSet, "passes", huge)
            with pytest.warns(UserWarning, match="divided by its median deviation"):
                fitted: Any = fit_on(clone(family), large, 4)
        assert whole.scale_.max() > 100 * whole.scale_.min()
        np.testing.assert_allclose(fitted.coef_, whole.coef_, atol=1e-5 * abs(whole.coef_).max())


HEADS = [
    AttentionLiteProbe(steps=15, batch=16), AttentionProbe(steps=10, dropout=0.3, batch=16),
    MLPProbe(steps=15, batch=16, hidden_size=8), MultiMaxProbe(steps=8, mlp_sizes=(8,), batch=16),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", HEADS, ids=lambda f: type(f).__name__)
def test_heads_are_the_same_bits_wherever_their_rows_are(
    family: Any, dtype: str, tmp_path: Path
) -> None:
    large, small = stores(tmp_path, dtype=dtype)
    layer_bytes = 4 * H * len(large.row_labels)
    # All layers at once, one at a time, and none: batches from disk, then validation too.
    for memory in (4.0, 1.5 * layer_bytes * GB, 0.5 * layer_bytes * GB, 0.0):
        object.__setattr__(large, "memory", memory)
        fits = dict(fit_layers(family, large, LAYERS))
        for layer in LAYERS:
            whole: Any = fit_on(clone(family), small, layer)
            assert fits[layer].losses_ == whole.losses_
            assert list(fits[layer].tensors_) == list(whole.tensors_)
            for key, value in whole.tensors_.items():
                np.testing.assert_array_equal(fits[layer].tensors_[key], value, err_msg=key)


def test_lbfgs_from_disk_ends_where_it_does_in_memory(tmp_path: Path) -> None:
    """Batches are summed there, so the last bits of a sum may differ."""
    large, small = stores(tmp_path, memory=0.0)
    family = AttentionProbe(optimizer="lbfgs", lr=1.0, steps=2, batch=16, weight_decay=0.1)
    ours: Any = fit_on(clone(family), large, 4)
    whole: Any = fit_on(clone(family), small, 4)
    np.testing.assert_allclose(ours.losses_, whole.losses_, rtol=1e-4)
    a, b = (f.decision_function(small.sequences(4)) for f in (ours, whole))
    np.testing.assert_allclose(a, b, atol=1e-3 * np.abs(b).max())


def test_layers_share_passes_as_far_as_memory_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, _ = stores(tmp_path)
    read: list[list[int]] = []
    original = StoreSet._blocks

    def counted(self: StoreSet, layers: Sequence[int]) -> Any:
        read.append(list(layers))
        return original(self, layers)

    monkeypatch.setattr(StoreSet, "_blocks", counted)
    every = list(LAYERS)
    expected: list[tuple[Any, list[list[int]]]] = [
        (MeanDifferenceProbe(), [every]), (LATProbe(), [every]), (LDAProbe(), [every, every]),
        (LDAProbe(shrinkage="ridge"), [every]), (HEADS[0], [every]),
    ]  # fmt: skip
    for family, passes in expected:
        read[:] = []
        list(fit_layers(family, large, every))
        assert read == passes, family
    layer_bytes = 4 * H * len(large.row_labels)
    object.__setattr__(large, "memory", 2.5 * layer_bytes * GB)
    read[:] = []
    list(fit_layers(HEADS[0], large, every))
    assert read == [[2, 4], [7]]
    object.__setattr__(large, "memory", 0.0)
    read[:] = []
    with pytest.warns(UserWarning, match=r"memory=0: LDAProbe takes .* GB for one layer"):
        list(fit_layers(LDAProbe(), large, every))
    assert read == [[2], [2], [4], [4], [7], [7]]


@pytest.mark.parametrize("family", [HEADS[0], LATProbe(), LDAProbe()], ids=str)
def test_a_stopped_run_goes_on(
    family: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = plant(tmp_path / "train", 80, seed=0)
    test = ActivationSet.from_store(plant(tmp_path / "test", 80, seed=1))
    card = ProbeCard(name="m/p", layers=(2,), hidden=H)
    size = ActivationSet.from_store(store).rows(2)[0].nbytes
    original, read = StoreSet._blocks, []

    def counted(self: StoreSet, layers: Sequence[int]) -> Any:
        read.append(list(layers))
        if len(read) == limit:
            raise KeyboardInterrupt
        return original(self, layers)

    monkeypatch.setattr(StoreSet, "_blocks", counted)

    def sweep(work: Path | None) -> Any:
        data = StoreSet(store, work=work, memory=1.5 * size * GB, progress=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="memory=")
            return select_layer(family, data, test, card=card)

    limit = -1
    whole, each = sweep(None), len(read)
    limit, read[:] = each, []  # in the last layer
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path / "w")
    limit, read[:] = -1, []
    again = sweep(tmp_path / "w")
    assert {layer for layers in read for layer in layers} == {7}
    assert again.sweep == whole.sweep
    assert again.probe.sha256 == whole.probe.sha256
    for file in (tmp_path / "w").iterdir():
        file.write_bytes(b"no")
    assert sweep(tmp_path / "w").probe.sha256 == whole.probe.sha256


@pytest.mark.parametrize(
    "family",
    [
        AttentionLiteProbe(steps=5, batch=8),
        MLPProbe(steps=5, batch=64, hidden_size=8),
        LATProbe(n_pairs=100),
        LDAProbe(),
    ],
    ids=lambda f: type(f).__name__,
)
def test_what_is_held_is_less_than_a_layer(
    family: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(plant.__globals__, "H", 128)
    monkeypatch.setattr("inspect_lens.train.sets._store_set._ROWS", 300)
    monkeypatch.setattr(_binary, "_ROWS", 400)
    store = plant(tmp_path / "s", 300, seed=0, shard=10, tokens=80)
    large = StoreSet(store, memory=1.0e6 * GB, progress=False)
    layer_bytes = large.store.n_rows * 128 * 4
    assert layer_bytes > 4.0e6
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="memory=")
        fit_on(clone(family), large, 4)  # what is imported and cached on the way
        tracemalloc.start()
        list(fit_layers(family, large, LAYERS[:2]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 0.6 * layer_bytes, (peak, layer_bytes)


def test_rows_that_are_not_finite_and_a_wrong_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, _ = stores(tmp_path, memory=0.0)
    original = _store_set.read_spans

    def broken(*arguments: Any) -> Any:
        made = original(*arguments)
        return [np.full_like(made[0], np.nan), *made[1:]]

    monkeypatch.setattr(_store_set, "read_spans", broken)
    with pytest.raises(SpecError, match="holds NaN or infinity at layer 4"):
        fit_on(AttentionLiteProbe(steps=2), large, 4)
    for memory in (-1.0, float("nan")):
        with pytest.raises(SpecError, match="memory="):
            StoreSet(tmp_path / "s", memory=memory)
    object.__setattr__(large, "memory", 1.0)
    with pytest.raises(SpecError, match="shrinkage='lw'"):
        fit_on(LDAProbe(shrinkage="lw"), large, 4)
