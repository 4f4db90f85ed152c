"""Results that are attached in the event loop, when all of them are there."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from inspect_lens import LensRequest
from inspect_lens._vllm.frontend.wrappers import FRONT_END_WRAPPERS
from inspect_lens._vllm.results import event_loop
from inspect_lens._vllm.results.choices import Choice, Expected, Ticket
from inspect_lens._vllm.results.event_loop import arrivals_of
from inspect_lens.errors import CaptureError
from tests.unit.vllm.results.test_ahead import N_MAX, N_PROMPT, REQUESTS, Engine, results_of
from tests.unit.vllm.results.test_results import completion, output

N_COMPLETION = N_MAX - N_PROMPT + 1


@pytest.fixture
def engine(engine: Engine) -> Iterator[Engine]:
    yield engine
    assert not engine.collector.notifier.hurry.is_set()


def begun(engine: Engine, n: int, name: str) -> list[str]:
    """Requests whose last step is still to come."""
    keys = [engine.start(LensRequest(**REQUESTS[name])) for _ in range(n)]
    for some in (keys[i : i + 8] for i in range(0, n, 8)):
        engine.step(some, 0, N_PROMPT)
        engine.run(some, until=N_MAX - 1)
    return keys


def last_step(engine: Engine, keys: list[str]) -> None:
    for some in (keys[i : i + 8] for i in range(0, len(keys), 8)):
        engine.step(some, N_MAX - 1)


def ended(engine: Engine, keys: list[str]) -> list[Any]:
    """Outputs of requests that are over."""
    engine.worker.stepper.leave(keys)
    choices = [completion(0) for _ in keys]
    for choice, key in zip(choices, keys, strict=True):
        choice.inspect_lens_ticket = Ticket(key, n_completion=N_COMPLETION)
    return [output(choice) for choice in choices]


def removed(engine: Engine, keys: list[str]) -> None:
    for key in keys:
        engine.worker.stepper.remove(key)


def attach(engine: Engine, outputs: list[Any], *beside: Coroutine[Any, Any, Any]) -> list[Any]:
    """Attach all results in a loop of its own, and do something beside; errors are returned."""

    async def all_of_them() -> list[Any]:
        mine = arrivals_of(asyncio.get_running_loop(), engine.results)
        assert mine is arrivals_of(asyncio.get_running_loop(), engine.results)
        given = await asyncio.gather(
            *(mine.attach(one) for one in outputs), *beside, return_exceptions=True
        )
        return given[: len(outputs)]

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("asked", REQUESTS, ids=REQUESTS.keys())
@pytest.mark.parametrize("is_late", [False, True])
def test_it_makes_no_difference_to_anything(engine: Engine, asked: str, is_late: bool) -> None:
    keys = begun(engine, 3, asked)
    last_step(engine, keys)
    truth = results_of(engine.end(keys))
    assert not engine.errors
    engine.asked.clear()

    async def late() -> None:
        await asyncio.sleep(0.05)
        assert engine.collector.notifier.hurry.is_set() or "prompt" in asked
        last_step(engine, keys)

    keys = begun(engine, 3, asked)
    if not is_late:
        last_step(engine, keys)
    outputs = ended(engine, keys)
    given = attach(engine, outputs, *([late()] if is_late else []))
    removed(engine, keys)
    assert given == [None] * 3
    assert results_of(outputs) == truth


def test_what_is_known_before_is_done_while_the_engine_is_at_it(engine: Engine) -> None:
    keys = begun(engine, 40, "both")
    last_step(engine, keys)
    truth = results_of(engine.end(keys))
    engine.asked.clear()
    keys = begun(engine, 40, "both")

    async def ahead() -> None:
        mine = arrivals_of(asyncio.get_running_loop(), engine.results)
        for key in keys:
            mine.prepare_later(key)
        assert all(one is not None and one.prepared is None for one in expected)
        while any(one.prepared is None for one in expected if one is not None):
            await asyncio.sleep(0.01)

    expected = [engine.results.expected(key) for key in keys]
    asyncio.run(asyncio.wait_for(ahead(), 30))
    last_step(engine, keys)
    outputs = ended(engine, keys)
    assert attach(engine, outputs) == [None] * 40
    removed(engine, keys)
    assert results_of(outputs) == truth


def test_it_is_done_in_the_loop_together_and_others_have_their_turn(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    finish, each = Choice.finish, engine.results.attach_each
    sizes: list[int] = []

    def note(self: Choice) -> None:
        threads.add(threading.current_thread().name)
        finish(self)

    def note_size(outputs: list[Any], **kwargs: Any) -> Any:
        sizes.append(len(outputs))
        return each(outputs, **kwargs)

    monkeypatch.setattr(Choice, "finish", note)
    monkeypatch.setattr(engine.results, "attach_each", note_size)
    keys = begun(engine, 40, "both")
    last_step(engine, keys)
    engine.settle()
    threads.clear()
    sizes.clear()
    turns: list[int] = []

    async def others() -> None:
        deadline = time.monotonic() + 30
        while sum(sizes) < 40 and time.monotonic() < deadline:
            turns.append(sum(sizes))
            await asyncio.sleep(0)

    outputs = ended(engine, keys)
    assert attach(engine, outputs, others()) == [None] * 40
    removed(engine, keys)
    assert threads == {threading.main_thread().name}
    assert [size for size in sizes if size] == [32, 8]
    assert set(turns) == {0, 32}
    for number, one in enumerate(outputs):
        assert one.activations["residual_stream"][0, :, 0].tolist() == N_MAX * [number]


def test_what_nobody_tells_of_is_looked_at_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steering is noted on a board, without a message."""
    keys = begun(engine, 1, "both")
    last_step(engine, keys)
    engine.settle()
    is_there, looks = engine.results.is_ready, 0

    def not_yet(one: Any) -> bool:
        nonlocal looks
        looks += 1
        return looks > 5 and is_there(one)

    monkeypatch.setattr(engine.results, "is_ready", not_yet)
    monkeypatch.setattr(engine.results, "tells_all", lambda one: False)
    monkeypatch.setattr(event_loop, "_EVERY_S", 1e6)
    assert attach(engine, ended(engine, keys)) == [None]
    removed(engine, keys)
    assert looks == 6


