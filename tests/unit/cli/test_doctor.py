"""`inspect-lens doctor`: one screen, one exit code, and the truth about what is off."""

from __future__ import annotations

import functools
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("vllm")

from inspect_lens._base.installed import VLLM
from inspect_lens._cli import _doctor
from inspect_lens._cli._doctor import checkpoint_facts
from inspect_lens._cli._main import app
from tests.kit.repository import ROOT

if TYPE_CHECKING:
    from .conftest import Run


def run_doctor(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments])


# The source of vLLM is read for it.
PROBLEMS = functools.cache(_doctor.problems)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_doctor, "problems", PROBLEMS)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.delenv("INSPECT_LENS_DISABLE", raising=False)


def test_all_that_this_vllm_has_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    done = run_doctor("--model", str(ROOT / "organism" / "checkpoint"), "--json", "--device", "cpu")
    found = json.loads(done.stdout)
    assert done.exit_code == 0
    assert found["ok"]
    assert all(feature["off"] is None for feature in found["features"].values())
    buffers = found["buffers"]
    assert buffers["taps"] == 7, "six layers, and the stream in front of the first"
    assert buffers["capture_rows"] == 7 * 16384
    assert buffers["capture_bytes"] == 7 * 16384 * 256 * 2
    lines = run_doctor("--model", str(ROOT / "organism" / "checkpoint")).stdout.splitlines()
    assert len(lines) <= 24, "one screen"


def test_wide_sites_take_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSPECT_LENS_SITES", "k,mlp_hidden,resid_post")
    done = run_doctor("--model", str(ROOT / "organism" / "checkpoint"), "--json", "--device", "cpu")
    buffers = json.loads(done.stdout)["buffers"]
    assert buffers["sites"] == ["k", "mlp_hidden", "resid_post"]
    assert buffers["taps"] == 3 * 6
    assert buffers["capture_rows"] == (1 + 2 + 1) * 6 * 16384, "512 neurons, and a stream of 256"


def test_what_is_off_has_its_reason_and_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_doctor, "problems", lambda: {"hooks": "this vLLM has no dispatcher"})
    done = run_doctor("--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 1
    assert found["features"]["hooks"]["off"] == "this vLLM has no dispatcher"
    assert found["features"]["lens"]["off"] is None
    assert "off: this vLLM has no dispatcher" in run_doctor().stdout


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
    done = run_doctor()
    assert done.exit_code == 1
    assert reason in done.stdout


def test_a_rival_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_doctor, "rivals", lambda allowed: [("activations", "vllm_lens.x")])
    done = run_doctor()
    assert done.exit_code == 1
    assert "VLLM_PLUGINS=inspect_lens" in done.stdout


def test_a_model_that_is_not_there_is_named(run: Run, tmp_path: Path) -> None:
    _, err = run("doctor", "--model", tmp_path, code=4)
    assert "config.json" in err


def test_one_cause_is_told_once_and_a_client_what_it_can_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_doctor, "problems", lambda: {"lens": "vLLM is not installed"})
    monkeypatch.setattr(_doctor, "_version", {"inspect-lens": "0.1.0"}.get)
    done = run_doctor()
    assert done.exit_code == 1
    assert done.stdout.count("vLLM is not installed") == 1
    assert "lens/<model>" in done.stdout


class Server(ThreadingHTTPServer):
    """Answers every question in one way, where the key is right."""

    daemon_threads = True

    def __init__(self, status: int, content: str, kind: str = "application/json") -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.answer, self.asked = (status, content, kind), list[str]()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        status, content, kind = self.server.answer
        if status == 401 and self.headers.get("Authorization") == "Bearer sesame":
            status = 200
        self.server.asked.append(self.path)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def start(*answer: Any) -> Server:
        made.append(Server(*answer))
        return made[-1]

    yield start
    for server in made:
        server.shutdown()
        server.server_close()


SERVES = json.dumps({"engines": [{"model": "m", "layers": [0, 1, 2]}], "data": [{"id": "org/m"}]})
NO_GEMMA = {"not_served": "Gemma is refused"}
NO_MAMBA = {"not_served": "Mamba is refused"}


