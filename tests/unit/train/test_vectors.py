"""Extraction against planted directions and closed forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from inspect_lens.errors import SpecError
from inspect_lens.probe import ModelRef
from inspect_lens.train import ActivationSet, extract_vector, pair_set, split_by_group

H, LAYERS = 24, (2, 5)


def planted(n: int = 120, *, gap: float = 4.0, seed: int = 0) -> tuple[ActivationSet, Any]:
    """Pairs that share a strong part of their own and differ along one direction per layer."""
    rng = np.random.default_rng(seed)
    direction = rng.standard_normal((2, H))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    shared = rng.standard_normal((n, 1, H)) * 3
    noise = rng.standard_normal((2, n, 2, H)) * 0.5
    # Some spread along the direction, so that it is what differences vary in.
    strength = gap * (1 + 0.3 * rng.standard_normal((n, 1, 1)))
    high = shared + strength / 2 * direction + noise[0]
    low = shared - strength / 2 * direction + noise[1]
    return pair_set(high, low, layers=LAYERS, model="m"), direction


@pytest.mark.parametrize("method", ["mean_difference", "caa", "logistic", "pca"])
def test_a_planted_direction_is_found(method: Any) -> None:
    data, direction = planted()
    rows = "last" if method == "caa" else None
    vector = extract_vector(data, name="m/v", method=method, rows=rows, layer=5)
    cosines = (vector.direction * direction).sum(axis=1)
    assert cosines.min() > (0.8 if method == "logistic" else 0.97)
    # The length is the distance of the classes, whatever the method's own scale is.
    np.testing.assert_allclose(vector.norm, 4.0, rtol=0.25)
    assert vector.card.layer == 5


def test_mean_difference_is_the_difference_of_means() -> None:
    data, _ = planted(n=40)
    vector = extract_vector(data, name="m/v")
    x, y, _ = data.rows(5)
    np.testing.assert_allclose(
        vector.norm[1] * vector.direction[1], x[y].mean(0) - x[~y].mean(0), rtol=1e-4, atol=1e-5
    )
    expected = np.linalg.norm(x.astype(np.float64), axis=1).mean()
    assert vector.card.residual_norms[1] == pytest.approx(expected)
    assert vector.card.layer is None


def test_caa_averages_differences_of_pairs_at_the_letter_token() -> None:
    rng = np.random.default_rng(1)
    acts = [rng.standard_normal((1, n, H)).astype(np.float32) for n in (5, 7, 6, 9, 4)]
    data = ActivationSet(
        name="ab", model="m", layers=(3,), acts=tuple(acts),
        labels=np.array([1, 0, 1, 0, 1]), groups=("a", "a", "b", "b", "c"),
    )  # fmt: skip
    vector = extract_vector(data, name="m/v", method="caa")
    letters = [a[0, -2].astype(np.float64) for a in acts]
    # The last sample has no partner and does not count.
    expected = ((letters[0] - letters[1]) + (letters[2] - letters[3])) / 2
    np.testing.assert_allclose(
        vector.direction[0], expected / np.linalg.norm(expected), rtol=1e-5, atol=1e-6
    )
    assert vector.card.positions == "index -2"


def test_the_layer_is_chosen_on_the_selection_set() -> None:
    high = np.random.default_rng(0).standard_normal((60, 3, H))
    low = np.random.default_rng(1).standard_normal((60, 3, H))
    high[:, 1, 0] += 1.0
    high[:, 2, 0] += 8.0  # the classes lie furthest apart here
    train, selection = split_by_group(pair_set(high, low, layers=(0, 1, 2), model="m"), seed=0)
    vector = extract_vector(train, name="m/v", selection=selection)
    assert vector.card.layer == 2
    assert vector.card.separation[2] == 1.0
    groups = tuple(f"other {group}" for group in train.groups)
    wrong = {
        "group": train,
        r"id: .* give other samples other names \(ids=, or a name=": replace(train, groups=groups),
        "of model": replace(selection, model="another"),
    }
    for what, chosen in wrong.items():
        with pytest.raises(SpecError, match=what):
            extract_vector(train, name="m/v", selection=chosen)


def test_wrong_arguments_are_refused() -> None:
    data, _ = planted(n=4)
    with pytest.raises(SpecError, match="allowed are mean_difference"):
        extract_vector(data, name="m/v", method="average")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="capture more"):
        extract_vector(data, name="m/v", method="caa")
    with pytest.raises(SpecError, match="one of each"):
        extract_vector(data.subset(range(4)), name="m/v")
    same = np.ones((3, 1, H))
    with pytest.raises(SpecError, match="do not differ"):
        extract_vector(pair_set(same, same, layers=(0,)), name="m/v")
    with pytest.raises(SpecError, match="two equal"):
        pair_set(same, same[:2], layers=(0,))


def test_a_checkpoint_that_is_named_is_not_read() -> None:
    data, _ = planted(n=40)
    named = ModelRef(name="org/m", sha256="a" * 64)
    made = extract_vector(replace(data, model="m" * 5000), name="m/v", model=named)
    assert made.card.model == named
