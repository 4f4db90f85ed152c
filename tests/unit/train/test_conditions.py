"""Persona vectors and CAST conditions, against what their sources define."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from inspect_lens.errors import SpecError
from inspect_lens.spec import Add, Rule
from inspect_lens.train import (
    ActivationSet,
    Condition,
    extract_vector,
    fit_condition,
    from_arrays,
    persona_vector,
    similarity,
)

H = 12


def responses() -> ActivationSet:
    """Six pairs; the judge saw the trait as asked, coherently, in pairs a, b and f."""
    rows = {
        "a": (50, 0, 50, 50), "b": (99, 49.9, 99, 99), "c": (49.9, 0, 99, 99),
        "d": (99, 50, 99, 99), "e": (99, 0, 99, 49), "f": (70, 20, 60, 80),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    acts = [rng.normal(size=(2, 4 + i % 3, H)) + (i % 2 == 0) for i in range(12)]
    return from_arrays(
        acts, [1, 0] * 6, layers=[3, 5], groups=[g for g in rows for _ in range(2)],
        columns={
            "trait": [v for high, low, *_ in rows.values() for v in (high, low)],
            "coherence": [v for *_, high, low in rows.values() for v in (high, low)],
        },
    )  # fmt: skip


def test_pairs_are_kept_where_the_judge_saw_what_was_asked() -> None:
    data = responses()
    vector = persona_vector(data, name="m/kind", layer=5)
    kept = data.subset([i for i, group in enumerate(data.groups) if group in ("a", "b", "f")])
    means = np.stack([a[1].mean(axis=0) for a in kept.acts])
    np.testing.assert_allclose(
        vector.raw(5), means[kept.labels].mean(0) - means[~kept.labels].mean(0), rtol=1e-4
    )
    # At 60 the other side has to be below 40.
    strict = persona_vector(data, name="m/kind", layer=5, threshold=60)
    assert strict.card.notes[0].startswith("1 of 6 pairs kept")
    assert vector.card.notes[0].startswith("3 of 6 pairs kept")
    assert vector.card.layer == 5


def test_what_is_no_pair_or_no_score_is_refused() -> None:
    data = responses()
    with pytest.raises(SpecError, match="1 samples for the trait and 0 against"):
        persona_vector(data.subset(range(11)), name="m/kind")
    with pytest.raises(SpecError, match="no key 'evil'"):
        persona_vector(data, trait="evil", name="m/kind")
    with pytest.raises(SpecError, match="none of 6 pairs"):
        persona_vector(data, threshold=100, name="m/kind")
    words = from_arrays(
        np.zeros((2, 1, H)), [1, 0], layers=[1], groups=["a", "a"],
        columns={"trait": ["REFUSAL", "3"], "coherence": ["90", "90"]},
    )  # fmt: skip
    with pytest.raises(SpecError, match="are no numbers"):
        persona_vector(words, name="m/kind")


def test_the_similarity_is_that_of_the_source() -> None:
    rng = np.random.default_rng(0)
    rows, c = rng.normal(size=(5, H)), rng.normal(size=H) * 4
    wide, v = torch.from_numpy(rows), torch.from_numpy(c)
    projector = torch.outer(v, v) / torch.dot(v, v)
    expected = [
        float(torch.nn.functional.cosine_similarity(h, torch.tanh(projector @ h), dim=0))
        for h in wide
    ]
    np.testing.assert_allclose(similarity(rows, c), expected, rtol=1e-12)
    np.testing.assert_allclose(similarity(rows, -3 * c), expected, rtol=1e-12)
    assert similarity(np.zeros((2, H)), c).tolist() == [0.0, 0.0]


def test_larger_is_said_of_the_threshold() -> None:
    """In the source, `larger` steers where the similarity lies below."""
    direction, near = np.eye(2)[0], np.array([[2.0, 0.1]])
    value = float(similarity(near[0], direction))
    for acts, word in (("below", "larger"), ("above", "smaller")):
        for threshold in (value - 0.1, value + 0.1):
            made = Condition(4, direction, threshold, acts, 1.0)  # type: ignore[arg-type]
            assert made.threshold_is == word
            theirs = value < threshold if made.threshold_is == "larger" else value > threshold
            assert made.holds(near) == theirs


def test_the_search_finds_the_largest_f1_on_either_side() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(80) % 2
    for flip in (False, True):
        acts = rng.normal(size=(80, 2, 3, H))
        acts[:, 1, :, 0] += 2.5 * (labels != flip)[:, None]
        data = from_arrays(list(acts), labels, layers=[2, 6])
        vector: Any = extract_vector(
            from_arrays(list(acts), labels != flip, layers=[2, 6]), name="m/c", rows="mean"
        )
        found = fit_condition(vector, data)
        assert found.layer == 6
        held = [found.holds(s) for s in data.sequences(6)]
        assert f1_score(labels, held) == pytest.approx(found.f1)
        values = similarity(acts[:, 1].mean(axis=1), vector.raw(6))
        over = values > np.linspace(values.min(), values.max(), 400)[:, None]
        every = np.concatenate([over, ~over])
        f1 = 2 * (every & (labels == 1)).sum(axis=1) / (every.sum(axis=1) + labels.sum())
        assert found.f1 >= f1.max() - 1e-9
        last = fit_condition(vector, data, layers=[6], rows="last")
        assert last.holds(data.sequences(6)[0]) == last.holds(data.sequences(6)[0][-1:])


def test_a_condition_needs_both_classes_and_a_common_layer() -> None:
    data = from_arrays(np.eye(H)[:4][:, None], [0, 1, 0, 1], layers=[2])
    vector = extract_vector(data, name="m/c")
    for wrong, layers in ((data, [3]), (data.subset([0, 2]), None)):
        with pytest.raises(SpecError, match=re.escape("allowed are layers of both")):
            fit_condition(vector, wrong, layers=layers)


@pytest.mark.parametrize("rows", ["mean", "last"])
@pytest.mark.parametrize("acts", ["above", "below"])
def test_an_engine_decides_by_the_same_condition(rows: Any, acts: Any) -> None:
    direction = np.random.default_rng(3).standard_normal(H)
    made = Condition(4, direction, 0.2, acts, 1.0, rows).when
    (gate,) = made.gates
    assert isinstance(made, Rule) == (acts == "below")
    assert (gate.layer, gate.similarity, gate.scope) == (4, "cast", "rest")
    assert gate.reads == ("prompt_mean" if rows == "mean" else "last_prompt")
    Add(vector=direction, layers=[2], when=made, positions="completion")