@pytest.mark.parametrize(
    ("use", "n_tokens", "is_light"),
    [
        ({"tokens": True}, 1000, True),
        ({"tokens": True}, 10_000, False),
        ({"tokens": True, "aggregate": "max"}, 100, True),
        ({"tokens": True, "aggregate": "max"}, 1000, False),
        ({"alarm": "flag", "threshold": 1.0}, 1000, False),
        ({}, 10_000, True),
    ],
)
def test_only_scores_that_take_long_to_read_go_to_a_thread(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    use: dict[str, Any],
    n_tokens: int,
    is_light: bool,
) -> None:
    """Threads of answers that end together wait for the same rows, and for the interpreter."""
    key = engine.start(LensRequest(probes=[{"name": "p", **use}]))
    choice = completion(0)
    choice.inspect_lens_ticket = Ticket(key, n_completion=N_COMPLETION)
    monkeypatch.setattr(Expected, "n_read", lambda self, n_fed: n_tokens)
    assert engine.results.is_light(output(choice), encodes=True) == is_light
    engine.results.forget(output(choice))
    engine.worker.stepper.leave([key])
    engine.worker.stepper.remove(key)


@pytest.mark.parametrize("is_light", [False, True])
def test_a_server_attaches_either_way(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, is_light: bool
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    threads: list[bool] = []
    finish = Choice.finish

    def note(self: Choice) -> None:
        threads.append(threading.current_thread() is threading.main_thread())
        finish(self)

    keys = begun(engine, 2, "both")
    last_step(engine, keys[1:])
    outputs = ended(engine, keys)
    engine.results.timeout_s = 0.2
    monkeypatch.setattr(Choice, "finish", note)
    monkeypatch.setattr(engine.results, "is_light", lambda one, encodes: is_light)
    with ThreadPoolExecutor(2) as pool:
        front = SimpleNamespace(results=engine.results, waiting=pool)
        monkeypatch.setattr("inspect_lens._vllm.frontend.wrappers.front_end", lambda: front)
        monkeypatch.setattr("inspect_lens._vllm.frontend.wrappers.judge_early", lambda *args: 0)

        async def generated(self: Any, one: Any) -> Any:
            yield one

        generate = FRONT_END_WRAPPERS["async_generate"](generated)
        fake = SimpleNamespace(input_processor=None)

        async def ask(one: Any) -> list[Any]:
            return [found async for found in generate(fake, one)]

        async def both() -> list[Any]:
            return await asyncio.gather(*map(ask, outputs), return_exceptions=True)

        error, found = asyncio.run(both())
    removed(engine, keys)
    assert isinstance(error, CaptureError)
    assert str(error).startswith("CaptureError: request "), "clients tell from it"
    assert found == outputs[1:]
    assert found[0].inspect_lens.n_completion == N_COMPLETION
    assert threads == [is_light]