@pytest.mark.parametrize(
    ("engines", "off", "lines"),
    [
        ([NO_GEMMA], {}, ["captures, steering and probes: off: Gemma is refused"]),
        ([{"model": "m"}], {"qk": "no such layer"}, ["queries and keys: off: no such layer"]),
        ([NO_GEMMA, {"model": "m"}, NO_MAMBA], {},
         ["engine 0: Gemma is refused", "engine 2: Mamba is refused"]),
        ([{"model": "m", "layers": [0, 3]}], {}, ["serves the lens"]),
    ],
)  # fmt: skip
def test_a_running_server_says_all_that_it_refused(
    serve: Callable[..., Server], engines: list[Any], off: dict[str, str], lines: list[str]
) -> None:
    server = serve(200, json.dumps({"engines": engines, "off": off, "data": [{"id": "org/m"}]}))
    done = run_doctor("--base-url", f"{server.url.removeprefix('http://')}/v1")
    assert server.asked == ["/v1/inspect_lens", "/v1/models"]
    for line in lines:
        assert line in next(x for x in done.stdout.splitlines() if x.startswith("server"))
    assert done.exit_code == (0 if lines == ["serves the lens"] else 1)
    assert ("org/m; the lens reads layers 0, 3\n" in done.stdout) is (done.exit_code == 0)


def test_a_server_with_a_key_is_asked_with_it(serve: Callable[..., Server], run: Run) -> None:
    server = serve(401, SERVES)
    _, err = run("doctor", "--base-url", server.url, code=3)
    assert err.count("\n") == 1
    assert "--api-key or VLLM_API_KEY" in err
    out, _ = run("doctor", "--base-url", server.url, "--api-key", "sesame")
    assert "serves the lens" in out


