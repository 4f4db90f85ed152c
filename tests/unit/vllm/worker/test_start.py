"""Workers of one engine compare notes at each stage of the start: all have the lens, or none."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inspect_lens._engine.step.stages import Stages
from inspect_lens._vllm.worker import worker
from inspect_lens._vllm.worker.worker import Start, agree

Ranks = Callable[..., list[str | None]]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Runs two workers with these marks and reasons at once; what each of them hears."""
    rank = threading.local()
    store = torch.distributed.HashStore()
    monkeypatch.setattr(worker, "_WAIT_S", 0.5)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank.number)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    store.set_timeout(timedelta(seconds=5))

    def run(*workers: tuple[str, str | None]) -> list[str | None]:
        heard: list[str | None] = ["nothing"] * len(workers)

        def one(number: int) -> None:
            rank.number = number
            heard[number] = agree("model", *workers[number])

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(workers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        return heard

    return run


def test_workers_with_the_same_settings_have_the_lens(ranks: Ranks) -> None:
    assert ranks(("mark", None), ("mark", None)) == [None, None]


def test_workers_with_other_settings_are_without_it(ranks: Ranks) -> None:
    for number, reason in enumerate(ranks(("mark", None), ("another", None))):
        assert f"rank {1 - number} has other INSPECT_LENS_* settings" in str(reason)


def test_what_is_wrong_on_one_rank_turns_the_lens_off_on_all(ranks: Ranks) -> None:
    heard = ranks(("mark", None), ("", "no memory"))
    assert heard == ["the worker of rank 1: no memory", "no memory"]


def test_a_worker_without_the_plug_in_turns_it_off_on_the_others(ranks: Ranks) -> None:
    (reason,) = ranks(("mark", None))
    assert "install it on all hosts" in str(reason)


def test_what_steps_of_a_pipeline_will_need_is_held_while_memory_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[int] = []
    empty, now = torch.empty, set[int]()  # sizes that are held now

    def counted(n: int, **options: Any) -> torch.Tensor:
        made = empty(n, **options)
        now.add(n)
        weakref.finalize(made, now.discard, n)
        return made

    monkeypatch.setattr(torch, "empty", counted)
    measure = lambda: held.append(sum(now))  # noqa: E731
    here = SimpleNamespace(
        vllm_config=SimpleNamespace(),
        device=torch.device("cpu"),
        determine_available_memory=measure,
        compile_or_warm_up_model=measure,
    )

    def prepare(start: Start) -> str:
        start.step_bytes = 1000
        return ""

    Start(here).run(prepare)
    here.determine_available_memory()
    here.compile_or_warm_up_model()
    measure()
    assert held == [1000, 0, 0]


@pytest.mark.parametrize(
    ("first", "last", "copies"), [(True, False, 2), (False, False, 4), (False, True, 2)]
)
def test_what_a_stage_may_need(first: bool, last: bool, copies: int) -> None:
    stages = Stages(is_first=first, is_last=last, most_rows=7)
    assert stages.nbytes(10) == copies * 70


def test_one_worker_needs_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    assert agree("model", "mark", None) is None
    assert agree("model", "", "no layers") == "no layers"
