"""Edits of rows wider or narrower than the stream, whole or in part, on one rank or several."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from inspect_lens._engine.tap.op import edit_rows
from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec import (
    Ablate,
    Add,
    EditBase,
    EngineFacts,
    Renormalise,
    Replace,
    Scale,
    Schedule,
    Zero,
    check_edits,
)
from tests.kit.edit_cases import edit_cases, random_rows
from tests.kit.wide_edits import admitted_at, wide_facts, wide_state

HEADS, SIZE, ROW = 6, 5, 12
WIDTH = HEADS * SIZE


def edited(edit: EditBase, facts: EngineFacts, rows: np.ndarray) -> np.ndarray:
    """The rows after an edit; each rank edits its share."""
    shares = []
    for rank in range(facts.ranks):
        state = wide_state(facts, torch.float32, torch.device("cpu"), rank)
        config = admitted_at(edit, facts, state)
        start, size = state.shares[1]
        own = torch.from_numpy(rows[:, start : start + size].copy())
        first = state.bank.table[config, 1].repeat(len(own))
        assert not len(edit_rows(own, None, first, state.bank))
        shares.append(own.numpy())
    return np.concatenate(shares, axis=1)


@pytest.mark.parametrize("row", [ROW, 64], ids=["wider", "narrower"])
def test_every_operation_is_its_closed_form(row: int) -> None:
    facts, rows = wide_facts("z", WIDTH, HEADS, row), random_rows(7, 3, WIDTH)
    for edit, closed_form in edit_cases(3, width=WIDTH):
        found = edited(edit.model_copy(update={"site": "z"}), facts, rows)
        for before, after in zip(rows, found, strict=True):
            wanted = closed_form(before.astype(np.float64))
            np.testing.assert_allclose(after, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_chosen_heads_are_edited_and_the_others_keep_their_bits(ranks: int) -> None:
    facts, rows = wide_facts("z", WIDTH, HEADS, ROW, ranks), random_rows(8, 4, WIDTH)
    at = {"layers": [1], "site": "z", "heads": [5, 0]}
    v = random_rows(9, 1, 2 * SIZE)[0]
    cases = [
        (Zero(**at), lambda h: 0 * h),
        (Scale(factor=0.25, **at), lambda h: 0.25 * h),
        (Replace(rows=v, **at), lambda h: v.reshape(2, SIZE)),
        (Replace(rows=v, alpha=0.5, **at), lambda h: (h + v.reshape(2, SIZE)) / 2),
        (Add(vector=v, scale=2.0, **at), lambda h: h + 2 * v.reshape(2, SIZE)),
    ]
    for edit, closed_form in cases:
        found = edited(edit, facts, rows).reshape(-1, HEADS, SIZE)
        given = rows.reshape(-1, HEADS, SIZE)
        wanted = np.stack([closed_form(row) for row in given[:, [5, 0]]])
        np.testing.assert_allclose(found[:, [5, 0]], wanted, rtol=1e-5, atol=1e-6)
        assert np.array_equal(found[:, 1:5], given[:, 1:5])


def test_a_projection_within_one_head_is_right_on_any_rank_and_others_are_refused() -> None:
    facts, rows = wide_facts("z", WIDTH, HEADS, ROW, ranks=2), random_rows(5, 3, WIDTH)
    v = random_rows(6, 1, SIZE)[0]
    for head in (0, 5):
        edit = Ablate(direction=v, layers=[1], site="z", heads=[head])
        found = edited(edit, facts, rows).reshape(-1, HEADS, SIZE)
        assert np.abs(found[:, head] @ v).max() < 1e-5
        others = [i for i in range(HEADS) if i != head]
        assert np.array_equal(found[:, others], rows.reshape(-1, HEADS, SIZE)[:, others])
    for edit in (
        Ablate(direction=random_rows(6, 1, WIDTH)[0], layers=[1], site="z"),
        Renormalise(layers=[1], site="z"),
    ):
        with pytest.raises(UnsupportedError, match="2 tensor-parallel ranks"):
            check_edits([edit], facts)


def test_what_does_not_fit_is_refused_by_name() -> None:
    facts = wide_facts("z", WIDTH, HEADS, ROW)
    with pytest.raises(SpecError, match=r"heads: 6; z of this model has 6 heads, numbered 0 to 5"):
        check_edits([Zero(layers=[1], site="z", heads=[6])], facts)
    with pytest.raises(SpecError, match=r"4 wide; 1 heads at z of m are together 5 wide"):
        check_edits([Add(vector=np.ones(4), layers=[1], site="z", heads=[0])], facts)
    with pytest.raises(SpecError, match=r"12 wide; z of m is 30 wide"):
        check_edits([Add(vector=np.ones(12), layers=[1], site="z")], facts)
    with pytest.raises(ValueError, match=r"heads are parts of rows at q, k, v, z, and site is"):
        Zero(layers=[1], heads=[0])
    with pytest.raises(ValueError, match="each once"):
        Zero(layers=[1], site="z", heads=[0, 0])
    with pytest.raises(ValueError, match="norm of a row"):
        Renormalise(layers=[1], site="z", heads=[0])


def test_an_expert_can_be_switched_off() -> None:
    facts, rows = wide_facts("router_logits", 8, 0, ROW), random_rows(2, 5, 8)
    edit = Add(vector=[-1e4], layers=[1], site="router_logits", experts=[3])
    found = edited(edit, facts, rows)
    assert (found.argsort(axis=1)[:, 0] == 3).all()
    assert np.array_equal(np.delete(found, 3, axis=1), np.delete(rows, 3, axis=1))


def test_a_schedule_takes_less_of_the_table_than_a_row_of_the_site() -> None:
    # The table ends behind the schedule.
    facts = replace(wide_facts("z", WIDTH, HEADS, row=6), bank_rows=4)
    state, rows = wide_state(facts, torch.float32, torch.device("cpu")), random_rows(4, 1, WIDTH)
    fading = Schedule(points=[(0, 0.5), (6, 0.0)])
    edit = Zero(layers=[1], site="z", positions="completion", schedule=fading)
    found = torch.from_numpy(rows.copy())
    first = state.bank.table[admitted_at(edit, facts, state), 1].repeat(1)
    owners = torch.tensor([[0, 4]], dtype=torch.int32)
    assert not len(edit_rows(found, None, first, state.bank, owners))
    np.testing.assert_allclose(found.numpy(), rows / 2, rtol=1e-6)