def test_the_key_that_evals_take_is_the_one_by_default(
    serve: Callable[..., Server], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(401, SERVES)
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    out, _ = run("doctor", "--base-url", server.url)
    assert "serves the lens" in out
    run("doctor")  # without a server, the variable is no mistake
    monkeypatch.setenv("VLLM_API_KEY", "wrong")
    out, _ = run("doctor", "--base-url", server.url, "--api-key", "sesame")
    assert "serves the lens" in out


@pytest.mark.parametrize("gpus", [[], [{"memory.free": "1000 MiB"}]])
def test_without_vllm_the_advice_is_for_what_there_is(gpus: list[Any]) -> None:
    found: dict[str, Any] = {"packages": {}, "machine": {"gpus": gpus}, "features": {}}
    (said,) = _doctor._advice(found)
    assert ("make env in a clone" in said) is not bool(gpus)
    assert ("vllm]" in said) is bool(gpus)
    url = "http://host:8000"
    found["server"] = {"url": url, "off": {}, "models": ["org/m", "an-adapter"]}
    (said,) = _doctor._advice(found)
    assert said == f"use it: inspect eval TASK --model lens/org/m --model-base-url {url}/v1"


def test_who_has_no_vllm_is_well_with_a_server_that_serves(
    serve: Callable[..., Server], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(200, SERVES)
    version = _doctor._version
    monkeypatch.setattr(_doctor, "_version", lambda n: None if n in VLLM else version(n))
    monkeypatch.setattr(_doctor, "problems", lambda: {"lens": "vLLM is not installed"})
    run("doctor", code=1)
    out, _ = run("doctor", "--base-url", server.url, code=0)
    assert "model       org/m; the lens reads layers 0 to 2\n" in out


@pytest.mark.parametrize("command", ["doctor", "chat"])
@pytest.mark.parametrize("url", ["http://[::1", "http://", "localhost:port", "ftp://host", ""])
def test_an_address_of_no_server_is_one_line(run: Run, command: str, url: str) -> None:
    if command == "doctor" and not url:
        return  # asks no server
    _, err = run(command, "--base-url", url, code=3)
    assert err.count("\n") == 1
    assert "--base-url" in err
    assert "http://localhost:8000" in err


@pytest.mark.parametrize("command", ["doctor", "chat"])
@pytest.mark.parametrize(
    ("status", "content", "kind", "says"),
    [
        (200, "<html>welcome</html>", "text/html", "text/html in the place of JSON"),
        (200, "{}", "application/json", ""),
        (200, '{"engines": []}', "application/json", ""),
        (200, '{"engines": ["m"]}', "application/json", ""),
        (200, "[]", "application/json", ""),
        (502, "<html>bad gateway</html>", "text/html", "HTTP 502"),
    ],
)
def test_an_answer_of_another_server_is_one_line(
    serve: Callable[..., Server], run: Run, command: str, status: int, content: str, kind: str,
    says: str,
) -> None:  # fmt: skip
    server = serve(status, content, kind)
    _, err = run(command, "--base-url", server.url, code=5)
    assert err.count("\n") == 1
    assert server.url in err or says
    assert says in err


def test_nobody_at_the_address_is_one_line(run: Run) -> None:
    _, err = run("doctor", "--base-url", "http://127.0.0.1:9", code=5)
    assert err.count("\n") == 1
    assert "no server answers at http://127.0.0.1:9" in err


def test_a_driver_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: Any, **__: Any) -> Any:
        raise subprocess.TimeoutExpired("nvidia-smi", 20)

    monkeypatch.setattr(_doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(_doctor.subprocess, "run", hang)
    assert "timed out after 20 seconds" in run_doctor().stdout


def test_a_driver_that_finds_no_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said = subprocess.CompletedProcess("nvidia-smi", 0, "No devices were found\n", "")
    monkeypatch.setattr(_doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(_doctor.subprocess, "run", lambda *_, **__: said)
    found = _doctor._machine()
    assert (found["gpus"], found["no_gpu"]) == ([], "the driver shows none")


@pytest.mark.parametrize(
    "config",
    ["[]", "{", '{"num_hidden_layers": null, "hidden_size": 8}',
     '{"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": [1]}',
     '{"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": "0"}',
     '{"num_hidden_layers": 2, "hidden_size": 0}', '{"architectures": 3}'],
)  # fmt: skip
def test_a_configuration_without_a_width_is_one_line(run: Run, tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    _, err = run("doctor", "--model", tmp_path, code=4)
    assert err.count("\n") == 1
    assert "config.json" in err


def checkpoint(folder: Path, **files: str) -> list[str]:
    config = {"architectures": [], "num_hidden_layers": 2, "hidden_size": 8}
    files = {"config.json": json.dumps(config), "tokenizer.json": "{}", **files}
    for name, text in files.items():
        (folder / name).write_text(text)
    wrong: list[str] = checkpoint_facts(str(folder))["wrong"]
    return wrong


@pytest.mark.parametrize(
    "index",
    ['{"weight_map": ', "[]", "{}", '{"weight_map": [1]}', '{"weight_map": null}',
     '{"weight_map": {"a": ["x"]}}'],
)  # fmt: skip
def test_an_index_of_weights_that_is_broken_is_told(tmp_path: Path, index: str) -> None:
    (said,) = checkpoint(tmp_path, **{"model.safetensors.index.json": index})
    assert said.startswith("model.safetensors.index.json cannot be read as an index")


def test_an_index_that_was_left_behind_is_not_looked_at(tmp_path: Path) -> None:
    left = '{"weight_map": {"a": "pytorch_model-00001-of-00002.bin"}}'
    files = {"pytorch_model.bin.index.json": left}
    (said,) = checkpoint(tmp_path, **files)
    assert "1 of its weight files are not there" in said
    assert checkpoint(tmp_path, **files, **{"model.safetensors": "x"}) == []


@pytest.mark.parametrize(
    ("name", "text", "chats"),
    [("tiktoken.model", "", False), ("qwen.tiktoken", "", False), ("tekken.json", "{}", True),
     ("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["t.T", null]}}', False)],
)  # fmt: skip
def test_every_kind_of_tokenizer_is_one(tmp_path: Path, name: str, text: str, chats: bool) -> None:
    checkpoint(tmp_path, **{name: text})
    (tmp_path / "tokenizer.json").unlink()
    found = checkpoint_facts(str(tmp_path))
    assert (found["tokenizer"], found["chat_template"]) == (True, chats)


@pytest.mark.parametrize("free", ["[N/A]", "[Not Supported]", "N/A"])
def test_a_gpu_that_does_not_tell_its_memory_is_not_judged(free: str) -> None:
    found: dict[str, Any] = {
        "model": {"weights_bytes": 10**15},
        "buffers": {"capture_bytes": 0, "steering_bytes": 0, "device": "cuda"},
        "machine": {"free_gib": 1.0, "gpus": [{"memory.free": free}]},
    }
    assert _doctor._too_large(found) is None
    found["machine"]["gpus"].append({"memory.free": "1000 MiB"})
    assert "are free" in (_doctor._too_large(found) or "")
