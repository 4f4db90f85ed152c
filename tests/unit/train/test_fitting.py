from __future__ import annotations

import numpy as np
import pytest
import torch

from inspect_lens.errors import SpecError
from inspect_lens.train import (
    EnsembleProbe,
    MeanDifferenceProbe,
    make_estimator,
)


def test_training_that_diverges_is_no_probe_and_leaves_the_random_numbers_alone() -> None:
    rng, y = np.random.default_rng(0), np.arange(60) % 2
    x = [rng.normal(size=(int(rng.integers(5, 14)), 8)).astype(np.float32) + k for k in y]
    with pytest.raises(SpecError, match="training diverged"):
        make_estimator("attention", lr=3e37, steps=30).fit(x, y)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    make_estimator("attention", steps=2, dropout=0.5).fit(x, y)
    assert torch.equal(torch.rand(3), expected)


def test_an_ensemble_is_calibrated_on_groups_it_did_not_see() -> None:
    rng = np.random.default_rng(0)
    # Labels mean nothing, and a group is one point: whoever has seen the group knows its label.
    groups = np.repeat(np.arange(4), 30)
    x = np.repeat(rng.normal(size=(4, 50)), 30, axis=0) + 1e-3 * rng.normal(size=(120, 50))
    y = np.where(np.arange(120) % 3 == 0, groups % 2 == 0, groups % 2 == 1)
    seen = EnsembleProbe(base=MeanDifferenceProbe()).fit(x, y)
    apart = EnsembleProbe(base=MeanDifferenceProbe()).fit(x, y, groups)
    assert apart.slope_[0] < seen.slope_[0] / 2
