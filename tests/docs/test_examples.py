"""Every example of a docstring runs, by itself, as it stands.

A component that needs one and has none fails `tests/text/test_has_examples.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit.examples import Example, examples
from tests.kit.repository import ROOT
from tests.kit.runner import Runner, stand_in_for_llm

EXAMPLES = examples()
NOWHERE = "http://127.0.0.1:9/v1"


def examples_with(mode: str) -> list[Any]:
    return [pytest.param(e, id=e.path) for e in EXAMPLES if e.block.mode == mode]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait for one another cost more than they bring on arrays this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def exampledir(
    workdir: Path, example_files: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The working directory of one example; what it adds is its own."""
    # Inspect keeps models by name, with the server that they found at first.
    monkeypatch.setattr("inspect_ai.model._model._models", {})
    for folder in example_files.iterdir():
        (workdir / folder.name).mkdir()
        for entry in folder.iterdir():
            (workdir / folder.name / entry.name).symlink_to(entry)
    yield workdir
    os.chdir(workdir)


def run(example: Example, runner: Runner) -> None:
    with runner.importable():
        runner.run(example.block)


@pytest.mark.parametrize("example", examples_with("run"))
def test_example(example: Example, exampledir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples that need no engine; one that asks for a server all the same does not start one."""
    monkeypatch.setenv("VLLM_BASE_URL", NOWHERE)
    run(example, Runner(exampledir, modes=("run",)))


@pytest.mark.engine
@pytest.mark.parametrize("example", examples_with("engine"))
def test_example_offline(
    example: Example, exampledir: Path, offline_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Examples that use `LLM` in this process."""
    monkeypatch.setattr("vllm.LLM", stand_in_for_llm(offline_llm))
    run(example, Runner(exampledir, modes=("engine",)))


@pytest.mark.engine
@pytest.mark.parametrize("example", examples_with("server"))
def test_example_server(
    example: Example, exampledir: Path, lens_server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Examples that speak to a server."""
    monkeypatch.setenv("VLLM_BASE_URL", f"{lens_server_url}/v1")
    monkeypatch.setenv("VLLM_API_KEY", "none")
    run(example, Runner(exampledir, modes=("server",), server_url=lens_server_url))


def test_every_skip_is_listed() -> None:
    listed = (ROOT / "tests/QUARANTINE.md").read_text(encoding="utf-8")
    skipped = [e for e in EXAMPLES if e.block.mode == "skip"]
    missing = [e.path for e in skipped if f"{e.path}: {e.block.reason}" not in listed]
    assert not missing, f"give each a row in tests/QUARANTINE.md: {missing}"
    for example in skipped:
        compile(example.block.code, example.block.where, "exec")
