"""Which token stands for which, and where a subject is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inspect_lens._patching.runs import choose_positions, find_subject
from inspect_lens.errors import SpecError
from inspect_lens.patch import Alignment, align_tokens

IDS = st.lists(st.integers(0, 3), min_size=1, max_size=8)


@given(clean=IDS, corrupted=IDS)
def test_pairs_are_the_common_ends_and_what_is_between_from_the_right(
    clean: list[int], corrupted: list[int]
) -> None:
    found = align_tokens(clean, corrupted, mode="ends")
    assert len(found.pairs) == len(corrupted)
    known = [q for q in found.pairs if q is not None]
    assert known == sorted(set(known))
    assert all(0 <= q < len(clean) for q in known)
    assert clean[: found.first] == corrupted[: found.first]
    tail = 0
    while tail < min(len(clean), len(corrupted)) - found.first and (
        clean[-1 - tail] == corrupted[-1 - tail]
    ):
        tail += 1
        assert found.pairs[-tail] == len(clean) - tail
    # Nothing is left alone while the other side has a token without a partner.
    assert len(known) == min(len(clean), len(corrupted))


@given(ids=IDS)
def test_a_prompt_is_its_own_partner(ids: list[int]) -> None:
    assert align_tokens(ids, ids).pairs == tuple(range(len(ids)))


def test_unequal_lengths_are_refused_with_the_tokens_that_differ() -> None:
    texts = (["The", " Tal", "mo", " is"], ["The", " Velosh", " is"])
    with pytest.raises(SpecError, match="has 3 tokens and the clean prompt 4") as error:
        align_tokens([1, 4, 5, 8], [1, 6, 8], texts=texts)
    assert "clean[1:3] = [' Tal', 'mo'] and corrupted[1:2] = [' Velosh']" in str(error.value)
    assert "align='ends'" in str(error.value)
    with pytest.raises(SpecError, match="allowed are equal, ends"):
        align_tokens([1], [1], mode="middle")  # type: ignore[arg-type]


def test_positions_are_numbers_from_either_end_or_a_mask() -> None:
    pairs = Alignment((0, 1, 2, 3), 1)
    assert choose_positions(None, pairs, skip_equal=True) == (1, 2, 3)
    assert choose_positions(None, pairs, skip_equal=False) == (0, 1, 2, 3)
    assert choose_positions([-1, 0], pairs, skip_equal=True) == (0, 3)
    assert choose_positions([False, True, True, False], pairs, skip_equal=True) == (1, 2)
    with pytest.raises(SpecError, match="the mask has 2 booleans and the prompt has 4"):
        choose_positions([True, False], pairs, skip_equal=True)
    with pytest.raises(SpecError, match="position 4 is outside"):
        choose_positions([4], pairs, skip_equal=True)


def test_equal_prompts_are_patched_everywhere_and_a_token_alone_nowhere() -> None:
    assert choose_positions(None, Alignment((0, 1), 2), skip_equal=True) == (0, 1)
    alone = Alignment((0, None, 1), 1)
    assert choose_positions(None, alone, skip_equal=True) == (2,)
    with pytest.raises(SpecError, match=r"\[1\] of the corrupted prompt have no partner"):
        choose_positions([1, 2], alone, skip_equal=True)


def test_a_subject_is_every_token_with_one_of_its_characters() -> None:
    texts = ["The", " river", " Tal", "mo", " is"]
    assert find_subject("Talmo", texts) == (2, 3)
    assert find_subject("mo i", texts) == (3, 4)
    assert find_subject([-2, 2], texts) == (2, 3)
    for wrong, times in (("Velosh", 0), ("", 0), ("e", 2)):
        with pytest.raises(SpecError, match=f"stands {times} times"):
            find_subject(wrong, texts)
    with pytest.raises(SpecError, match="position 5 is outside"):
        find_subject([5], texts)
