"""What a KV connector is asked and told, by what it finds blocks by, with vLLM's own structures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from inspect_lens._engine.hooks.runner import EAGER_KEY
from inspect_lens._engine.protocol.messages import CACHED_KEY, HASH_KEY
from inspect_lens._vllm.engine_core import (
    MARK_KEY,
    ConnectorGuard,
    GuardedConnector,
    without_requests,
)
from inspect_lens.spec import ENVELOPE_KEY

PLAIN: dict[str, Any] = {}
STEERED = {HASH_KEY: "nonce:0:abc"}
HOOKED = {HASH_KEY: None, EAGER_KEY: {"hash": "def"}}
NONE_KNOWN = {CACHED_KEY: 0}
SOME_KNOWN = {CACHED_KEY: 64}


def request(
    sealed: Any = None, *, key: str = "r", transfer: Any = None, skips: bool = False
) -> Any:
    extra = None if sealed is None else {ENVELOPE_KEY: sealed}
    sampling = SimpleNamespace(extra_args=extra, skip_reading_prefix_cache=skips)
    return SimpleNamespace(request_id=key, sampling_params=sampling, kv_transfer_params=transfer)


class Store:
    """Has 96 tokens of each prompt, and writes down what it hears."""

    def __init__(self, has: int | None = 96) -> None:
        self.has, self.heard = has, list[tuple[str, Any]]()

    def on_new_request(self, request: Any) -> None:
        self.heard.append(("new", request.request_id))

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        return (None, False) if self.has is None else (self.has - computed, True)

    def update_state_after_alloc(self, request: Any, blocks: Any, n: int) -> None:
        self.heard.append(("blocks", n))

    def build_connector_meta(self, output: Any) -> list[str]:
        return [r.req_id for r in output.scheduled_new_reqs]

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, Any]:
        self.heard.append(("finished", request.request_id))
        return True, {"remote_block_ids": block_ids}

    def register_finished_partial_tail(self, request: Any, block_ids: Any) -> bool:
        return False


def guarded(*behaviours: Any, again: bool = False, has: int | None = 96) -> Any:
    store = Store(has)
    GuardedConnector(store, ConnectorGuard(behaviours, loads_again=again))
    return store


@pytest.mark.parametrize(
    ("sealed", "computed", "taken"),
    [
        (None, 0, 96),
        (PLAIN, 0, 96),
        (NONE_KNOWN, 0, 0),
        (SOME_KNOWN, 0, 0),  # a load is taken whole, or not at all
        (SOME_KNOWN, 64, 0),
        ({CACHED_KEY: 96}, 64, 32),
        ({CACHED_KEY: 480}, 0, 96),
    ],
)
@pytest.mark.parametrize("behaviour", ["blocks", "tokens", "request", None])
def test_nothing_is_loaded_whose_rows_are_wanted(
    behaviour: Any, sealed: Any, computed: int, taken: int
) -> None:
    store = guarded(behaviour)
    found = store.get_num_new_matched_tokens(request(sealed), computed)
    assert found == (taken, taken > 0)


def test_a_capture_without_known_rows_loads_nothing_and_a_plain_request_is_vllms_to_judge() -> None:
    store = guarded("blocks")
    assert store.get_num_new_matched_tokens(request(PLAIN, skips=True), 0) == (0, False)
    assert store.get_num_new_matched_tokens(request(skips=True), 0) == (96, True)


def test_a_connector_that_still_looks_is_asked_again() -> None:
    assert guarded("blocks", has=None).get_num_new_matched_tokens(request(NONE_KNOWN), 0)[0] is None


def test_nothing_is_loaded_that_could_be_computed_a_second_time() -> None:
    store = guarded("blocks", again=True)
    assert store.get_num_new_matched_tokens(request(PLAIN), 0) == (0, False)
    assert store.get_num_new_matched_tokens(request(), 0) == (96, True)


@pytest.mark.parametrize("sealed", [STEERED, HOOKED])
@pytest.mark.parametrize("behaviour", ["tokens", None])
def test_who_finds_blocks_by_tokens_hears_nothing_of_steered_requests(
    behaviour: Any, sealed: Any
) -> None:
    store, steered, plain = guarded("blocks", behaviour), request(sealed), request(key="p")
    for one in (steered, plain):
        store.on_new_request(one)
        store.get_num_new_matched_tokens(one, 0)
        store.update_state_after_alloc(one, None, 0)
    assert store.get_num_new_matched_tokens(steered, 0) == (0, False)
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [new("r"), new("p")]
    assert store.build_connector_meta(output) == ["p"]
    assert store.request_finished(steered, [1]) == (False, None)
    assert store.request_finished(plain, [1]) == (True, {"remote_block_ids": [1]})
    assert store.heard == [("new", "p"), ("blocks", 0), ("finished", "p")]


def test_a_request_that_is_over_is_forgotten_after_the_step_that_says_so() -> None:
    guard = ConnectorGuard(["tokens"], loads_again=False)
    guard.add(request(STEERED, key="a"))
    guard.add(request(STEERED, key="b"))
    guard.add(request(PLAIN, key="c"))
    assert guard.take_finished(set()) == {"a", "b"}
    assert guard.take_finished({"a", "c"}) == {"a", "b"}
    assert guard.take_finished({"b"}) == {"b"}
    assert guard.take_finished(set()) == frozenset()


@pytest.mark.parametrize("first", [None, PLAIN, STEERED, HOOKED, {HASH_KEY: "nonce:0:other"}])
@pytest.mark.parametrize("second", [None, PLAIN, {HASH_KEY: "another:7:abc"}, HOOKED])
def test_blocks_of_another_engine_are_taken_if_both_requests_are_steered_alike(
    first: Any, second: Any
) -> None:
    computes, goes_on = guarded("request"), guarded("request")
    _, transfer = computes.request_finished(request(first), [3])
    assert transfer["remote_block_ids"] == [3]
    found = goes_on.get_num_new_matched_tokens(request(second, transfer=transfer), 0)
    # Front-ends have salts of their own; what they steer with is compared.
    alike = {None: "", "nonce:0:abc": "abc", "another:7:abc": "abc", "nonce:0:other": "other"}

    def content(sealed: Any) -> str:
        sealed = sealed or {}
        return "hooks" if EAGER_KEY in sealed else alike[sealed.get(HASH_KEY)]

    assert found == ((96, True) if content(first) == content(second) else (0, False))


def test_an_engine_that_does_not_say_how_a_prompt_was_steered_lends_it_to_plain_requests() -> None:
    store = guarded("request")
    transfer = {"do_remote_prefill": True}
    assert store.get_num_new_matched_tokens(request(transfer=transfer), 0) == (96, True)
    assert store.get_num_new_matched_tokens(request(STEERED, transfer=transfer), 0) == (0, False)
    assert MARK_KEY not in transfer


def test_a_request_that_cannot_be_judged_is_kept_from_the_connector() -> None:
    store, broken = guarded("tokens"), request("no envelope")
    store.on_new_request(broken)
    assert store.get_num_new_matched_tokens(broken, 0) == (0, False)
    assert store.request_finished(broken, []) == (False, None)
    assert store.heard == []


def new(key: str) -> NewRequestData:
    return NewRequestData(
        req_id=key,
        prompt_token_ids=[1, 2],
        mm_features=[],
        sampling_params=None,
        pooling_params=None,
        block_ids=([0],),
        num_computed_tokens=0,
        lora_request=None,
    )


def test_a_step_without_some_requests() -> None:
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [new("a"), new("b")]
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=["c", "d", "e"],
        resumed_req_ids={"d", "e"},
        new_token_ids=[],
        all_token_ids={"d": [1], "e": [2]},
        new_block_ids=[None, ([4],), ([5],)],
        num_computed_tokens=[10, 20, 30],
        num_output_tokens=[1, 2, 3],
    )
    output.num_scheduled_tokens = {"a": 2, "b": 2, "c": 1, "d": 7, "e": 1}
    output.total_num_scheduled_tokens = 13
    output.scheduled_spec_decode_tokens = {"c": [9], "d": [8]}
    output.finished_req_ids = {"f", "g"}
    told = without_requests(output, {"b", "d", "g"})
    assert [one.req_id for one in told.scheduled_new_reqs] == ["a"]
    assert told.scheduled_cached_reqs == CachedRequestData(
        req_ids=["c", "e"],
        resumed_req_ids={"e"},
        new_token_ids=[],
        all_token_ids={"e": [2]},
        new_block_ids=[None, ([5],)],
        num_computed_tokens=[10, 30],
        num_output_tokens=[1, 3],
    )
    assert told.num_scheduled_tokens == {"a": 2, "c": 1, "e": 1}
    assert told.total_num_scheduled_tokens == 4
    assert told.scheduled_spec_decode_tokens == {"c": [9]}
    assert told.finished_req_ids == {"f"}
    # What the workers get is as it was.
    assert output.scheduled_cached_reqs.req_ids == ["c", "d", "e"]
    assert output.total_num_scheduled_tokens == 13
    assert output.finished_req_ids == {"f", "g"}
