"""What a user gets wrong is one line in the shell's words and an exit code, in every command."""

from __future__ import annotations

import importlib
import json
import logging
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log
from inspect_ai.model import Model, get_model

from inspect_lens._cli import _doctor
from inspect_lens._cli._main import app
from inspect_lens._cli._output import found, in_shell_words
from inspect_lens.collect import _collect
from inspect_lens.data import ActivationStore
from inspect_lens.errors import SpecError
from inspect_lens.model._host import PrerequisiteError, registry_lookup
from inspect_lens.view import WrittenView
from tests.kit.commands import commands, run_command
from tests.kit.fake_server import FakeLensServer
from tests.kit.planted_log import plant_log, planted_probe
from tests.kit.promises import Promise

PROMISE = Promise("a mistake is one line and an exit code", surfaces=commands())
PYTHON = re.compile(r"\b[a-z_]+=(True|False)\b|\b(base_url|check_model|any_model|tokenizer)=")


def refused(words: str, line: str, request: pytest.FixtureRequest, *, code: int) -> str:
    """The line that a mistake gets."""
    capsys = request.getfixturevalue("capsys")
    capsys.readouterr()
    try:
        found = run_command(words, *line.split())
    except Exception as error:  # noqa: BLE001
        pytest.fail(f"{words} {line}: a traceback of {type(error).__name__}: {error}")
    said = str(capsys.readouterr().err)
    assert found == code, (line, said)
    last = said.strip().splitlines()[-1]
    assert re.match(r"\w+Error: ", last), said
    assert not PYTHON.search(last), last
    return said


@PROMISE.on("probe collect")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    out = request.getfixturevalue("tmp_path") / "out"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    data = f"--out {out} --dataset instructed_pairs --limit 2"
    refused(surface, f"--model gpt2 {data}", request, code=3)
    refused(surface, f"--model lens/x --positions foo {data}", request, code=2)
    refused(surface, f"--model lens/x --layers x {data}", request, code=3)
    refused(surface, f"--model lens/x -M captur=4 {data}", request, code=3)
    refused(surface, f"--model lens/x --out {out} --dataset nothing", request, code=3)
    said = refused(surface, f"--model lens/x --base-url localhost:{port} {data}", request, code=5)
    assert f"http://localhost:{port}" in said
    assert "pass another address as --base-url" in said


@PROMISE.on("chat")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    refused(surface, "--base-url localhost:9", request, code=5)
    refused(surface, "--base-url localhost:9 --scale 2", request, code=3)


@PROMISE.on("probe train", "probe sweep")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    out = "" if surface.endswith("sweep") else "--out there"
    refused(surface, f"{out} --train /nowhere --control /nowhere", request, code=4)
    refused(surface, f"{out} --train /nowhere --layers x", request, code=3)


@PROMISE.on("probe evaluate", "probe calibrate", "probe report")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    rest = {"evaluate": "store", "calibrate": "--out x", "report": "store --out x"}
    refused(surface, f"nothing-here {rest[surface.split()[1]]}", request, code=4)
    refused(surface, "", request, code=2)


@PROMISE.on("probe check")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue("tmp_path")
    refused(surface, "nothing-here --model lens/x --control /nowhere", request, code=4)
    refused(surface, "nothing-here --control /nowhere", request, code=2)
    probe = planted_probe(folder)
    line = f"{probe} --model lens/x --control"
    refused(surface, f"{line} /nowhere", request, code=4)
    refused(surface, f"{line} /nowhere --limit -1", request, code=2)
    (folder / "acts.safetensors").write_bytes(b"")
    said = refused(surface, f"{line} {folder / 'acts.safetensors'}", request, code=3)
    assert "allowed is the folder of a store" in said


@PROMISE.on("settings")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    refused(surface, "nobody/nothing", request, code=4)
    refused(surface, "nobody/nothing more", request, code=2)


@PROMISE.on("vector extract", "vector evaluate", "vector sweep", "vector import", "vector export")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    line = {
        "extract": "--store /nowhere --out x", "evaluate": "nothing-here /nowhere",
        "sweep": "--train /nowhere", "import": "/nowhere.gguf --out x --name a/b",
        "export": "nothing-here x.gguf --format repeng",
    }  # fmt: skip
    refused(surface, line[surface.split()[1]], request, code=4)


@PROMISE.on("probe import", "lens import")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    refused(surface, "/nowhere.pt --out x --name a/b", request, code=4)
    refused(surface, "/nowhere.pt --out x", request, code=2)


