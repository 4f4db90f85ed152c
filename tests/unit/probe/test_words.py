from __future__ import annotations

import re
import zlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from inspect_lens.errors import SpecError
from inspect_lens.probe import auroc, cross_validated_words, hash_words
from inspect_lens.probe.statistics._words import _folds, _score


def texts(n: int, *, seed: int = 0, signal: float = 0.0) -> tuple[list[str], list[int]]:
    rng = np.random.default_rng(seed)
    words = [f"w{i}" for i in range(40)]
    made, labels = [], []
    for i in range(n):
        drawn = [words[j] for j in rng.integers(40, size=12)]
        if rng.random() < signal * (i % 2):
            drawn[3] = "tell"
        made.append(" ".join(drawn))
        labels.append(i % 2)
    return made, labels


def test_words_and_pairs_in_any_case() -> None:
    one = set(hash_words("Two eggs, two hens.").tolist())
    assert one == set(hash_words("two EGGS two hens two").tolist()) - (
        set(hash_words("hens two").tolist()) - set(hash_words("two hens").tolist())
    )
    assert hash_words("").size == 0
    assert hash_words("a b").size == 3


@given(st.text(st.characters(max_codepoint=0x2FF) | st.sampled_from("aA _.\u0130\u00df\ufb01")))
def test_hashes_are_those_of_words_and_pairs(text: str) -> None:
    words = [word.casefold() for word in re.findall(r"\w+", text)]
    expected = {*words, *map(" ".join, pairwise(words))}
    found = hash_words(text)
    assert found.dtype == np.uint16
    assert found.tolist() == sorted({zlib.crc32(one.encode()) % 65536 for one in expected})


def test_the_classifier_is_scikit_learns() -> None:
    made, labels = texts(60, signal=0.7)
    hashed = [hash_words(t).astype(np.int64) for t in made]
    ours = _score(hashed[:40], np.array(labels[:40], dtype=np.float64), hashed[40:], 1.0)
    # By our hashes, so that both see the same words collide.
    theirs = TfidfVectorizer(analyzer=lambda row: [str(h) for h in row])
    x = theirs.fit_transform(hashed[:40])
    model = LogisticRegression(max_iter=5000, tol=1e-10).fit(x, labels[:40])
    expected = model.decision_function(theirs.transform(hashed[40:]))
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_a_word_that_tells_is_found_and_noise_is_not() -> None:
    made, labels = texts(120, signal=1.0)
    hashed = [hash_words(t) for t in made]
    assert auroc(labels, cross_validated_words(hashed, labels)) > 0.9
    areas = []
    for seed in range(30):
        noise, labels = texts(60, seed=seed)
        areas.append(auroc(labels, cross_validated_words([hash_words(t) for t in noise], labels)))
    assert abs(float(np.mean(areas)) - 0.5) < 4 * np.std(areas) / np.sqrt(len(areas))


def test_a_group_is_never_judged_by_what_saw_it() -> None:
    # Each group has a word of its own and one label: only a classifier that saw the group can tell.
    words = [hash_words(f"group{i // 4} filler") for i in range(80)]
    labels = [(i // 4) % 2 for i in range(80)]
    seen = auroc(labels, cross_validated_words(words, labels))
    apart = auroc(labels, cross_validated_words(words, labels, groups=[i // 4 for i in range(80)]))
    assert seen > 0.95
    assert apart < 0.6


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=2, max_size=40))
def test_folds_keep_groups_and_share_out_classes(rows: list[tuple[int, bool]]) -> None:
    names = [name for name, _ in rows]
    y = np.array([mark for _, mark in rows])
    fold = _folds(y, names, 5, np.random.default_rng(0))
    classes = [{name for name, mark in rows if mark is kind} for kind in (False, True)]
    assert (fold is None) == (min(map(len, classes)) < 2)
    if fold is None:
        return
    for name in set(names):
        assert len({f for f, n in zip(fold, names, strict=True) if n == name}) == 1
    for held in np.unique(fold):
        of = {n for f, n in zip(fold, names, strict=True) if f != held}
        kept = [mark for name, mark in rows if name in of]
        assert set(kept) == {False, True}


def test_pairs_are_judged_by_what_saw_neither_half() -> None:
    # Both halves of a pair share its words; one word tells them apart, in half of the pairs.
    texts = [f"pair{i // 2} w{i // 2} x{i // 2} {'tell' if i % 4 == 1 else ''}" for i in range(80)]
    words = [hash_words(text) for text in texts]
    labels = [i % 2 for i in range(80)]
    paired = cross_validated_words(words, labels, groups=[i // 2 for i in range(80)])
    assert 0.7 < auroc(labels, paired) < 0.85
    # By the pair's own words the other half teaches the opposite label.
    silent = [hash_words(f"pair{i // 2} w{i // 2}") for i in range(80)]
    assert auroc(labels, cross_validated_words(silent, labels)) < 0.2


def test_what_cannot_be_learned_is_half_and_what_is_wrong_is_refused() -> None:
    words = [hash_words("a"), hash_words("b"), hash_words("c")]
    np.testing.assert_array_equal(cross_validated_words(words, [0, 0, 1]), [0.5] * 3)
    with pytest.raises(SpecError, match="3 texts"):
        cross_validated_words(words, [0, 1])
    with pytest.raises(SpecError, match="0 or 1"):
        cross_validated_words(words, [0, 1, 2])
    empty = [hash_words("") for _ in range(8)]
    assert auroc([0, 1] * 4, cross_validated_words(empty, [0, 1] * 4)) == 0.5
