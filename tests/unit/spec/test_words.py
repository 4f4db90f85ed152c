"""One judge of words: of a `Literal`, or of names."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from inspect_lens.errors import SpecError
from inspect_lens.spec import check_word

Over = Literal["last", "all"]


@pytest.mark.parametrize("allowed", [Over, ("last", "all"), {"last": 1, "all": 2}])
def test_only_the_words_pass(allowed: object) -> None:
    check_word("over", "all", allowed)
    for wrong in ("ALL", "", None, 1, ["all"], np.array(["all", "all"]), "x" * 10**6):
        with pytest.raises(SpecError, match=r"^over=.*; allowed are last, all") as error:
            check_word("over", wrong, allowed)
        assert len(str(error.value)) < 200


def test_a_near_miss_is_named_and_advice_stands_for_the_others() -> None:
    with pytest.raises(SpecError, match=r"allowed are last, all; did you mean 'last'\?$"):
        check_word("over", "lst", Over, "'last' is the default")
    with pytest.raises(SpecError, match=r"allowed are last, all; 'last' is the default$"):
        check_word("over", "mean", Over, "'last' is the default")
