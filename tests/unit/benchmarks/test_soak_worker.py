"""The soak's child sees what goes wrong among many requests, with an engine of a few lines."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.soak import judge
from benchmarks.soak_worker import Worker
from tests.kit.process_tree import TreeUsage

FLOOR: dict[str, Any] = {"requests": 200, "different": 0, "unsteady_prompts": []}


class FakeWorker(Worker):
    """Answers depend on prompt and vector only; the mix may go wrong in one way."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault, self.n_asked, self.n_new = fault, 0, 0
        self.engine = SimpleNamespace(collective_rpc=self._stats)

    async def _stats(self, _name: str) -> list[dict[str, int]]:
        return [
            {
                "requests": int(self.fault == "left"),
                "steering_rows": 0,
                "sum_rows": 0,
                "shared_bytes": 0,
                "waited_ms": 12,
            }
        ]

    async def _ask(
        self,
        prompt: Any,
        index: int,
        vector: int | None,
        captured: bool,
        leave: int | None = None,
        *,
        is_new: bool = False,
    ) -> Any:
        self.n_asked += 1
        self.n_new += is_new
        late = self.n_asked > 400  # among the mix, not alone
        await asyncio.sleep(0)
        if leave is not None and leave < prompt.max_tokens:
            return None
        if late and self.fault == "raises" and vector is not None:
            raise RuntimeError("lost")
        seed = index * 10 + (0 if vector is None else vector + 1)
        tokens = [(seed * 31 + i) % 97 for i in range(prompt.max_tokens)]
        if late and self.fault == "contaminated" and vector is None and not captured:
            tokens[-1] += 1
        rows = torch.full((2, len(prompt.tokens) + prompt.max_tokens - 1, 4), 1.0 + seed)
        if late and self.fault == "wrong rows":
            rows[0, 3] += 1
        if late and self.fault == "short rows":
            rows = rows[:, :-1]
        output = SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)])
        if captured:
            output.activations = {"residual_stream": rows}
        return output


@pytest.fixture(autouse=True)
def _nothing_else_in_this_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Engines of other tests may still be closing their files.
    held = TreeUsage(processes=1, descriptors=10, shared_bytes=0)
    monkeypatch.setattr("benchmarks.soak_worker.settled_usage", lambda _pid: held)


def mix(fault: str = "") -> list[str]:
    found = asyncio.run(FakeWorker(fault).soak(0, 300))
    return judge(FLOOR, found, "torch.float32")


def test_a_right_engine_passes_the_mix() -> None:
    assert mix() == []


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        ("contaminated", "plain answers differ"),
        ("wrong rows", "error of a row"),
        ("short rows", "error of a row: inf"),
        ("raises", "requests failed"),
    ],
)
def test_what_goes_wrong_in_the_mix_is_found(fault: str, word: str) -> None:
    assert any(word in problem for problem in mix(fault)), mix(fault)


def test_what_is_never_let_go_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(_seconds: float) -> None:
        return None

    monkeypatch.setattr("benchmarks.soak_worker.asyncio.sleep", at_once)
    assert any("requests left" in problem for problem in mix("left"))


def test_the_floor_counts_answers_that_batching_changes() -> None:
    found = asyncio.run(FakeWorker("contaminated").floor(0, 600))
    # The first 48 requests are the solo answers; from the 401st on, answers differ.
    assert (found["requests"], found["different"]) == (600, 600 + 48 - 400)
    assert found["unsteady_prompts"] == list(range(48))


def test_half_of_the_floor_computes_its_prompt_again_as_much_of_the_mix_does() -> None:
    worker = FakeWorker()
    asyncio.run(worker.floor(0, 600))
    assert 48 + 250 < worker.n_new < 48 + 350
