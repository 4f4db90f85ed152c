"""Rows of earlier requests: those of the same tokens, and none of others."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from inspect_lens._vllm.registered.rows import BLOCK, CachedRows, Prefix, Reuse, RowCache
from inspect_lens.errors import CaptureError
from inspect_lens.spec import TensorData

WIDTH = 3
KIND = b"kind"


def rows_of(tokens: Sequence[int], lo: int = 0) -> NDArray[np.float32]:
    """Rows that tell all tokens up to theirs: as in a model, they depend on what is before."""
    sums = np.cumsum(np.asarray(tokens, dtype=np.float32) * np.arange(1, len(tokens) + 1))
    return np.stack([sums, -sums])[:, lo:, None].repeat(WIDTH, axis=2).astype(np.float32)


def cache(most: int = 1 << 20, *, is_served: bool = True) -> RowCache:
    return RowCache(most, is_served=is_served)


few = st.lists(st.integers(0, 2), min_size=0, max_size=70)


@given(earlier=st.lists(st.tuples(few, st.integers(0, 40)), max_size=4), tokens=few)
def test_what_is_found_is_what_a_run_of_these_tokens_has(
    earlier: list[tuple[list[int], int]], tokens: list[int]
) -> None:
    made = cache()
    for others, lo in earlier:
        rows = rows_of(others, min(lo, len(others)))
        made.keep(Prefix(KIND, others), rows, min(lo, len(others)), made.epoch)
    found = made.find(Prefix(KIND, tokens), len(tokens))
    if found is None:
        return
    n = found.n_tokens
    assert 0 < n <= len(tokens)
    for lo in (0, min(5, n - 1), n - 1):
        whole = found.before(rows_of(tokens, n), lo)
        np.testing.assert_array_equal(whole, rows_of(tokens, lo))


@given(tokens=st.lists(st.integers(0, 9), min_size=1, max_size=90), cut=st.integers(0, 90))
def test_all_whole_blocks_are_found(tokens: list[int], cut: int) -> None:
    made = cache()
    made.keep(Prefix(KIND, tokens), rows_of(tokens), 0, made.epoch)
    asked = tokens[: min(cut, len(tokens))]
    found = made.find(Prefix(KIND, asked), len(asked))
    assert (0 if found is None else found.n_tokens) == len(asked) // BLOCK * BLOCK


def test_sampled_tokens_count_as_far_as_they_were_fed() -> None:
    made, prefix = cache(), Prefix(KIND, range(20))
    prefix.extend(range(100, 113))
    fed = [*range(20), *range(100, 112)]  # the last one has no row
    made.keep(prefix, rows_of(fed), 0, made.epoch)
    found = made.find(Prefix(KIND, [*fed, 1, 2]), 34)
    assert found is not None
    assert found.n_tokens == 32


def test_another_kind_has_rows_of_its_own() -> None:
    made, tokens = cache(), list(range(32))
    made.keep(Prefix(b"layer 1", tokens), rows_of(tokens), 0, made.epoch)
    assert made.find(Prefix(b"layer 2", tokens), 32) is None


def test_at_the_second_time_only() -> None:
    made, tokens = cache(is_served=False), list(range(32))
    for n_bytes in (0, 2 * rows_of(tokens)[:, :BLOCK].nbytes):
        made.keep(Prefix(KIND, tokens), rows_of(tokens), 0, made.epoch)
        assert made.n_bytes == n_bytes


def test_bytes_are_bounded_and_beginnings_stay_longest() -> None:
    block = rows_of(range(BLOCK)).nbytes
    made, tokens = cache(2 * block), list(range(3 * BLOCK))
    made.keep(Prefix(KIND, tokens), rows_of(tokens), 0, made.epoch)
    assert made.n_bytes == 2 * block
    found = made.find(Prefix(KIND, tokens), len(tokens))
    assert found is not None
    assert found.n_tokens == 2 * BLOCK
    other = list(range(100, 100 + BLOCK))
    made.keep(Prefix(KIND, other), rows_of(other), 0, made.epoch)
    found = made.find(Prefix(KIND, tokens), len(tokens))
    assert found is not None
    assert found.n_tokens == BLOCK


def test_a_block_that_is_too_large_is_not_kept() -> None:
    made, tokens = cache(8), list(range(BLOCK))
    made.keep(Prefix(KIND, tokens), rows_of(tokens), 0, made.epoch)
    assert made.n_bytes == 0


def test_after_a_reset_nothing_of_before_is_kept() -> None:
    made, tokens = cache(), list(range(BLOCK))
    epoch = made.epoch
    made.keep(Prefix(KIND, tokens), rows_of(tokens), 0, epoch)
    made.clear()
    assert made.n_bytes == 0
    made.keep(Prefix(KIND, tokens), rows_of(tokens), 0, epoch)
    assert made.find(Prefix(KIND, tokens), BLOCK) is None


def test_rows_of_other_weights_are_no_part_of_an_answer() -> None:
    """A request may wait in the engine's queue while its weights are replaced."""
    made, tokens = cache(), list(range(48))
    rest = TensorData(rows_of(tokens, 32), "float32")

    def under_way() -> Reuse:
        made.keep(Prefix(KIND, tokens), rows_of(tokens), 0, made.epoch)
        prefix, asked = Prefix(KIND, tokens), cast("Any", SimpleNamespace(lo=0))
        known = made.find(prefix, 32)
        assert known is not None
        return Reuse(made, prefix, made.epoch, made.weights, asked, known)

    one = under_way()
    made.clear(keeps_weights=True)
    np.testing.assert_array_equal(one.whole(rest, ()).storage, rows_of(tokens))
    other = under_way()
    made.clear()
    with pytest.raises(CaptureError, match="weights may have changed"):
        other.whole(rest, ())


