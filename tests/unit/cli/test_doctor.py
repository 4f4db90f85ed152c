"""`inspect-lens doctor`: one screen, one exit code, and the truth about what is off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

pytest.importorskip("vllm")

from inspect_lens._cli import _doctor
from inspect_lens._cli._main import app
from tests.kit.repository import ROOT


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments])


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.delenv("INSPECT_LENS_DISABLE", raising=False)


def test_all_that_this_vllm_has_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    done = run("--model", str(ROOT / "organism" / "checkpoint"), "--json", "--device", "cpu")
    found = json.loads(done.stdout)
    assert done.exit_code == 0
    assert found["ok"]
    assert all(feature["off"] is None for feature in found["features"].values())
    buffers = found["buffers"]
    assert buffers["taps"] == 7, "six layers, and the stream in front of the first"
    assert buffers["capture_rows"] == 7 * 16384
    assert buffers["capture_bytes"] == 7 * 16384 * 256 * 2
    lines = run("--model", str(ROOT / "organism" / "checkpoint")).stdout.splitlines()
    assert len(lines) <= 24, "one screen"


def test_wide_sites_take_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSPECT_LENS_SITES", "k,mlp_hidden,resid_post")
    done = run("--model", str(ROOT / "organism" / "checkpoint"), "--json", "--device", "cpu")
    buffers = json.loads(done.stdout)["buffers"]
    assert buffers["sites"] == ["k", "mlp_hidden", "resid_post"]
    assert buffers["taps"] == 3 * 6
    assert buffers["capture_rows"] == (1 + 2 + 1) * 6 * 16384, "512 neurons, and a stream of 256"


def test_what_is_off_has_its_reason_and_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_doctor, "problems", lambda: {"hooks": "this vLLM has no dispatcher"})
    done = run("--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 1
    assert found["features"]["hooks"]["off"] == "this vLLM has no dispatcher"
    assert found["features"]["lens"]["off"] is None
    assert "off: this vLLM has no dispatcher" in run().stdout


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("INSPECT_LENS_DISABLE", "1", "INSPECT_LENS_DISABLE is set"),
        ("VLLM_PLUGINS", "another", "leaves inspect_lens out"),
    ],
)
def test_a_plug_in_that_vllm_does_not_load_is_told(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str
) -> None:
    monkeypatch.setenv(name, value)
    done = run()
    assert done.exit_code == 1
    assert reason in done.stdout


def test_a_rival_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_doctor, "rivals", lambda allowed: [("activations", "vllm_lens.x")])
    done = run()
    assert done.exit_code == 1
    assert "VLLM_PLUGINS=inspect_lens" in done.stdout


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = run("--model", str(tmp_path))
    assert done.exit_code != 0
    assert "config.json" in str(done.exception)


def test_one_cause_is_told_once_and_a_client_what_it_can_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_doctor, "problems", lambda: {"lens": "vLLM is not installed"})
    monkeypatch.setattr(_doctor, "_version", {"inspect-lens": "0.1.0"}.get)
    done = run()
    assert done.exit_code == 1
    assert done.stdout.count("vLLM is not installed") == 1
    assert "lens/<model>" in done.stdout


@pytest.mark.parametrize(
    ("engine", "off", "line"),
    [
        ({"not_served": "Gemma is refused"}, {}, "captures, steering and probes: off: Gemma"),
        ({"model": "m"}, {"qk": "no such layer"}, "queries and keys: off: no such layer"),
        ({"model": "m"}, {}, "serves the lens"),
    ],
)
def test_a_running_server_says_what_it_refused(
    monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any], off: dict[str, str], line: str
) -> None:
    answer = httpx.Response(200, json={"engines": [engine], "off": off})
    asked: list[str] = []
    monkeypatch.setattr(_doctor.httpx, "get", lambda url, **_: asked.append(url) or answer)
    done = run("--base-url", "localhost:8000/v1")
    assert asked == ["http://localhost:8000/v1/inspect_lens"]
    assert f"http://localhost:8000: {line}" in done.stdout
    assert done.exit_code == (0 if line == "serves the lens" else 1)
