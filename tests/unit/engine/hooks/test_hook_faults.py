"""Hooks that would spoil others: rows that are not finite, the end of the process, a rank alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.hooks.runner import Needs, Part
from inspect_lens._vllm.registered.persistent_hooks import packed_hook
from inspect_lens.errors import CapacityError, CaptureError, HookError
from tests.kit.hooked import Worker, begin, hook, note, take
from tests.kit.steps import LAYERS
from tests.kit.waiting import until


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.stepper.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_rows_that_are_not_finite_go_on_as_they_were_and_fail_their_request(
    worker: Worker, collector: Collector, value: float
) -> None:
    def spoil(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        h[1, 3] = value
        return h + 1

    begin(worker, collector, "a", hook(spoil, 2))
    begin(worker, collector, "b", hook(note, 2))
    after = worker.run([("a", 0, 3), ("b", 0, 2)])[2]
    plain = torch.cat([Worker.rows("a", 0, 3), Worker.rows("b", 0, 2)]) + 2
    plain[[0, 2]] += 1
    assert torch.equal(after, plain), "of its rows those go on that are finite"
    with pytest.raises(HookError, match=r"spoil after layer 2 gave back rows that are not"):
        take(collector, "a", 3)
    worker.run([("a", 3, 1), ("b", 2, 1)])
    for key in ("a", "b"):
        worker.stepper.remove(key)
    assert take(collector, "b", 3).n_fed == 3


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, BaseException])
def test_a_hook_that_would_end_the_process_fails_its_request(
    worker: Worker, collector: Collector, kind: type[BaseException]
) -> None:
    def leave(ctx: Any, h: torch.Tensor) -> None:
        raise kind("out")

    begin(worker, collector, "a", hook(leave, 2))
    worker.run([("a", 0, 3)])
    with pytest.raises(HookError, match=kind.__name__):
        take(collector, "a", 3)
    worker.stepper.remove("a")
    assert not worker.hooks.live


def rows_of(stream: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return stream[start:stop].clone()


class Ranks:
    """Two tensor-parallel ranks; one of them sends."""

    def __init__(self) -> None:
        self.workers = [Worker(most=400), Worker(most=400)]
        self.workers[1].hooks._send = None
        self.eager: list[list[int]] = [[], []]
        """By rank: layers whose step runs eagerly."""
        self.needs: dict[int, Needs] = {}

    def step(self, parts: list[tuple[str, int, int]]) -> None:
        """Whether each of them runs it eagerly has to be the same."""
        needs = []
        for rank, worker in enumerate(self.workers):
            step, start = [], 0
            for key, position, n in parts:
                step.append(Part(key, start, n, position))
                start += n
            needs.append(worker.hooks.begin(step))
            stream = torch.cat([worker.rows(p.key, p.position, p.n_tokens) for p in step])
            for layer in LAYERS:
                if layer in needs[-1]:
                    self.eager[rank].append(layer)
                    if needs[-1][layer].post:
                        worker.hooks.run(layer, False, partial(rows_of, stream))
            for key, error in worker.hooks.end():
                worker.stepper.fail(key, error)
        assert needs[0] == needs[1]
        self.needs = needs[0]

    def close(self) -> None:
        for worker in self.workers:
            worker.stepper.close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_run_alike_though_one_of_them_has_a_fault(
    ranks: Ranks, collector: Collector, rank: int
) -> None:
    first, second = ranks.workers
    begin(first, collector, "a", hook(note, 2), workers=(second,))
    ranks.step([("a", 0, 2)])
    ranks.workers[rank].stepper.fail_all(CaptureError("a fault here alone"))
    ranks.step([("a", 2, 1)])
    ranks.step([("a", 3, 1)])
    assert ranks.eager == [[2] * 3, [2] * 3]
    assert all(worker.stepper.is_watching for worker in ranks.workers)
    for worker in ranks.workers:
        worker.stepper.finish(["a"])
        worker.stepper.remove("a")
        assert not worker.stepper.is_watching
    # The other rank has a link of its own, which may be the slower one.
    until(lambda: collector.preview("a", {}) is None)
    with pytest.raises(CaptureError, match="a fault here alone"):
        take(collector, "a", 4)


def test_a_rank_that_cannot_take_a_request_up_takes_part(
    ranks: Ranks, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise CapacityError("no room here")

    monkeypatch.setattr(ranks.workers[1].hooks, "_load", refuse)
    first, second = ranks.workers
    begin(first, collector, "a", hook(note, 2), workers=(second,))
    ranks.step([("a", 0, 2)])
    with pytest.raises(CapacityError, match="no room here"):
        take(collector, "a", 2)


def asks(ctx: Any, h: Any) -> None:
    ctx.saved["norm"] = ctx.get_parameter("norm")


@pytest.mark.parametrize("is_persistent", [False, True])
def test_ranks_meet_where_hooks_ask_though_one_of_them_has_no_hook(
    ranks: Ranks, collector: Collector, monkeypatch: pytest.MonkeyPatch, is_persistent: bool
) -> None:
    """It cannot be read there; or it has raised there, in the step before."""

    def refuse(*args: Any) -> None:
        raise CapacityError("no room here")

    first, second = ranks.workers
    monkeypatch.setattr(second.hooks, "_load", refuse)
    if is_persistent:
        first.hooks.register("p", packed_hook(hook(asks, 2)))
        with pytest.raises(CapacityError):
            second.hooks.register("p", packed_hook(hook(asks, 2)))
        begin(first, collector, "a", persistent=("p",), workers=(second,))
    else:
        begin(first, collector, "a", hook(asks, 2), workers=(second,))
    for position in range(3):
        ranks.step([("a", position, 1)])
        assert ranks.needs == {2: Needs(post=True, asks_post=True)}
        first.hooks.fail_step(ValueError("later, and there"))


def test_ranks_meet_at_hooks_that_may_ask_and_at_no_others(
    worker: Worker, collector: Collector
) -> None:
    begin(worker, collector, "a", hook(note, 0), hook(asks, 2, pre=True), hook(print, 5))
    assert worker.hooks.begin([Part("a", 0, 1, 0)]) == {
        0: Needs(post=True),
        2: Needs(pre=True, asks_pre=True),
        # Without code of its own, it may do anything.
        5: Needs(post=True, asks_post=True),
    }


def test_a_fault_of_a_request_that_has_failed_before_is_logged(
    worker: Worker, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    def remove(key: str) -> None:
        raise KeyError("what it saved is gone")

    begin(worker, collector, "a", hook(note, 2))
    assert worker.stepper.hooks is not None
    worker.stepper._live.by_key.pop("a")
    worker.stepper.hooks.remove = remove  # type: ignore[method-assign]
    worker.stepper.remove("a")
    assert "hooks of request a" in caplog.text
    assert "what it saved is gone" in caplog.text
    collector.discard("a")