@PROMISE.on("lens fit", "lens evaluate")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    if surface.endswith("fit"):
        line = "--model x --texts /nowhere --held-out /nowhere --out x --kind"
        refused(surface, f"{line} other", request, code=2)
        refused(surface, f"{line} tuned", request, code=4)
    else:
        refused(surface, "nothing-here --model x --texts /nowhere", request, code=4)


@PROMISE.on("view", "score")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue("tmp_path")
    refused(surface, "/nowhere.eval --probe a/b", request, code=4)
    if surface == "view":
        refused(surface, "/nowhere.eval --limit -1", request, code=2)
        return
    probe = planted_probe(folder)
    log = plant_log(folder / "logs", probe, n=2).log.location
    before = Path(log).read_bytes()
    copy = folder / "copy.eval"
    assert run_command(surface, log, "--probe", probe, "--out", str(copy)) == 0
    whole = copy.read_bytes()
    for line in (f"--out {log}", f"--out {copy}", f"--out {log} --overwrite"):
        refused(surface, f"{log} --probe {probe} {line}", request, code=3)
    assert (Path(log).read_bytes(), copy.read_bytes()) == (before, whole)
    assert run_command(surface, log, "--probe", probe, "--out", str(copy), "--overwrite") == 0
    assert read_eval_log(str(copy)).status == "success"
    assert {p.name for p in folder.glob("*.eval")} == {"copy.eval"}, "nothing is left beside it"


@PROMISE.on("doctor")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    refused(surface, "--device tpu", request, code=2)
    refused(surface, "--model /nowhere", request, code=4)
    monkeypatch = request.getfixturevalue("monkeypatch")
    folder: Path = request.getfixturevalue("tmp_path")
    smi = folder / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H100, 580.95, 81559 MiB, 81000 MiB'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")
    machine = _doctor.examined()["machine"]
    assert machine["gpus"][0]["driver_version"] == "580.95"
    assert 0 < machine["free_gib"] <= machine["memory_gib"]
    smi.write_text("#!/bin/sh\necho 'driver mismatch'; exit 9\n")
    assert _doctor.examined()["machine"]["no_gpu"] == "driver mismatch"


test_promise = PROMISE.test()


def test_ctrl_c_says_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capture, out = _collect.capture_sample, tmp_path / "acts"

    async def stopped(model: Model, index: int, *rest: Any) -> Any:
        if index == 5:
            signal.raise_signal(signal.SIGINT)
            await anyio.sleep(60)
        return await capture(model, index, *rest)

    monkeypatch.setattr(_collect, "capture_sample", stopped)
    with FakeLensServer() as server:
        line = (
            f"--model lens/{server.model} --base-url {server.url} --dataset instructed_pairs "
            f"--limit 8 --max-tokens 3 --shard-samples 2 --concurrency 1 --out {out}"
        )
        assert run_command("probe collect", *line.split()) == 130
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert said == (
            f"Interrupted: Ctrl-C ended it; 4 of 8 samples are in {out}, and the same command goes "
            "on from there"
        )
        monkeypatch.setattr(_collect, "capture_sample", capture)
        assert run_command("probe collect", *line.split()) == 0
    assert len(ActivationStore.open(str(out))) == 8


def test_ctrl_c_elsewhere_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("inspect_lens.view.write_view", stopped)
    assert run_command("view", "any.eval") == 130
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("Interrupted: Ctrl-C ended it; results are written at the end")


def test_messages_have_the_flags_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["inspect-lens", "score", "x.eval"])
    for python, shell in (
        ("or check_model=False to measure transfer", "or --any-model to measure transfer"),
        ("pass pool='mean', or pool=", "pass --pool='mean', or --pool"),
        ("-M capture=[4] and layer=3", "-M capture=[4] and layer=3"),
        ("roles: pass roles= with one", "--role: pass --role with one"),
        ("/data/pool=mean/x and http://h/?pool=a", "/data/pool=mean/x and http://h/?pool=a"),
        ("roles=('user', 'tool') has", "--role='user','tool' has"),
    ):
        assert in_shell_words(python, found(app)[1]) == shell
    monkeypatch.setattr("sys.argv", ["inspect-lens", "probe", "collect"])
    said = in_shell_words("say prompt='q', label=False or layers=[4, 5]", found(app)[1])
    assert said == "say --option prompt='q', --option label=false or --layers=4,5"
    monkeypatch.setattr("sys.argv", ["inspect-lens", "probe", "train"])
    said = in_shell_words("control: as in --disjoint control=question", found(app)[1])
    assert said == "--control: as in --disjoint control=question"