def test_rows_that_somebody_may_change_are_copied() -> None:
    tokens = list(range(BLOCK))
    for is_served in (True, False):
        made, rows = cache(is_served=is_served), rows_of(tokens)
        is_busy = threading.Event()
        made._thread.submit(is_busy.wait)
        for _ in range(2):
            made.keep_later(Prefix(KIND, tokens), rows, 0, made.epoch, copies=is_served)
        rows[:] = 0  # at once, as whoever centres them may
        is_busy.set()
        made.settle()
        found = made.find(Prefix(KIND, tokens), BLOCK)
        assert found is not None
        np.testing.assert_array_equal(found.blocks[0], rows_of(tokens))


def test_a_server_keeps_rows_where_they_lie_and_counts_all_that_this_holds() -> None:
    tokens = list(range(2 * BLOCK + 3))
    rows = rows_of(tokens)
    made = cache(8 * rows.nbytes)
    made.keep(Prefix(KIND, tokens), rows, 0, made.epoch)
    found = made.find(Prefix(KIND, tokens), len(tokens))
    assert found is not None
    assert [np.shares_memory(block, rows) for block in found.blocks] == [True, True]
    assert made.n_bytes == rows.nbytes
    del found
    held = weakref.ref(rows)
    del rows
    for i in range(1, 8):
        other = [100 * i + token for token in tokens]
        made.keep(Prefix(KIND, other), rows_of(other), 0, made.epoch)
    assert held() is not None
    assert made.n_bytes == made.most_bytes
    made.keep(Prefix(KIND, [9]), rows_of([9]), 0, made.epoch)
    last = list(range(1000, 1000 + len(tokens)))
    made.keep(Prefix(KIND, last), rows_of(last), 0, made.epoch)
    assert held() is None, "the oldest has gone, as a whole"
    assert made.n_bytes == made.most_bytes
    made.clear()
    room = np.empty((2, len(tokens) + 4, WIDTH), dtype=np.float32)
    made.keep(
        Prefix(KIND, tokens), np.ndarray(rows_of(tokens).shape, room.dtype, room), 0, made.epoch
    )
    assert made.n_bytes == room.nbytes, "memory behind the rows is held, too"


def test_what_is_mostly_known_or_mostly_empty_is_copied() -> None:
    tokens = list(range(4 * BLOCK))
    rows, made = rows_of(tokens), cache()
    made.keep(Prefix(KIND, tokens[: 3 * BLOCK]), rows[:, : 3 * BLOCK].copy(), 0, made.epoch)
    made.keep(Prefix(KIND, tokens), rows, 0, made.epoch)
    found = made.find(Prefix(KIND, tokens), len(tokens))
    assert found is not None
    assert [np.shares_memory(block, rows) for block in found.blocks] == [False] * 4
    assert made.n_bytes == rows.nbytes
    made.clear()
    made.keep(Prefix(KIND, tokens[:BLOCK]), rows[:, :BLOCK], 0, made.epoch)
    found = made.find(Prefix(KIND, tokens), len(tokens))
    assert found is not None
    assert not np.shares_memory(found.blocks[0], rows)
    assert made.n_bytes == found.blocks[0].nbytes


def test_a_beginning_that_is_used_stays_without_the_rest_of_its_result() -> None:
    """Else a few system prompts hold the whole cache, each with the conversation it came in."""
    n = 10
    results = [[1000 * i + token for token in range(n * BLOCK)] for i in range(40)]
    made = cache(8 * rows_of(results[0]).nbytes)

    def find(tokens: Sequence[int]) -> CachedRows | None:
        return made.find(Prefix(KIND, tokens), BLOCK)

    used = results[:8]
    for tokens in used:
        made.keep(Prefix(KIND, tokens), rows_of(tokens), 0, made.epoch)
    found = find(used[0])
    assert found is not None
    held = weakref.ref(found.blocks[0].base)
    del found
    for tokens in results[8:]:
        assert [find(one) is not None for one in used] == [True] * len(used)
        made.keep(Prefix(KIND, tokens), rows_of(tokens), 0, made.epoch)
    assert held() is None, "the beginning was copied out of its result"
    whole = [one for one in results if made.find(Prefix(KIND, one), n * BLOCK - 1) is not None]
    assert len(whole) == len(used) + 7, "and what it held is there for others"
    assert made.n_bytes <= made.most_bytes
    for one in whole:
        rows = made.find(Prefix(KIND, one), n * BLOCK)
        assert rows is not None
        np.testing.assert_array_equal(
            np.concatenate(rows.blocks, axis=1), rows_of(one)[:, : rows.n_tokens]
        )
