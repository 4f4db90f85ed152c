"""What is kept for requests to come stays within its room, whatever comes."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from inspect_lens.model import _request, _scores
from inspect_lens.sae import _encoder
from inspect_lens.spec._request import BYTES_BESIDE, WEIGHTS, Budget, Cache

MOST, MOST_BYTES = 4, 40 * BYTES_BESIDE
LARGEST = MOST_BYTES // 16 - BYTES_BESIDE


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2 * LARGEST))))
def test_it_holds_the_latest_that_fit(asked: list[tuple[int, int]]) -> None:
    kept: Cache[int, tuple[int, int]] = Cache(MOST, Budget(MOST_BYTES))
    order: list[tuple[int, int]] = []
    for i, (key, nbytes) in enumerate(asked):
        kept.keep(key, (key, i), nbytes)
        if nbytes <= LARGEST:
            order = [(k, n) for k, n in order if k != key] + [(key, nbytes)]
            assert kept.get(key) == (key, i)
        while len(order) > MOST or sum(n + BYTES_BESIDE for _, n in order) > MOST_BYTES:
            order.pop(0)
        assert len(kept) == len(order)
        for k, _ in order:
            found = kept.get(k)
            assert found is not None
            assert found[0] == k


def test_a_value_that_would_fill_most_of_it_is_not_kept() -> None:
    kept: Cache[int, str] = Cache(MOST, Budget(MOST_BYTES))
    kept.keep(0, "fits", LARGEST)
    kept.keep(1, "too large", LARGEST + 1)
    assert (kept.get(0), kept.get(1)) == ("fits", None)


def test_weights_stay_within_their_room_and_the_latest_always_has_some() -> None:
    weights = Budget(100 * BYTES_BESIDE, most_each=1 << 62)
    lenses: Cache[str, str] = Cache(1 << 10, weights)
    probes: Cache[str, str] = Cache(1 << 10, weights)
    for name in "ab":
        lenses.keep(name, name, 60 * BYTES_BESIDE)
    assert (lenses.get("a"), lenses.get("b")) == (None, "b")
    probes.keep("huge", "huge", 1000 * BYTES_BESIDE)
    assert (lenses.get("b"), probes.get("huge")) == (None, "huge")


def test_what_a_server_may_be_told_of_is_kept_in_one_room() -> None:
    for cache in (_request.LENSES, _scores.FORMS, _encoder.BY_CONTENT_NAME):
        assert cache._budget is WEIGHTS  # type: ignore[attr-defined]


def test_threads_may_keep_at_once() -> None:
    every = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        _keep_at_once()
    finally:
        sys.setswitchinterval(every)


def _keep_at_once() -> None:
    kept: Cache[int, int] = Cache(MOST, Budget(MOST_BYTES))

    def many(first: int) -> None:
        for i in range(first, first + 2000):
            kept.keep(i % 97, i, i % LARGEST)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(many, range(8)))
    assert len(kept) == MOST
    assert kept._budget.n_bytes == sum(kept._budget.order.values()) <= MOST_BYTES


def test_caches_share_a_budget_and_one_that_is_gone_takes_none_of_it() -> None:
    budget = Budget(MOST_BYTES)
    first, second = (Cache[int, bytes](1000, budget) for _ in range(2))
    for i in range(30):
        first.keep(i, b"")
    for i in range(30):
        second.keep(i, b"")
    assert (len(first), len(second)) == (10, 30), "what came first goes first"
    assert budget.n_bytes == MOST_BYTES
    del first
    for i in range(40):
        second.keep(i, b"")
    assert len(second) == 40
