"""Results that are attached in the event loop, when all of them are there."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from inspect_lens import CaptureSpec, LensRequest
from inspect_lens._engine._message import Failure
from inspect_lens._vllm import _arrivals
from inspect_lens._vllm._arrivals import Arrivals, arrivals_of
from inspect_lens._vllm._choices import Choice, Ticket
from inspect_lens._vllm._frontend import FRONT_END_WRAPPERS
from inspect_lens.errors import CaptureError, SpecError
from tests.kit.steps import HIDDEN

from .test_ahead import N_MAX, N_PROMPT, REQUESTS, Engine, results_of
from .test_results import completion, output

N_COMPLETION = N_MAX - N_PROMPT + 1


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    assert made.results.n_open == made.collector.n_open == 0
    assert made.collector.news.n_waiting == 0
    assert not made.collector.news.hurry.is_set()
    made.worker.stepper.close()
    made.collector.close()


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
        assert engine.collector.news.hurry.is_set() or "prompt" in asked
        last_step(engine, keys)

    keys = begun(engine, 3, asked)
    if not is_late:
        last_step(engine, keys)
    outputs = ended(engine, keys)
    given = attach(engine, outputs, *([late()] if is_late else []))
    removed(engine, keys)
    assert given == [None] * 3
    assert results_of(outputs) == truth


def test_it_is_done_in_the_loop_together_and_others_have_their_turn(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    finish, each = Choice.finish, engine.results.attach_each
    sizes: list[int] = []

    def note(self: Choice, cached_tokens: int) -> None:
        threads.add(threading.current_thread().name)
        finish(self, cached_tokens)

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
        while sum(sizes) < 40:
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


def test_who_waits_for_ever_keeps_nobody_else(engine: Engine) -> None:
    engine.results.timeout_s = 0.3
    keys = begun(engine, 3, "both")
    last_step(engine, keys[1:])
    outputs = ended(engine, keys)
    done: list[int] = []

    async def look() -> None:
        await asyncio.sleep(0.1)
        done.extend(i for i, one in enumerate(outputs) if hasattr(one, "inspect_lens"))

    error, *whole = attach(engine, outputs, look())
    removed(engine, keys)
    assert done == [1, 2]
    assert whole == [None, None]
    assert isinstance(error, CaptureError)
    assert "did not arrive within 0.3 s" in str(error)
    assert not hasattr(outputs[0], "inspect_lens")


def test_a_failure_is_that_of_its_own_request(engine: Engine) -> None:
    keys = begun(engine, 3, "both")
    outputs = ended(engine, keys)

    async def fail() -> None:
        await asyncio.sleep(0.05)
        with engine.collector.news.changed:
            engine.collector._pending[keys[1]].failure = Failure(keys[1], "SpecError", "so it is")
            engine.collector.news.tell()
        last_step(engine, [keys[0], keys[2]])

    one, error, other = attach(engine, outputs, fail())
    removed(engine, keys)
    assert one is other is None
    assert isinstance(error, SpecError)
    assert "so it is" in str(error)


def test_a_request_that_was_aborted_meanwhile_is_an_error(engine: Engine) -> None:
    keys = begun(engine, 1, "both")
    outputs = ended(engine, keys)
    engine.results.abandon(keys)
    (error,) = attach(engine, outputs)
    removed(engine, keys)
    assert isinstance(error, CaptureError)
    assert "aborted" in str(error)


def test_who_is_cancelled_leaves_nothing(engine: Engine) -> None:
    keys = begun(engine, 2, "both")
    outputs = ended(engine, keys)

    async def cancelled() -> None:
        mine = arrivals_of(asyncio.get_running_loop(), engine.results)
        one, other = (asyncio.create_task(mine.attach(o)) for o in outputs)
        await asyncio.sleep(0.05)
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one
        assert (engine.results.n_open, engine.collector.n_open) == (1, 1)
        last_step(engine, keys)
        await other

    asyncio.run(cancelled())
    removed(engine, keys)
    assert not hasattr(outputs[0], "inspect_lens")
    assert outputs[1].inspect_lens.n_completion == N_COMPLETION


def test_a_loop_that_was_closed_is_not_waited_for_any_more(engine: Engine) -> None:
    keys = begun(engine, 2, "both")
    outputs = ended(engine, keys)
    loop = asyncio.new_event_loop()
    mine = arrivals_of(loop, engine.results)
    waiting = loop.create_task(mine.attach(outputs[0]))
    loop.run_until_complete(asyncio.sleep(0.05))
    assert engine.collector.news.n_waiting == 1
    waiting.cancel()
    loop.close()  # without a turn for what was cancelled
    last_step(engine, keys)
    (other,) = engine.results.attach_each(outputs[1:])
    assert other is None
    engine.results.abandon(keys)
    removed(engine, keys)
    gone = weakref.ref(loop)
    del loop, mine, waiting
    gc.collect()
    assert gone() is None, "what waits in a loop does not keep it"


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
    monkeypatch.setattr(_arrivals, "_EVERY_S", 1e6)
    assert attach(engine, ended(engine, keys)) == [None]
    removed(engine, keys)
    assert looks == 6


@pytest.mark.parametrize(
    ("change", "is_told"),
    [({}, True), ({"steer": ("a vector",)}, False), ({"is_speculative": True}, False)],
)
def test_what_is_told_of(engine: Engine, change: dict[str, Any], is_told: bool) -> None:
    keys = begun(engine, 1, "both")
    (one,) = ended(engine, keys)
    envelope = engine.results._expected[keys[0]].envelope
    for name, value in change.items():
        object.__setattr__(envelope, name, value)
    assert engine.results.tells_all(one) is is_told
    engine.results.forget(one)
    removed(engine, keys)


@pytest.mark.parametrize("where", ["is_ready", "finish"])
def test_an_error_of_our_own_leaves_nobody_waiting(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    keys = begun(engine, 2, "both")
    last_step(engine, keys)
    outputs = ended(engine, keys)

    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(engine.results if where == "is_ready" else Choice, where, broken)
    given = attach(engine, outputs)
    engine.results.abandon(keys)
    removed(engine, keys)
    assert [type(error) for error in given] == [ZeroDivisionError] * 2


WIDE = 1 << 14
"""Times the width of a row, for sizes that matter."""


@pytest.mark.parametrize(
    ("asked", "n_completion", "is_light"),
    [
        ({"layers": (0,), "transport": "binary"}, N_COMPLETION, True),
        # Rows that fill half of what they lie in stay there; others are copied.
        ({"layers": (0,), "transport": "binary"}, 2, True),
        ({"layers": (0,), "transport": "binary"}, 1, False),
        ({"layers": (0, 5), "transport": "binary"}, N_COMPLETION, True),
        ({"layers": (0, 5), "transport": "binary"}, N_COMPLETION - 1, False),
        ({"layers": (0,), "transport": "binary", "reduce": "mean"}, N_COMPLETION, False),
        ({"layers": (0,), "transport": "binary", "reduce": "last"}, N_COMPLETION, False),
        # Compressed, and made text.
        ({"layers": (0,), "transport": "inline"}, N_COMPLETION, False),
    ],
)
def test_what_is_done_in_the_loop(
    engine: Engine, asked: dict[str, Any], n_completion: int, is_light: bool
) -> None:
    key = engine.start(LensRequest(capture=CaptureSpec(**asked)))
    (one,) = ended(engine, [key])
    one.outputs[0].inspect_lens_ticket = Ticket(key, n_completion=n_completion)
    is_text = asked["transport"] != "binary"
    assert engine.results.is_light(one, encodes=True) is not is_text, "eight numbers a row"
    assert engine.results.is_light(one, encodes=False)
    object.__setattr__(engine.results._expected[key].envelope.capture, "hidden", HIDDEN * WIDE)
    assert engine.results.is_light(one, encodes=True) is is_light
    engine.results.forget(one)
    removed(engine, [key])


@pytest.mark.parametrize("is_light", [False, True])
def test_a_server_attaches_either_way(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, is_light: bool
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    threads: list[bool] = []
    finish = Choice.finish

    def note(self: Choice, cached_tokens: int) -> None:
        threads.append(threading.current_thread() is threading.main_thread())
        finish(self, cached_tokens)

    keys = begun(engine, 2, "both")
    last_step(engine, keys[1:])
    outputs = ended(engine, keys)
    engine.results.timeout_s = 0.2
    monkeypatch.setattr(Choice, "finish", note)
    monkeypatch.setattr(engine.results, "is_light", lambda one, encodes: is_light)
    with ThreadPoolExecutor(2) as pool:
        front = SimpleNamespace(results=engine.results, waiting=pool)
        monkeypatch.setattr("inspect_lens._vllm._frontend.front_end", lambda: front)
        monkeypatch.setattr("inspect_lens._vllm._frontend.judge_early", lambda *args: None)

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


def test_arrivals_are_one_for_each_loop(engine: Engine) -> None:
    async def mine() -> Arrivals:
        return arrivals_of(asyncio.get_running_loop(), engine.results)

    assert asyncio.run(mine()) is not asyncio.run(mine())
