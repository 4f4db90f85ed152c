"""Attention Tracker and CoRe heads on planted patterns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inspect_lens.attention import (
    QueriesKeys,
    contrastive_scores,
    document_scores,
    find_core_heads,
    find_tracker_heads,
    instruction_shares,
)
from inspect_lens.errors import SpecError

HEADS = [(2, 0), (2, 1), (5, 0), (5, 1)]
N = 14
INSTRUCTION, DATA = (1, 5), (6, 12)


def planted(mass: dict[tuple[int, int], Any], *, query: int = N - 1) -> QueriesKeys:
    """A call whose heads pay exactly this attention at one position.

    Keys are unit vectors, one per token, so the query is the logarithm of the pattern.
    """
    q = np.zeros((2, N, 2, N), dtype=np.float32)
    k = np.broadcast_to(np.eye(N, dtype=np.float32)[None, :, None], (2, N, 2, N))
    for (layer, head), weights in mass.items():
        row = np.asarray(weights, dtype=np.float64)
        row = row / row[: query + 1].sum()
        q[(2, 5).index(layer), query, head] = np.log(np.maximum(row, 1e-12))
    meta = {"scale": 1.0, "num_heads": 2, "num_kv_heads": 2, "head_size": N}
    return QueriesKeys.of({"attn_q": q, "attn_k": k, "qk_layers": [2, 5], "qk_meta": [meta] * 2})


def weights(instruction: float, data: float) -> np.ndarray[Any, Any]:
    """Attention by token: the rest goes to tokens that are neither."""
    row = np.full(N, (1 - instruction - data) / (N - 10))
    row[slice(*INSTRUCTION)] = instruction / 4
    row[slice(*DATA)] = data / 6
    return row


def test_the_share_is_that_of_instruction_and_data_alone() -> None:
    mass = {h: weights(0.1 * (i + 1), 0.2) for i, h in enumerate(HEADS)}
    call = planted(mass)
    shares = instruction_shares(call, HEADS, [INSTRUCTION], [DATA])
    wanted = [x / (x + 0.2) for x in (0.1, 0.2, 0.3, 0.4)]
    np.testing.assert_allclose(shares, wanted, atol=1e-5)
    assert instruction_shares(call, HEADS[2:], [INSTRUCTION], [DATA]).mean() == pytest.approx(
        np.mean(wanted[2:]), abs=1e-5
    )
    # Ranges in pieces are the same, and a head that looks at neither has no share.
    pieces = instruction_shares(call, HEADS, [(1, 3), (3, 5)], [(6, 7), (7, 12)])
    np.testing.assert_allclose(pieces, shares, atol=1e-6)
    nowhere = planted({h: weights(0, 0) for h in HEADS})
    assert instruction_shares(nowhere, HEADS, [INSTRUCTION], [DATA]).max() < 1e-2


def test_the_query_is_a_position_where_an_answer_follows() -> None:
    call = planted({h: weights(0.3, 0.1) for h in HEADS}, query=12)
    assert instruction_shares(call, HEADS, [INSTRUCTION], [DATA], query=12).mean() == pytest.approx(
        0.75, abs=1e-4
    )
    flat = 4 / 10
    assert instruction_shares(call, HEADS, [INSTRUCTION], [DATA]).mean() == pytest.approx(
        flat, abs=1e-4
    )


def test_heads_that_are_drawn_away_are_found_and_tell_attacks() -> None:
    rng = np.random.default_rng(3)

    def shares(attacked: bool) -> np.ndarray[Any, Any]:
        drawn = {(2, 1): 0.5, (5, 0): 0.25}
        mass = {
            h: weights(
                0.4 + 0.01 * rng.standard_normal() - (drawn.get(h, 0) * 0.4 if attacked else 0), 0.3
            )
            for h in HEADS
        }
        return instruction_shares(planted(mass), HEADS, [INSTRUCTION], [DATA])

    normal, attack = (np.array([shares(y) for _ in range(10)]) for y in (False, True))
    found = find_tracker_heads(normal, attack, HEADS, model="m", data="planted")
    assert found.heads == ((2, 1), (5, 0))
    assert found.layers == (2, 5)
    assert found.found is not None
    assert (found.found.n_samples, found.found.n_heads) == ({"normal": 10, "attack": 10}, 4)
    # The rule of the paper, in its own numbers.
    for pair, margin in zip(found.heads, found.head_scores or (), strict=True):
        a, b = normal[:, HEADS.index(pair)], attack[:, HEADS.index(pair)]
        assert margin == pytest.approx((a.mean() - 4 * a.std()) - (b.mean() + 4 * b.std()))
    own = [HEADS.index(pair) for pair in found.heads]
    held_out = [shares(y)[own].mean() for y in (False, True)]
    assert held_out[0] > normal[:, own].mean() - 0.05 > attack[:, own].mean() + 0.05 > held_out[1]


def test_no_head_is_a_message_and_no_list() -> None:
    rng = np.random.default_rng(0)
    normal, attack = (0.5 + 0.1 * rng.standard_normal((20, 4)) for _ in range(2))
    attack[:, 2] -= 0.1
    with pytest.raises(SpecError, match=r"n_std=4: no head's .* \(5, 0\).*smaller n_std"):
        find_tracker_heads(normal, attack, HEADS)
    for values, message in (
        (normal[:1], "two or more prompts"),
        (normal[:, :2], "4 heads"),
        (np.full((3, 4), np.nan), "NaN"),
    ):
        with pytest.raises(SpecError, match=message):
            find_tracker_heads(values, attack, HEADS)


def test_ranges_that_mean_nothing_are_refused() -> None:
    call = planted({})
    for instruction, data, message in (
        ([], [DATA], "one token range of each"),
        ([INSTRUCTION], [], "one token range of each"),
        ([(1, 8)], [DATA], "overlap"),
        ([(3, 3)], [DATA], r"span=\(3, 3\)"),
        ([INSTRUCTION], [(6, 20)], "behind the query"),
    ):
        with pytest.raises(SpecError, match=message):
            instruction_shares(call, HEADS, instruction, data)
    with pytest.raises(SpecError, match="cannot see it"):
        instruction_shares(call, HEADS, [INSTRUCTION], [DATA], query=8)
    with pytest.raises(SpecError, match="layers"):
        instruction_shares(call, [(3, 0)], [INSTRUCTION], [DATA])


DOCUMENTS = [(0, 4), (4, 8), (8, 12)]
QUERY = (13, 14)


def looking(at: dict[tuple[int, int], list[float]]) -> QueriesKeys:
    return planted({h: [*row, 1e-3, 1e-3] for h, row in at.items()})


def test_documents_are_scored_by_what_the_query_adds() -> None:
    rng = np.random.default_rng(0)
    base = rng.uniform(0.05, 0.1, 12)
    more = base.copy()
    more[4:8] += 0.3  # the second document has what is asked for
    more[8] = 1e-6  # one token far below the mean of its document
    asked = looking({h: list(more) for h in HEADS})
    empty = looking({h: list(base) for h in HEADS})
    found = document_scores(asked, empty, HEADS[:2], DOCUMENTS, query=QUERY, empty_query=QUERY)
    # By hand, in float64.
    a, b = (np.r_[x, 1e-3, 1e-3] / (x.sum() + 2e-3) for x in (more, base))
    tokens = 2 * (a - b)
    wanted = []
    for first, stop in DOCUMENTS:
        part = tokens[first:stop]
        kept = part >= part.mean() - 2 * part.std(ddof=1)
        wanted.append(part[kept].sum())
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert found.argmax() == 1
    same = document_scores(empty, empty, HEADS, DOCUMENTS, query=QUERY, empty_query=QUERY)
    assert (same == 0).all()


def test_a_token_far_below_its_document_is_left_out() -> None:
    base, more = np.full(12, 0.1), np.full(12, 0.1)
    more[:11] += 0.1
    more[11] = 1e-9
    spans = [(0, 12)]
    asked, empty = (looking({HEADS[0]: list(x)}) for x in (more, base))
    found = document_scores(asked, empty, HEADS[:1], spans, query=QUERY, empty_query=QUERY)[0]
    a, b = (np.r_[x, 1e-3, 1e-3] / (x.sum() + 2e-3) for x in (more, base))
    assert found == pytest.approx((a - b)[:11].sum(), abs=1e-6)
    assert found > (a - b)[:12].sum() + 0.05


def test_a_document_of_one_token_counts() -> None:
    base, more = np.full(12, 0.1), np.full(12, 0.1)
    more[5] = 0.5
    asked, empty = (looking({HEADS[0]: list(x)}) for x in (more, base))
    spans = [(5, 6), (6, 7)]
    found = document_scores(asked, empty, HEADS[:1], spans, query=QUERY, empty_query=QUERY)
    assert found[0] > 0.2 > 0 > found[1]


def test_core_heads_are_those_that_look_at_the_relevant_document() -> None:
    rng = np.random.default_rng(1)
    scores, sums = [], []
    for prompt in range(6):
        relevant = prompt % 3
        at = {h: rng.uniform(0.05, 0.06, 12) for h in HEADS}
        at[5, 1][4 * relevant : 4 * relevant + 4] += 0.02
        call = looking({h: list(row) for h, row in at.items()})
        others = [span for i, span in enumerate(DOCUMENTS) if i != relevant]
        scores.append(
            contrastive_scores(
                call, HEADS, DOCUMENTS[relevant], others, query=QUERY, temperature=0.01
            )
        )
        sums.append(call.attention_to(HEADS, [DOCUMENTS[relevant], *others], queries=[13])[:, 0])
    found = find_core_heads(scores, HEADS, top=2, model="m")
    assert found.heads[0] == (5, 1)
    assert len(found.heads) == 2
    # The formula, in float64.
    logits = np.exp(np.asarray(sums, dtype=np.float64) / 0.01)
    np.testing.assert_allclose(scores, logits[:, :, 0] / logits.sum(axis=2), rtol=1e-4)
    assert (found.head_scores or ())[0] == pytest.approx(np.mean(scores, axis=0)[3])


def test_what_ranks_nothing_is_refused() -> None:
    call = looking({HEADS[0]: [0.1] * 12})
    for ask, message in (
        (lambda: document_scores(call, call, HEADS, [], query=QUERY, empty_query=QUERY), "none"),
        (
            lambda: document_scores(call, call, HEADS, [(0, 14)], query=QUERY, empty_query=QUERY),
            "put documents first",
        ),
        (lambda: contrastive_scores(call, HEADS, (0, 4), [], query=QUERY), "negatives: none"),
        (
            lambda: contrastive_scores(call, HEADS, (0, 4), [(4, 8)], query=QUERY, temperature=0),
            "temperature=0",
        ),
        (lambda: find_core_heads([[1.0, 2.0]], HEADS), "4 heads"),
        (lambda: find_core_heads([[1.0, 2.0, 3.0, np.nan]], HEADS), "NaN"),
        (lambda: find_core_heads([[1.0] * 4], HEADS, top=5), "allowed are 1 to 4"),
    ):
        with pytest.raises(SpecError, match=message):
            ask()
