"""Every code block of README and documentation runs, or says why not.

The blocks of a page share one namespace and run in order. Pages write the model as
`organism/checkpoint` and the server as `http://localhost:8000`; here both are those of the
session, so that all pages together start one engine and one server.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.kit.blocks import Block, pages, read_blocks
from tests.kit.repository import ROOT
from tests.kit.shell import check_command, check_server, commands

MODEL = "organism/checkpoint"
SERVER = "http://localhost:8000"
BLOCKS = {page: read_blocks(page) for page in pages()}


def pages_with(*modes: str) -> list[Any]:
    return [
        pytest.param(page, id=str(page))
        for page, blocks in BLOCKS.items()
        if any(block.mode in modes for block in blocks)
    ]


@dataclass
class Runner:
    """Runs the blocks of one page."""

    workdir: Path
    modes: tuple[str, ...]
    server_url: str = SERVER
    module: ModuleType = field(default_factory=lambda: ModuleType("docs_page"))

    def run(self, block: Block) -> None:
        if block.mode not in self.modes:
            return
        code = block.code.replace(SERVER, self.server_url)
        if block.title:
            (self.workdir / block.title).write_text(code, encoding="utf-8")
        if block.language == "python":
            self._run_python(code, block)
        elif block.mode == "run":
            for words in commands(code):
                check_command(words)
                if "engine" in self.modes:
                    check_server(words)
        else:
            self._run_shell(code, block)

    def _run_python(self, code: str, block: Block) -> None:
        # Padded, so that a traceback names the line of the page.
        padded = "\n" * block.line + code
        exec(compile(padded, str(ROOT / block.page), "exec"), self.module.__dict__)

    def _run_shell(self, code: str, block: Block) -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
        run = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", code],
            cwd=self.workdir, env=env, capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
        assert run.returncode == 0, f"{block.where}:\n{run.stdout[-3000:]}{run.stderr[-3000:]}"

    @contextmanager
    def importable(self) -> Iterator[None]:
        # Inspect and pydantic look a function's module up by name.
        sys.modules[self.module.__name__] = self.module
        try:
            yield
        finally:
            del sys.modules[self.module.__name__]


@pytest.mark.parametrize("page", pages_with("run"))
def test_page(page: Path, workdir: Path) -> None:
    """Blocks that need no engine."""
    runner = Runner(workdir, modes=("run",))
    with runner.importable():
        for block in BLOCKS[page]:
            runner.run(block)


@pytest.mark.engine
@pytest.mark.parametrize("page", pages_with("engine"))
def test_page_offline(
    page: Path, workdir: Path, offline_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that use `LLM` in this process, with the other blocks of the page before them."""

    def llm(model: str, **_: Any) -> Any:
        assert model == MODEL, f"pages use {MODEL}; got {model}"
        return offline_llm

    monkeypatch.setattr("vllm.LLM", llm)
    runner = Runner(workdir, modes=("run", "engine"))
    with runner.importable():
        for block in BLOCKS[page]:
            runner.run(block)


@pytest.mark.engine
@pytest.mark.parametrize("page", pages_with("server"))
def test_page_server(
    page: Path, workdir: Path, lens_server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that speak to a server, with the other blocks of the page before them."""
    monkeypatch.setenv("VLLM_BASE_URL", f"{lens_server_url}/v1")
    monkeypatch.setenv("VLLM_API_KEY", "none")
    runner = Runner(workdir, modes=("run", "server"), server_url=lens_server_url)
    with runner.importable():
        for block in BLOCKS[page]:
            runner.run(block)


def test_every_skip_is_listed() -> None:
    listed = (ROOT / "tests/QUARANTINE.md").read_text(encoding="utf-8")
    skipped = [block for blocks in BLOCKS.values() for block in blocks if block.mode == "skip"]
    missing = [b.where for b in skipped if f"{b.page}: {b.reason}" not in listed]
    assert not missing, f"give each a row in tests/QUARANTINE.md: {missing}"


def test_reader_sees_marks_titles_and_indented_blocks(tmp_path: Path) -> None:
    page = Path("page.md")
    (tmp_path / page).write_text(
        '<!-- test: server -->\n```python title="task.py"\nx = 1\n```\n'
        "- item\n\n    ```bash\n    make test\n    ```\n```text\nout\n```\n"
    )
    python, bash = read_blocks(page, root=tmp_path)
    assert (python.mode, python.title, python.code) == ("server", "task.py", "x = 1\n")
    assert (bash.mode, bash.code) == ("run", "make test\n")


@pytest.mark.parametrize(
    "text", ["```\nx\n```", "```ruby\nx\n```", "<!-- test: skip -->\n```python\nx\n```"]
)
def test_reader_refuses_what_nobody_checks(text: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(ValueError, match=r"page\.md:[12]"):
        read_blocks(Path("page.md"), root=tmp_path)


@pytest.mark.parametrize(
    "command",
    ["make nothing", "pip install inspect-lens[nothing]", "rm -rf x", "INSPECT_LENS_NO=1 make env"],
)
def test_unknown_command_is_refused(command: str) -> None:
    with pytest.raises(AssertionError):
        check_command(next(commands(command)))