def page(*notes: str) -> WrittenView:
    return WrittenView(
        path=Path("x.html"), nbytes=9, n_samples=1, n_left_out=0, n_without=0, n_calls=1,
        n_tokens=1, n_scored=1, series=("a",), has_texts=True, n_kept=0, n_lost=0, notes=notes,
    )  # fmt: skip


def test_notes_of_a_page_have_the_flags_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "pass it as probes=a/b, or allow it with follow=hf://a."
    monkeypatch.setattr("inspect_lens.view.write_view", lambda *_, **__: page(said))
    for more in ((), ("--json",)):
        assert run_command("view", "any.eval", *more) == 0
        shown = capsys.readouterr().out
        assert "pass it as --probe=a/b, or allow it with --follow=hf://a." in shown


def test_what_libraries_warn_of_stands_behind_a_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(*_: Any, **__: Any) -> Any:
        for text in (
            "Retrying in 8s [Retry 1/5].",
            "the token has expired",
            "the token has expired",
        ):
            logging.getLogger("huggingface_hub.utils._http").warning(text)
        logging.getLogger("inspect_ai.log").warning("the log has no end")
        sys.stderr.write("a word of ours\n")
        return page()

    monkeypatch.setattr("inspect_lens.view.write_view", write)
    assert run_command("view", "any.eval") == 0
    wait, *rest = capsys.readouterr().err.splitlines()
    assert "the Hugging Face hub does not answer" in wait
    assert rest == [
        "a word of ours", "note: the token has expired", "note: the log has no end"
    ]  # fmt: skip


def test_what_libraries_log_does_not_stand_before_an_error(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = ("huggingface_hub.utils._http", "inspect_ai.model")

    def write(*_: Any, **__: Any) -> Any:
        for name in names * 2:
            logging.getLogger(name).warning("Retrying in 8s [Retry 5/5].")
            logging.getLogger(name).error("thrown while requesting")
        raise SpecError("ours")

    monkeypatch.setattr("inspect_lens.view.write_view", write)
    assert run_command("view", "any.eval") == 3
    waits, ours = capsys.readouterr().err.splitlines()
    assert waits.startswith("note: the Hugging Face hub does not answer and is asked again")
    assert ours == "SpecError: ours"
    assert run_command("view", "any.eval", "--json") == 3
    assert json.loads(capsys.readouterr().err) == {"error": "SpecError", "message": "ours"}
    assert not caplog.text
    logging.getLogger(names[1]).error("heard again")
    assert "heard again" in caplog.text


def test_names_of_models_are_judged_in_python_too() -> None:
    with pytest.raises(ValueError, match="should be in the format"):
        get_model("gpt2")


def test_an_eval_without_its_probe_says_which_arguments_it_takes() -> None:
    importlib.import_module("inspect_lens._registry")
    factory = registry_lookup("task", "inspect_lens/ai_liar")
    with pytest.raises(PrerequisiteError, match=r"needs a probe.*-T probe=…"):
        factory()
    with pytest.raises(PrerequisiteError, match=r"no -T prob=….*did you mean 'probe'"):
        factory(prob="a/b")


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("organism_control", {"layer": 99}, r"layer=99: .* has directions at \[4\] only"),
        ("organism_steering_sweep", {"condition": "x"}, "condition='x': heldout_phrasing has no"),
        ("organism_agent", {"kind": "x"}, "kind='x'; allowed are reason"),
    ],
)
def test_a_wrong_value_for_an_eval_is_one_line(name: str, given: dict[str, Any], said: str) -> None:
    importlib.import_module("inspect_lens._registry")
    factory = registry_lookup("task", f"inspect_lens/{name}")
    with pytest.raises(PrerequisiteError, match=f"^inspect_lens/{name}: {said}"):
        factory(**given)


@pytest.mark.parametrize("provider", ["lens", "vllm-lens"])
def test_a_missing_server_is_an_error_with_its_address_within_seconds(
    provider: str, tmp_path: Path
) -> None:
    """In an eval, whose samples wait for it, under both names of the provider."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    began = time.monotonic()
    (log,) = eval(
        Task(dataset=[Sample(input="hi")]), model=f"{provider}/x", model_base_url=f"{url}/v1",
        display="none", log_dir=str(tmp_path),
    )  # fmt: skip
    assert time.monotonic() - began < 60
    assert log.error is not None
    assert log.error.message.startswith(f"no server answers at {url} (model x)")
