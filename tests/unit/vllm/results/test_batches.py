"""Requests that end in one step are what each would be alone."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from inspect_lens import LensRequest
from inspect_lens._engine.collect.row_writer import Placing
from inspect_lens._vllm.registered.probe_scores import Reading, Reads, feed_together
from inspect_lens._vllm.results.ticket import Ticket
from inspect_lens.probe import pool_scores
from tests.unit.vllm.results.test_ahead import (
    N_MAX,
    N_PROMPT,
    PROBES,
    REQUESTS,
    Engine,
    engine,
    results_of,
)
from tests.unit.vllm.results.test_results import completion, output

__all__ = ["engine"]


def test_a_batch_of_different_requests_is_what_each_is_alone(engine: Engine) -> None:
    """Different probes, in another order, over other tokens; some texts are shorter."""
    found: list[list[Any]] = []
    for is_together in (True, False):
        engine.asked.clear()
        asked = [REQUESTS[name] for name in REQUESTS for _ in range(2)]
        keys = [engine.start(LensRequest(**one)) for one in asked]
        ends = [N_MAX - i % 2 for i in range(len(keys))]
        # No step has room for all of them.
        for key in keys:
            engine.step([key], 0, N_PROMPT)
        engine.settle()
        engine.results.prepare(deque(keys))
        for key, end in zip(keys, ends, strict=True):
            engine.run([key], until=end)
        engine.settle()
        outputs = []
        for key, end in zip(keys, ends, strict=True):
            engine.worker.stepper.leave([key])
            choice = completion(0)
            choice.inspect_lens_ticket = Ticket(key, n_completion=end - N_PROMPT + 1)
            outputs.append(output(choice))
        for some in [outputs] if is_together else [[one] for one in outputs]:
            assert not engine.results.attach_all(some)
        for key in keys:
            engine.worker.stepper.remove(key)
        found.append(results_of(outputs))
    together, alone = found
    assert together == alone


@pytest.mark.parametrize("names", ["p", "pqr"])
@pytest.mark.parametrize("at_once", [1, 33])
def test_means_of_a_batch_are_to_the_bit_what_the_library_makes(
    engine: Engine, names: str, at_once: int
) -> None:
    """Over so many tokens that another order of the sum would show."""
    reads = Reads(LensRequest(probes=list(names)).probes, engine.registry.probes)
    rng, n = np.random.default_rng(1), 1000
    # Of different sizes: what float64 adds of 24 bits each is exact else, in whatever order.
    sizes = 10 ** rng.uniform(-6, 6, size=(33, 1, n, len(names)))
    numbers = list(rng.normal(scale=sizes).astype(np.float32))
    readings = [Reading(reads, lo=0, n_prompt=0, n_max=n) for _ in numbers]
    wholes = [one.whole(mine) for one, mine in zip(readings, numbers, strict=True)]
    for i in range(0, len(wholes), at_once):
        feed_together(whole for whole in wholes[i : i + at_once] if whole is not None)
    for reading, mine in zip(readings, numbers, strict=True):
        for i, receipt in enumerate(reading.receipts()):
            scores = mine[0, :, i].astype(np.float64) + PROBES[receipt.name].bias("bias")
            assert receipt.score == pool_scores(scores, "mean")
            assert (receipt.n_tokens, receipt.first_position) == (n, 0)


def test_shares_of_workers_are_added_before_they_are_read(engine: Engine) -> None:
    reads = Reads(LensRequest(probes=["p"]).probes, engine.registry.probes)
    reading = Reading(reads, lo=0, n_prompt=0, n_max=4)
    assert reading.whole(np.ones((2, 4, 1), dtype=np.float32)) is None


def test_how_a_step_ran_is_known_when_its_rows_have_come(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller takes what has come while the receiving thread is still at its last rows."""
    (key,) = keys = [engine.start(LensRequest(**REQUESTS["rows"]))]
    engine.step(keys, 0, N_PROMPT)
    engine.settle()
    engine.results.prepare(deque(keys))
    taken: dict[str, tuple[str, ...]] = {}
    write = Placing._write

    def write_and_take(*args: Any) -> None:
        write(*args)
        taken.update(engine.collector.take_whole([key]))

    monkeypatch.setattr(Placing, "_write", write_and_take)
    engine.run(keys, until=N_MAX - 1)
    engine.settle()
    pending = engine.collector._pending[key]
    for _, worker in pending.shares:
        worker.paths[:] = 0  # as if the last step were the only one that ran so
    engine.step(keys, N_MAX - 1)
    engine.settle()
    assert taken == {key: ("eager",)}
    engine.results.abandon(keys)
    engine.worker.stepper.remove(key)
