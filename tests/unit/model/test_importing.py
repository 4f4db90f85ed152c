"""What metrics compute with is imported while the model writes, and not while samples wait."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import Any

import pytest
from inspect_ai.scorer import Scorer, accuracy, includes, scorer
from inspect_ai.solver import Generate, Solver, TaskState, solver

from inspect_lens.model import _provider
from inspect_lens.scorer import auroc_metric, leakage_baseline
from tests.kit.fake_server import FakeLensServer

from .conftest import RunEval


@solver
def slow() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        await asyncio.sleep(0.5)
        return await generate(state)

    return solve


@scorer(metrics=[accuracy(), auroc_metric()])
def ranked() -> Scorer:
    return includes()


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether it was for metrics of words, of each import."""
    found: list[bool] = []

    def note(*, words: bool) -> None:
        found.append(words)

    monkeypatch.setattr(_provider, "import_libraries", note)
    return found


@pytest.mark.parametrize(
    ("scorer", "wanted"), [(includes, []), (ranked, [False]), (leakage_baseline, [True])]
)
def test_an_eval_imports_what_its_metrics_need(
    server: FakeLensServer, run_eval: RunEval, imported: list[bool], scorer: Any, wanted: list[bool]
) -> None:
    log = run_eval(server, n=1, scorer=scorer(), solver=slow())
    assert log.status == "success", log.error
    assert imported == wanted


def test_it_waits_until_the_event_loop_is_quiet(imported: list[bool]) -> None:
    async def run() -> None:
        task = asyncio.get_running_loop().create_task(_provider.import_when_quiet(words=False))
        for _ in range(5):
            time.sleep(1.5 * _provider.QUIET_S)  # samples that begin
            await asyncio.sleep(0)
            assert not imported
        await task

    asyncio.run(run())
    assert imported == [False]


CODE = """
import sys
from inspect_lens.probe import auroc, cross_validated_words, delong_interval, rate_interval
from inspect_lens.probe.statistics._words import import_libraries

import_libraries(words=True)
before = set(sys.modules)
labels, scores = [0, 1] * 10, list(range(20))
auroc(labels, scores), delong_interval(labels, scores), rate_interval([True, False], None)
cross_validated_words([[n, n + 1] for n in scores], labels)
print(*sorted(set(sys.modules) - before))
"""


def test_all_is_imported_that_metrics_import() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
