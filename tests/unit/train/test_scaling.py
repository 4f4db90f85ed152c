"""A few huge dimensions, as the residual streams of large models have."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from sklearn.base import clone

from inspect_lens.errors import SpecError
from inspect_lens.probe import ProbeCard, auroc
from inspect_lens.train import (
    HeadProbe,
    LATProbe,
    LDAProbe,
    LogisticProbe,
    MassMeanProbe,
    MeanDifferenceProbe,
)

FAMILIES = [MeanDifferenceProbe(), MassMeanProbe(), LDAProbe(), LATProbe(n_pairs=400)]


def planted(n: int, *, seed: int, huge: float, strength: float = 1.0) -> tuple[np.ndarray, ...]:
    """128 dimensions, two of them `huge` and without the concept; 16 of the others have it."""
    rng, y = np.random.default_rng(seed), np.arange(n) % 2
    x = rng.normal(size=(n, 128))
    x[:, 8:24] += strength * y[:, None]
    x[:, :2] = x[:, :2] * huge + 3 * huge
    return x.astype(np.float32), y


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: type(f).__name__)
def test_huge_dimensions_do_not_hide_the_concept(family: MeanDifferenceProbe) -> None:
    x, y = planted(400, seed=0, huge=300.0)
    fresh, labels = planted(400, seed=1, huge=300.0)
    reference = auroc(labels, LogisticProbe().fit(x, y).decision_function(fresh))
    published = clone(family).set_params(scaling="none").fit(x, y)
    with pytest.warns(UserWarning, match="2 of 128 dimensions hold 100% of the variance"):
        ours = clone(family).fit(x, y)
    area = auroc(labels, ours.decision_function(fresh))
    assert area > 0.9
    assert area > reference - 0.06
    if not isinstance(family, LDAProbe):
        assert auroc(labels, published.decision_function(fresh)) < 0.65
    # What is saved scores rows as they come.
    probe = ours.to_probe(ProbeCard(name="t/p", layers=(0,), hidden=128))
    scores = [probe.score(row[None, None], (0,)) for row in fresh]
    np.testing.assert_allclose(scores, ours.decision_function(fresh), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: type(f).__name__)
def test_without_them_it_is_the_published_method(family: MeanDifferenceProbe) -> None:
    x, y = planted(200, seed=0, huge=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours, theirs = (clone(family).set_params(scaling=s).fit(x, y) for s in ("auto", "none"))
        clone(family).set_params(scaling="standard").fit(x, y)
    np.testing.assert_array_equal(ours.coef_, theirs.coef_)
    with pytest.raises(SpecError, match="auto, standard, none"):
        clone(family).set_params(scaling="iqr").fit(x, y)


def test_a_constant_column_is_divided_by_nothing_with_weights_too() -> None:
    x, y = planted(60, seed=0, huge=300.0)
    x = x.astype(np.float64)
    x[:, 3], x[:, 4] = 0.1, 0.7 + 0.2 * y
    weight = np.random.default_rng(1).random(len(y))
    for each in (weight, None):
        made = MeanDifferenceProbe(scaling="standard").fit(x, y, sample_weight=each)
        np.testing.assert_array_equal(made.scale_[3:5], 1.0)
        assert made.scale_.min() > 0.1


@pytest.mark.parametrize("tiny", [1e-45, 1e-38, 1e-20])
def test_a_column_that_all_but_never_moves_is_divided_by_nothing_in_a_network(tiny: float) -> None:
    x, y = planted(60, seed=0, huge=1.0)
    x[:, 3], x[7, 3] = 0.0, tiny
    made = HeadProbe(pool="attention", steps=2).fit(x, y)
    assert made.tensors_["scale"][3] == 1.0
    made.to_probe(ProbeCard(name="t/p", layers=(0,), hidden=128)).for_engine()


def test_families_that_do_not_scale_have_no_such_setting() -> None:
    assert [hasattr(made, "scaling") for made in (*FAMILIES, LogisticProbe())] == [True] * 4 + [
        False
    ]


def test_a_weight_is_so_many_rows_for_the_scale_too() -> None:
    x, y = planted(60, seed=0, huge=300.0)
    weight = np.random.default_rng(1).integers(0, 4, len(y))
    family = MeanDifferenceProbe(scaling="standard")
    ours = clone(family).fit(x, y, sample_weight=weight.astype(float))
    repeated = clone(family).fit(np.repeat(x, weight, axis=0), np.repeat(y, weight))
    np.testing.assert_allclose(ours.scale_, repeated.scale_, rtol=1e-9)
