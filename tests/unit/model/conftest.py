from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import GenerateConfig, Model, get_model

from inspect_lens._intake import Beside, _process
from inspect_lens.model import _response
from inspect_lens.model._handle import MEMORY
from tests.kit.fake_server import FakeLensServer

GetModel = Callable[..., Model]
RunEval = Callable[..., EvalLog]


@pytest.fixture(autouse=True)
def _elsewhere(elsewhere: Path) -> None:
    """Every test."""


@pytest.fixture
def peer() -> Iterator[FakeLensServer]:
    """A server of vllm-lens."""
    with FakeLensServer(dialect="vllm_lens") as running:
        yield running


@pytest.fixture
def plain() -> Iterator[FakeLensServer]:
    """A vLLM without any plug-in."""
    with FakeLensServer(dialect="plain") as running:
        yield running


@pytest.fixture
def model_of() -> GetModel:
    def make(server: FakeLensServer, **args: Any) -> Model:
        args.setdefault("memoize", False)
        return get_model(f"lens/{server.model}", base_url=server.url, **args)

    return make


@pytest.fixture
def run_eval(model_of: GetModel, tmp_path: Path) -> RunEval:
    def run(
        server: FakeLensServer,
        *,
        config: GenerateConfig | None = None,
        n: int = 3,
        scorer: Any = None,
        model: Model | None = None,
        solver: Any = None,
        **options: Any,
    ) -> EvalLog:
        task = Task(
            dataset=[Sample(input=f"tell me about number {i}", target="x") for i in range(n)],
            scorer=scorer,
            config=config or GenerateConfig(),
            **({"solver": solver} if solver else {}),
        )
        options.setdefault("log_dir", str(tmp_path / "logs"))
        return eval(task, model=model or model_of(server), display="none", **options)[0]

    return run


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Beside:
    """It starts at the first capture."""
    made = Beside()
    monkeypatch.setattr(_process, "STARTS_AFTER", 0)
    monkeypatch.setattr(_response, "BESIDE", made)
    MEMORY.clear()
    return made


async def ready(beside: Beside) -> int:
    with anyio.fail_after(60):
        while not beside.is_ready:
            beside.prepare()  # as each file does; one that has just died is buried first
            await anyio.sleep(0.01)
    assert beside.pid is not None
    return beside.pid
