"""Workers on several hosts compare notes before any of them steers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from inspect_lens._vllm.worker import agreement
from inspect_lens._vllm.worker.agreement import agree
from inspect_lens.errors import CompatError

SEVERAL = SimpleNamespace(parallel_config=SimpleNamespace(nnodes=2))
ONE = SimpleNamespace(parallel_config=SimpleNamespace(nnodes=1))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[BaseException | None]]:
    """Runs workers with these arguments at once, each in a thread; what each of them raised."""
    rank = threading.local()
    store = torch.distributed.HashStore()
    monkeypatch.setattr(agreement, "_WAIT_S", 0.5)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank.number)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    store.set_timeout(timedelta(seconds=5))

    def run(*workers: tuple[Any, ...]) -> list[BaseException | None]:
        raised: list[BaseException | None] = [None] * len(workers)

        def one(number: int) -> None:
            rank.number = number
            try:
                agree(SEVERAL, *workers[number])
            except CompatError as error:
                raised[number] = error

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(workers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        return raised

    return run


def test_workers_with_the_same_settings_start(ranks: Any) -> None:
    assert ranks(("mark",), ("mark",)) == [None, None]


def test_workers_with_other_settings_do_not_start(ranks: Any) -> None:
    for number, error in enumerate(ranks(("mark",), ("another",))):
        assert isinstance(error, CompatError)
        assert f"rank {1 - number} has other INSPECT_LENS_* settings" in str(error)


def test_a_worker_that_the_lens_does_not_serve_stops_the_others(ranks: Any) -> None:
    served, refused = ranks(("mark",), ("", "no key"))
    assert "rank 1: no key" in str(served)
    assert refused is None


def test_a_worker_without_the_lens_stops_the_others(ranks: Any) -> None:
    (error,) = ranks(("mark",))
    assert isinstance(error, CompatError)
    assert "install it on all hosts" in str(error)


def test_workers_of_one_host_need_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    agree(ONE, "mark")
