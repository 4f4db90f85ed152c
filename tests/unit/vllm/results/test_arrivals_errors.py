"""Results attached in the event loop: errors, requests that are given up, loops that end."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref

import pytest

from inspect_lens._engine.protocol.messages import Failure
from inspect_lens._vllm.results.event_loop import arrivals_of
from inspect_lens.errors import CaptureError, SpecError
from tests.kit.repository import ROOT
from tests.kit.waiting import soon
from tests.unit.vllm.results.test_ahead import Engine
from tests.unit.vllm.results.test_arrivals import (
    N_COMPLETION,
    attach,
    begun,
    ended,
    last_step,
    removed,
)
from tests.unit.vllm.results.test_arrivals import engine as engine


def test_who_waits_for_ever_keeps_nobody_else(engine: Engine) -> None:
    engine.results.timeout_s = 2.0
    keys = begun(engine, 3, "both")
    last_step(engine, keys[1:])
    outputs = ended(engine, keys)
    done: list[bool] = []

    async def look() -> None:
        assert await soon(lambda: all(hasattr(one, "inspect_lens") for one in outputs[1:]))
        done.append(engine.results.n_open == 1)

    error, *whole = attach(engine, outputs, look())
    removed(engine, keys)
    assert done == [True], "while it still waits"
    assert whole == [None, None]
    assert isinstance(error, CaptureError)
    assert "did not arrive within 2 s" in str(error)
    assert not hasattr(outputs[0], "inspect_lens")


def test_a_failure_is_that_of_its_own_request(engine: Engine) -> None:
    keys = begun(engine, 3, "both")
    outputs = ended(engine, keys)

    async def fail() -> None:
        await asyncio.sleep(0.05)
        with engine.collector.notifier.changed:
            engine.collector._pending[keys[1]].failure = Failure(keys[1], "SpecError", "so it is")
            engine.collector.notifier.tell()
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
    assert engine.collector.notifier.n_waiting == 1
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


@pytest.mark.slow
def test_an_error_goes_with_who_holds_it_and_takes_its_request_along() -> None:
    # In a process of its own: Inspect may have patched asyncio, with tasks that keep more.
    code = f"from {__name__} import error_is_let_go_of as f; f()"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def error_is_let_go_of() -> None:
    """Fails where an error, or the memory of its request, waits for the garbage collector."""
    engine = Engine()
    engine.results.timeout_s = 0.1
    keys = begun(engine, 1, "both")
    held = weakref.ref(engine.collector._pending[keys[0]])
    outputs = ended(engine, keys)
    gc.collect()
    gc.disable()
    try:
        (error,) = given = attach(engine, outputs)
        assert isinstance(error, CaptureError)
        del error
        given.clear()
        assert held() is None
    finally:
        gc.enable()
    removed(engine, keys)
    engine.worker.stepper.close()
    engine.collector.close()
