from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.train import (
    LATProbe,
    LDAProbe,
    LogisticProbe,
    MassMeanProbe,
    MeanDifferenceProbe,
    fit_stream,
)
from inspect_lens.train.fitting._moments import Moments, accumulate, prefetch

H = 16


def rows(n: int = 1500, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = (rng.random(n) < 0.4).astype(int)
    mix = rng.normal(size=(H, H))
    x = rng.normal(size=(n, H)) @ mix + 300.0 + np.outer(y, rng.normal(size=H))
    return x.astype(np.float32), y


def in_pieces(x: Any, y: np.ndarray, size: int = 200) -> Any:
    def source() -> Iterator[tuple[Any, np.ndarray]]:
        for i in range(0, len(y), size):
            yield x[i : i + size], y[i : i + size]

    return source


def test_a_stop_before_the_end_is_said_and_a_wrong_shrinkage_refused() -> None:
    x, y = rows(400)
    with pytest.warns(ConvergenceWarning, match="max_iter=1"):
        fit_stream(LogisticProbe(max_iter=1), in_pieces(x, y), tol=1e-9)
    for wrong in ("lw", 1.5):
        with pytest.raises(SpecError, match="shrinkage="):
            fit_stream(LDAProbe(shrinkage=wrong), in_pieces(x, y))


@pytest.mark.parametrize(
    "estimator",
    [
        MeanDifferenceProbe(), MeanDifferenceProbe(normalize=True), MassMeanProbe(),
        MassMeanProbe(iid=True), LDAProbe(shrinkage="ridge"), LDAProbe(shrinkage=0.2),
        LDAProbe(shrinkage=None), LDAProbe(shrinkage="ridge", equal_priors=False),
    ],
    ids=str,
)  # fmt: skip
def test_closed_forms_equal_the_fit_in_memory(estimator: Any) -> None:
    x, y = rows()
    whole = clone(estimator).fit(x.astype(np.float64), y)
    streamed = fit_stream(clone(estimator), in_pieces(x, y))
    a, b = (e.decision_function(x.astype(np.float64)) for e in (whole, streamed))
    np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4 * np.abs(a).max())


@pytest.mark.parametrize("settings", [{}, {"fit_intercept": True}, {"C": 1e-3}], ids=str)
def test_logistic_regression_ends_where_scikit_learn_does(settings: dict[str, Any]) -> None:
    x, y = rows()
    z = StandardScaler().fit_transform(x.astype(np.float64))
    reference = LogisticRegression(
        C=settings.get("C", 0.1), fit_intercept=settings.get("fit_intercept", False),
        tol=1e-9, max_iter=5000,
    ).fit(z, y)  # fmt: skip
    streamed = fit_stream(LogisticProbe(**settings), in_pieces(x, y), tol=1e-8)
    np.testing.assert_allclose(streamed.coef_, reference.coef_[0], atol=2e-4)
    ours, theirs = streamed.decision_function(x), reference.decision_function(z)
    np.testing.assert_allclose(ours, theirs, atol=2e-3)
    # At scikit-learn's own tolerance a few passes do, from the difference of means.
    assert fit_stream(LogisticProbe(**settings), in_pieces(x, y)).n_passes_ < streamed.n_passes_


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 400))
def test_the_size_of_the_pieces_does_not_matter(size: int) -> None:
    x, y = rows(400)
    made = accumulate(in_pieces(x, y, size), covariance=True)
    wide = x.astype(np.float64)
    mean, spread = made.standard()
    np.testing.assert_allclose(mean, wide.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(spread, wide.std(axis=0), rtol=1e-4)
    centred = wide - np.where(y[:, None] == 1, wide[y == 1].mean(0), wide[y == 0].mean(0))
    np.testing.assert_allclose(made.within(), centred.T @ centred / 400, rtol=2e-3, atol=2e-3)
    assert made.n.tolist() == [int((y == 0).sum()), int((y == 1).sum())]


def test_the_sample_of_the_preconditioner_sees_both_classes() -> None:
    """Alternating labels in pieces far larger than the sample, as in shards of pairs."""
    y = np.arange(40_000) % 2
    x = np.random.default_rng(0).normal(size=(40_000, 4)) + y[:, None]
    sample = Moments(0, covariance=True)
    accumulate(in_pieces(x, y, 16_384), covariance=False, sample=sample, sample_rows=4096)
    assert min(sample.n) > 0.4 * sample.total
    assert 4096 <= sample.total <= 3 * 2048


def test_bfloat16_pieces_and_a_constant_column() -> None:
    x, y = rows(600)
    x[:, 3] = 7.0
    narrow = torch.from_numpy(x).bfloat16()
    streamed = fit_stream(LogisticProbe(), in_pieces(narrow, y))
    whole = fit_stream(LogisticProbe(), in_pieces(narrow.float().numpy(), y, 600))
    np.testing.assert_allclose(streamed.coef_, whole.coef_, atol=1e-3)
    assert streamed.scale_[3] == 1.0


def test_memory_is_that_of_two_pieces() -> None:
    alive, most = 0, 0

    class Piece(np.ndarray):
        """An array that is counted while it lives."""

        counted = False

        def __del__(self) -> None:
            nonlocal alive
            alive -= self.counted

    def piece() -> np.ndarray:
        nonlocal alive, most
        made = np.random.default_rng(0).normal(size=(4, H)).view(Piece)
        made.counted = True
        alive += 1
        most = max(most, alive)
        return made

    accumulate(lambda: ((piece(), np.array([0, 1, 0, 1])) for _ in range(50)), covariance=False)
    assert most <= 4  # in use, waiting, being put, being made


def test_what_is_wrong_is_refused_and_the_reader_ends() -> None:
    x, y = rows(50)
    for source, match in (
        (lambda: iter(()), "yields no rows"),
        (in_pieces(x, np.zeros(50, dtype=int)), "both classes"),
        (in_pieces(x, y + 1), "0 and 1"),
        (in_pieces(np.where(np.arange(H) == 2, np.nan, x), y), "NaN"),
        (lambda: iter([(x, y), (x[:, :3], y)]), "same width"),
    ):
        with pytest.raises(SpecError, match=match):
            fit_stream(MeanDifferenceProbe(), source)
    with pytest.raises(UnsupportedError, match="streaming form"):
        fit_stream(LATProbe(), in_pieces(x, y))
    with pytest.raises(UnsupportedError, match="streaming form"):
        fit_stream(LDAProbe(), in_pieces(x, y))

    def broken() -> Iterator[int]:
        yield 1
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        list(prefetch(broken()))
    reader = prefetch(iter(range(1000)))
    assert next(reader) == 0
    reader.close()  # type: ignore[attr-defined]
    assert not [t for t in threading.enumerate() if t.name == "inspect-lens-prefetch"]
