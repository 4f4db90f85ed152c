"""LEACE takes out what is correlated with a concept, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from inspect_lens.errors import SpecError
from inspect_lens.train import erase
from tests.unit.train.test_families import H, planted


def test_leace_takes_the_covariance_with_the_concept_to_zero() -> None:
    x, y, _ = planted(300, 2.0)
    x = x.astype(np.float64) @ np.random.default_rng(5).normal(size=(H, H))
    z = y - y.mean()
    found = (x - x.mean(axis=0)).T @ z / len(z)
    erased = erase(x, found, covariance=np.cov(x.T, bias=True), mean=x.mean(axis=0))
    assert np.abs((erased - erased.mean(axis=0)).T @ z / len(z)).max() < 1e-8
    # What is taken out varies about the mean, so the mean stays where it was.
    np.testing.assert_allclose((erased + 0).mean(axis=0), x.mean(axis=0), atol=1e-9)
    with pytest.raises(SpecError, match="moves the mean"):
        erase(x, found, covariance=np.cov(x.T, bias=True))
    with pytest.raises(SpecError, match="is zero"):
        erase(x, np.zeros(H))
