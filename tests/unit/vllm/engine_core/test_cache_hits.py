"""The prefix cache is read as far as a request allows; a request without the lens reads all."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from inspect_lens._engine.protocol.messages import CACHED_KEY
from inspect_lens._vllm.engine_core import SCHEDULER_WRAPPERS
from inspect_lens._vllm.frontend import state
from inspect_lens._vllm.registered.persistent_hooks import HookBook
from inspect_lens._vllm.registered.rows import HARMLESS, is_harmless
from inspect_lens.errors import LensError
from inspect_lens.spec import ENVELOPE_KEY


class Coordinator:
    """Has everything in its cache."""

    name = "coordinator"

    def find_longest_cache_hit(self, block_hashes: Any, max_cache_hit_length: int) -> int:
        return max_cache_hit_length


class Manager:
    """What is used of vLLM's KVCacheManager."""

    def __init__(self) -> None:
        self.coordinator: Any = Coordinator()

    def get_computed_blocks(self, request: Any) -> int:
        assert self.coordinator.name == "coordinator"
        return int(self.coordinator.find_longest_cache_hit([], request.num_tokens - 1))


@pytest.mark.parametrize(
    ("extra", "hits"),
    [
        (None, 99),
        ({}, 99),
        ({"other": 1}, 99),
        ({ENVELOPE_KEY: {}}, 99),
        ({ENVELOPE_KEY: {CACHED_KEY: 0}}, 0),
        ({ENVELOPE_KEY: {CACHED_KEY: 48}}, 48),
        ({ENVELOPE_KEY: {CACHED_KEY: 480}}, 99),
        ({ENVELOPE_KEY: "no envelope"}, 0),
    ],
)
def test_hits_are_bounded(extra: Any, hits: int) -> None:
    manager, before = Manager(), None
    before = manager.coordinator
    find = SCHEDULER_WRAPPERS["cached_blocks"](Manager.get_computed_blocks)
    request = SimpleNamespace(num_tokens=100, sampling_params=SimpleNamespace(extra_args=extra))
    assert find(manager, request) == hits
    assert manager.coordinator is before


def test_a_request_without_sampling_reads_all() -> None:
    find = SCHEDULER_WRAPPERS["cached_blocks"](Manager.get_computed_blocks)
    assert find(Manager(), SimpleNamespace(num_tokens=100, sampling_params=None)) == 99


@pytest.mark.parametrize(
    ("method", "args", "what"),
    [
        ("add_lora", (), None),
        ("collective_rpc", ("inspect_lens_stats", None, (), None), None),
        ("collective_rpc", ("reload_weights", None, (), None), "weights"),
        ("collective_rpc", (print, None, (), None), "weights"),
        ("reset_prefix_cache", (), "rows"),
        ("pause_scheduler", ("keep", True), "rows"),
        ("pause_generation", ("keep", True), "rows"),  # of vLLM 0.33
        ("release_kv_cache_memory", (), "rows"),
        ("sleep", (1,), "rows"),
        ("wake_up", (None,), "rows"),
        ("something_new", (), "weights"),
    ],
)
def test_rows_are_forgotten_before_and_after_what_may_change_them(
    method: str, args: Any, what: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def forget_rows(*, keeps_weights: bool) -> None:
        told.append("rows" if keeps_weights else "weights")

    monkeypatch.setattr(state._Holder, "front_end", SimpleNamespace(forget_rows=forget_rows))
    monkeypatch.setattr(HookBook, "books", {})  # other tests of this process may have some
    assert is_harmless(method, args) is (what is None)

    def call(self: Any, method: str, *args: Any) -> str:
        told.append(method)
        return "done"

    async def call_async(self: Any, method: str, *args: Any, engine: Any) -> str:
        return call(self, method, *args)

    expected = [method] if what is None else [what, method, what]
    client = SimpleNamespace(vllm_config=SimpleNamespace(lora_config=None))
    assert state.RESET_WRAPPERS["call_utility"](call)(client, method, *args) == "done"
    assert told == expected
    told.clear()
    wrapped = state.RESET_WRAPPERS["call_utility_async"](call_async)
    assert asyncio.run(wrapped(client, method, *args, engine=b"0")) == "done"
    assert told == expected


@pytest.mark.parametrize("method", ["reload_weights", print, "inspect_lens_stats"])
@pytest.mark.parametrize("runs_code", [True, False])
def test_what_may_change_weights_drops_prefetched_parameters_before(
    method: Any, runs_code: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSPECT_LENS_ALLOW_CODE", str(int(runs_code)))
    told: list[tuple[Any, ...]] = []

    def call(
        self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> str:
        told.append((method, timeout, args, kwargs))
        if method == "inspect_lens_hooks":
            raise RuntimeError("a worker is gone")
        return "done"

    wrapped = SCHEDULER_WRAPPERS["collective_rpc"](call)
    assert wrapped(None, method, 5.0, ("a",), kwargs={}) == "done"
    drops = ("inspect_lens_hooks", 5.0, ("clear_prefetched", None), None)
    own = (method, 5.0, ("a",), {})
    assert told == ([drops, own] if runs_code and method != "inspect_lens_stats" else [own])


@pytest.mark.parametrize("told", ["inspect_lens_register", "inspect_lens_hooks"])
def test_what_the_second_of_two_engines_cannot_do_is_an_error(
    told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else half of the requests that name it would fail."""
    monkeypatch.setattr(state._Holder, "front_end", SimpleNamespace())
    answers: dict[bytes, list[Any]] = {b"0": [True, None], b"1": [True, "CapacityError: no room"]}

    async def call(self: Any, method: str, *args: Any, engine: bytes) -> list[Any]:
        return answers[engine]

    wrapped = state.RESET_WRAPPERS["call_utility_async"](call)

    async def of_all(method: str, *args: Any) -> Any:
        engines = [wrapped(None, method, *args, engine=engine) for engine in answers]
        return (await asyncio.gather(*engines))[0]

    with pytest.raises(LensError, match="CapacityError: no room"):
        asyncio.run(of_all("collective_rpc", told, None, (), {}))
    assert asyncio.run(of_all("collective_rpc", "inspect_lens_taps", None, (), {})) == answers[b"0"]


def test_what_changes_weights_is_not_called_harmless() -> None:
    changing = {"sleep", "wake_up", "reset_prefix_cache", "collective_rpc", "pause_scheduler"}
    assert not changing & HARMLESS
