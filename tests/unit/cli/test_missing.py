"""What is said where a package, a log or a server is missing: a command that works as given."""

from __future__ import annotations

import importlib.util
import io
import re
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from inspect_ai._util.error import PrerequisiteError as PrintedError
from rich.console import Console

from inspect_lens._base.installed import install_extra
from inspect_lens._cli import _doctor
from inspect_lens.model import _server
from inspect_lens.model._host import PrerequisiteError
from tests.kit.repository import ROOT

from .conftest import Run


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ('{"url": "file:///clone", "dir_info": {}}', 'pip install ".[vllm]" in a clone'),
        (None, 'pip install "inspect-lens[vllm]"'),  # from an index
    ],
)
def test_an_extra_is_installed_as_the_package_was(
    monkeypatch: pytest.MonkeyPatch, origin: str | None, command: str
) -> None:
    found = SimpleNamespace(read_text=lambda name: {"direct_url.json": origin}[name])
    monkeypatch.setattr(metadata, "distribution", lambda name: found)
    assert install_extra("vllm") == command


def test_one_place_says_how_to_install_an_extra() -> None:
    own = ROOT / "src/inspect_lens/_base/installed.py"
    said = re.compile(r"inspect-lens\[|\"\.\[")
    assert said.search(own.read_text())
    others = [p for p in (ROOT / "src").rglob("*.py") if p != own and said.search(p.read_text())]
    assert others == []


def test_without_vllm_the_other_way_is_offered_in_plain_words(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "vllm" else real(name, *a)
    )
    with pytest.raises(PrintedError) as raised:
        _server.refuse_start("org/tiny")
    said = str(raised.value)
    assert "[bold]" not in said
    assert "--model-base-url http://HOST:8000/v1" in said
    assert install_extra("vllm") in said
    words = ("--dataset", "organism", "--path", "organism/data/control.jsonl", "--out", tmp_path)
    _, err = run("probe", "collect", "--model", "vllm-lens/org/tiny", *words, code=5)
    assert "add --base-url http://HOST:8000/v1" in err, "the command's own flag"
    assert "starts" not in err, "nothing did"


def test_a_model_without_its_provider_is_told_how_to_write_it(run: Run, tmp_path: Path) -> None:
    words = ("--dataset", "organism", "--path", "organism/data/control.jsonl", "--out", tmp_path)
    _, err = run("probe", "collect", "--model", "org/tiny", *words, code=3)
    assert "--model=org/tiny: " in err
    assert err.endswith("Write lens/org/tiny, or vllm-lens/org/tiny.\n")


def test_inspect_prints_an_error_with_its_brackets() -> None:
    error = PrerequisiteError('x: pip install ".[petri]"')
    out = io.StringIO()
    Console(file=out, width=100).print(f"{error.message}")  # as Inspect's hook prints it
    assert out.getvalue() == f"{error}\n" == 'x: pip install ".[petri]"\n'


@pytest.mark.parametrize("command", [["view"], ["score", "--probe", "organism/deception-lr"]])
def test_no_log_is_no_log(run: Run, command: list[str]) -> None:
    _, err = run(command[0], "", *command[1:], code=3)
    assert "no log is named; run the eval first" in err


@pytest.mark.parametrize(
    ("is_cpu", "command"),
    [
        (False, "vllm serve org/tiny"),
        (
            True,
            "python -m vllm.entrypoints.openai.api_server --model org/tiny --dtype float32 "
            "--kv-cache-memory-bytes 1073741824",
        ),
    ],
)
def test_doctor_serves_with_what_is_installed(
    monkeypatch: pytest.MonkeyPatch, is_cpu: bool, command: str
) -> None:
    monkeypatch.setattr(_doctor, "is_for_cpus", lambda: is_cpu)
    assert _doctor._serve("org/tiny") == command
