"""Running blocks of code as a reader of the documentation would.

Pages and examples write the model as `organism/checkpoint` and the server as
`http://localhost:8000`; here both are those of the session.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from .blocks import Block
from .repository import ROOT
from .shell import check_command, check_server, commands

__all__ = ["MODEL", "SERVER", "Runner", "check_output", "stand_in_for_llm"]

MODEL = "organism/checkpoint"
SERVER = "http://localhost:8000"


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
        elif block.mode == "run" and not block.output:
            for words in commands(code):
                check_command(words)
                if "engine" in self.modes:
                    check_server(words)
        else:
            self._run_shell(code, block)

    def _run_python(self, code: str, block: Block) -> None:
        # Padded, so that a traceback names the line of the page.
        padded = "\n" * block.line + code
        compiled = compile(padded, str(ROOT / block.page), "exec")
        if not block.output:
            exec(compiled, self.module.__dict__)
            return
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compiled, self.module.__dict__)
        check_output(block, printed.getvalue())

    def _run_shell(self, code: str, block: Block) -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
        run = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", code],
            cwd=self.workdir, env=env, capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
        assert run.returncode == 0, f"{block.where}:\n{run.stdout[-3000:]}{run.stderr[-3000:]}"
        if block.output:
            check_output(block, run.stdout)

    @contextmanager
    def importable(self) -> Iterator[None]:
        # Inspect and pydantic look a function's module up by name.
        sys.modules[self.module.__name__] = self.module
        try:
            yield
        finally:
            del sys.modules[self.module.__name__]


def check_output(block: Block, printed: str) -> None:
    """Compare what a block prints with what its page shows.

    Args:
        block: with its output; `…` there stands for anything, and lines may be wrapped.
        printed: by the block.

    Raises:
        AssertionError: the page shows something else.
    """
    pattern = ".*?".join(re.escape(part) for part in " ".join(block.output.split()).split("…"))
    is_shown = re.fullmatch(pattern, " ".join(printed.split()), re.DOTALL)
    assert is_shown, f"{block.where} prints other than the page shows:\n{printed}"


def stand_in_for_llm(offline_llm: Any) -> Callable[..., Any]:
    """What `vllm.LLM` is while a block runs: the engine of the session.

    Args:
        offline_llm: that engine.

    Returns:
        The stand-in.
    """

    def llm(model: str, **_: Any) -> Any:
        assert model == MODEL, f"pages use {MODEL}; got {model}"
        return offline_llm

    return llm
