from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from inspect_lens._cli import main


class Run:
    """Runs the program in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *words: object, code: int = 0) -> tuple[str, str]:
        self.capsys.readouterr()
        self.monkeypatch.setattr(sys, "argv", ["inspect-lens", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self.capsys.readouterr()
        assert (ended.value.code or 0) == code, out + err
        return out, err

    def json(self, *words: object) -> Any:
        return json.loads(self(*words, "--json")[0])


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    from inspect_ai.hooks._startup import init_hooks

    # Inspect announces hooks once in a process: not in the output of a command.
    init_hooks()
    return Run(monkeypatch, capsys)
