"""Edits of sampled tokens with some ids, inside a real engine that schedules ahead."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.conftest import HIDDEN, Engine, tokens
from tests.kit.edit_cases import random_rows
from tests.kit.sampled_edits import (
    N,
    ask,
    check_sampled_edits,
    ids_of,
    places_of,
    rows_of,
    sampled,
    some_ids,
)
from tests.kit.sampled_edits import edits as edits_of

pytestmark = pytest.mark.engine

LAYERS = (0, 2, 3)

equal = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


def edits(positions: Any, seed: int) -> list[Any]:
    return edits_of(positions, seed, HIDDEN, LAYERS)


def test_one_request_after_another_in_a_batch_of_their_like(engine: Engine) -> None:
    prompts = [tokens(20 + 7 * i, seed=i) for i in range(6)]
    check_sampled_edits(engine.run, prompts, HIDDEN, LAYERS, equal)


@pytest.mark.parametrize("exclude", [False, True])
def test_the_answer_is_that_of_the_same_edits_at_the_positions_of_these_tokens(
    engine: Engine, exclude: bool
) -> None:
    prompts = [tokens(20 + 7 * i, seed=i) for i in range(6)]
    plain = engine.run(prompts, max_tokens=N)
    chosen = some_ids(plain, prompts)
    asked: list[dict[str, Any] | None] = []
    for i, ids in enumerate(chosen):
        asked += [ask(*edits(sampled(ids, exclude=exclude), 50 + i)), None]
    both = engine.run([p for p in prompts for _ in range(2)], asked, max_tokens=N)
    for out, alone in zip(both[1::2], plain, strict=True):
        assert ids_of(out) == ids_of(alone), "plain requests of the batch are left alone"
    places = places_of(both[::2], prompts, chosen, exclude=exclude)
    assert all(places), "the first of the ids is sampled before anything is edited"
    n_acted, n_fed = sum(map(len, places)), (N - 1) * len(prompts)
    assert 3 <= n_acted <= n_fed - 3
    listed = [ask(*edits(where, 50 + i)) for i, where in enumerate(places)]
    wanted = engine.run(prompts, listed, max_tokens=N)
    bare = engine.run(prompts, ask(), max_tokens=N)
    for i, (out, same, free) in enumerate(zip(both[::2], wanted, bare, strict=True)):
        assert ids_of(out) == ids_of(same)
        torch.testing.assert_close(rows_of(out), rows_of(same), rtol=1e-4, atol=1e-4)
        end = places[i][0]
        a, b = rows_of(out), rows_of(free)
        torch.testing.assert_close(a[:, :end], b[:, :end], rtol=1e-4, atol=1e-4)
        moved = (a[0, end] - b[0, end]).numpy()
        np.testing.assert_allclose(moved, 0.3 * random_rows(50 + i, 2, HIDDEN)[0], atol=1e-3)


def test_ids_that_are_never_sampled_change_no_bit(engine: Engine) -> None:
    prompt = tokens(33, seed=4)
    bare = engine.run([prompt], ask(), max_tokens=N)[0]
    unused = [t for t in range(200) if t not in ids_of(bare)][:20]
    out = engine.run([prompt], ask(*edits(sampled(unused), 70)), max_tokens=N)[0]
    assert ids_of(out) == ids_of(bare)
    assert torch.equal(rows_of(out), rows_of(bare))
    every = engine.run([prompt], ask(*edits(sampled(unused, exclude=True), 70)), max_tokens=N)[0]
    wanted = engine.run([prompt], ask(*edits("completion", 70)), max_tokens=N)[0]
    assert ids_of(every) == ids_of(wanted)
    assert engine.stats()["steering_rows"] == 0
