"""What engines of a benchmark are started with."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import run as run_module
from benchmarks.results_file import Results
from benchmarks.run import Bench, parse
from tests.kit.arguments import key_and_json
from tests.kit.files import write_json


class Started:
    """A child that starts whatever it is told to, and keeps what that was."""

    all: dict[str, dict[str, Any]]
    served: list[bool]

    def __init__(self, module: str, *, environment: dict[str, str], log: Path) -> None:
        self.environment = environment

    def ask(self, limit: float, **message: Any) -> dict[str, Any]:
        self.all[message["kind"]] = message["options"]
        self.served.append(message["served"])
        return {"environment": {}, "cold_start_seconds": 1.0}


def started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str
) -> dict[str, dict[str, Any]]:
    """Options of each kind of engine that these words start."""
    kinds: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(Started, "all", kinds, raising=False)
    monkeypatch.setattr(Started, "served", [], raising=False)
    monkeypatch.setattr(run_module, "Child", Started)
    options = parse(["--out", "r.json", "--models", "tiny", *words])
    options.work, options.deadline = str(tmp_path), float("inf")
    Bench(options, "tiny", Results({})).start()
    return kinds


def test_an_engine_option_reaches_every_engine_of_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--arms", "default", "eager", "capture-1", "vllm-lens", "hf", "--peer-path", "peer"]
    graphs = ["--engine-option", "max_cudagraph_capture_size=1024"]
    kinds = started(tmp_path, monkeypatch, *words, *graphs, "--max-num-seqs", "7")
    plain = started(tmp_path, monkeypatch, *words, "--max-num-seqs", "7")
    assert len(kinds) == 5
    assert kinds.pop("hf") == plain.pop("hf")
    wanted = {kind: before | {"max_cudagraph_capture_size": 1024} for kind, before in plain.items()}
    assert kinds == wanted
    assert all("max_cudagraph_capture_size" not in options for options in plain.values())


def test_an_engine_option_goes_before_what_the_script_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ["--engine-option", "max_num_seqs=9", "--engine-option", "dtype=float16"]
    kinds = started(tmp_path, monkeypatch, "--arms", "default", "--max-num-seqs", "7", *own)
    assert kinds["plain"]["max_num_seqs"] == 9
    assert kinds["plain"]["dtype"] == "float16"


@pytest.mark.parametrize("served", [True, False])
def test_servers_are_started_of_vllm_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    words = ["--arms", "default", "hf", *(["--served"] if served else [])]
    kinds = started(tmp_path, monkeypatch, *words)
    assert list(kinds) == (["plain"] if served else ["plain", "hf"])
    assert set(Started.served) == {served}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a=1", ("a", 1)),
        ("a=true", ("a", True)),
        ('a={"b": [1, 2]}', ("a", {"b": [1, 2]})),
        ("a=float16", ("a", "float16")),
        ("a=b=c", ("a", "b=c")),
        ("a=", ("a", "")),
    ],
)
def test_keys_and_values(text: str, found: tuple[str, Any]) -> None:
    assert key_and_json(text) == found


@pytest.mark.parametrize("text", ["a", "=1", ""])
def test_without_a_key_the_error_says_what_is_wanted(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="KEY=JSON"):
        key_and_json(text)


@pytest.mark.parametrize("words", [[], ["--served"], ["--engine-option", "max_num_seqs=7"]])
def test_engines_that_start_together_are_those_that_start_in_turn(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = ["--arms", "default", "capture-1", "steer", "vllm-lens", "hf"]
    in_turn = started(tmp_path, monkeypatch, *arms, *words)
    assert started(tmp_path, monkeypatch, *arms, *words, "--start-together") == in_turn != {}


def test_a_file_that_is_added_to_is_of_other_models_and_of_one_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r.json"
    results = Results({"command": "python -m benchmarks.run", "arms": {}, "gpu": "NVIDIA H200"})
    results.add(("tiny", "smoke", "default"), {"seconds": 1.0, "tokens": 8, "preemptions": 0})
    write_json(out, results.to_json())
    before = out.read_bytes()
    words = ["--keep", "--out", str(out), "--arms", "default", "--loads", "smoke"]
    with pytest.raises(SystemExit, match="has runs of tiny; measure other models"):
        run_module.main([*words, "--models", "tiny-moe", "tiny"])
    assert out.read_bytes() == before

    def ask(self: Started, limit: float, **message: Any) -> dict[str, Any]:
        return {"environment": {"gpu": "NVIDIA H100"}, "cold_start_seconds": 1.0}

    monkeypatch.setattr(Started, "ask", ask)
    monkeypatch.setattr(Started, "stop", lambda self: None, raising=False)
    monkeypatch.setattr(Started, "close", lambda self: None, raising=False)
    monkeypatch.setattr(run_module, "Child", Started)
    with pytest.raises(SystemExit, match="measured on NVIDIA H200, and this is NVIDIA H100"):
        run_module.main([*words, "--models", "tiny-moe"])
    kept = json.loads(out.read_text("utf-8"))
    assert kept["runs"] == json.loads(before)["runs"]
    assert kept["environment"]["gpu"] == "NVIDIA H200"
