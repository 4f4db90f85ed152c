from __future__ import annotations

import json
import logging
import re
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from inspect_ai._display.textual.display import TextualDisplay
from inspect_ai.model import get_model

from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.model import _host, _server, lens_config
from inspect_lens.model._host import VLLMServer
from inspect_lens.spec import Zero
from tests.kit.fake_server import FakeLensServer
from tests.kit.waiting import soon


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What Inspect was told to show."""
    found: list[tuple[str, str]] = []
    monkeypatch.setattr(_server, "display_counter", lambda *said: found.append(said))
    monkeypatch.setattr(_server, "EVERY_S", 0.02)
    return found


@pytest.mark.anyio
async def test_seconds_are_told_until_the_server_is_there(shown: list[tuple[str, str]]) -> None:
    async def start() -> None:
        assert await soon(lambda: len(shown) >= 3)

    await _server.while_telling(VLLMServer(), start)
    assert shown[0] == ("vLLM server", "starts, 0 s")
    assert shown[-1][1].startswith("started in ")
    n = len(shown)
    await anyio.sleep(0.1)
    assert len(shown) == n, "nothing is told of a server that is there"


@pytest.mark.anyio
async def test_a_server_that_does_not_start_raises_its_own_error(
    shown: list[tuple[str, str]],
) -> None:
    async def start() -> None:
        raise RuntimeError("no GPU")

    with pytest.raises(RuntimeError, match="no GPU"):
        await _server.while_telling(VLLMServer(), start)
    assert shown[-1] == ("vLLM server", "did not start")
    with pytest.raises(RuntimeError, match="no GPU"):
        await _server.while_telling(VLLMServer(), start)


@pytest.mark.anyio
async def test_a_display_that_raises_stops_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a script in a terminal, where the full-screen display is not running.
    monkeypatch.setattr(_server, "display_counter", TextualDisplay().display_counter)
    with pytest.raises(AttributeError):
        TextualDisplay().display_counter("vLLM server", "starts, 0 s")
    started = []

    async def start() -> None:
        await anyio.sleep(0.05)
        started.append(True)

    await _server.while_telling(VLLMServer(), start)
    assert started == [True]


@pytest.mark.anyio
@pytest.mark.usefixtures("shown")
async def test_without_counters_lines_tell_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def start() -> None:
        await anyio.sleep(0)

    said = ["vLLM server starts; this takes a minute or more", "vLLM server started in …"]
    for terminal, display, wanted in (
        (True, "rich", []),
        (True, "plain", said),
        (False, "rich", said),
        (False, "none", []),
    ):
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal)
        monkeypatch.setattr(_server, "display_type", lambda display=display: display)
        await _server.while_telling(VLLMServer(), start)
        lines = re.sub(r"\d+ s$", "…", capsys.readouterr().err.rstrip()).splitlines()
        assert lines == wanted, (terminal, display)


@pytest.mark.anyio
async def test_many_samples_wait_and_one_tells(shown: list[tuple[str, str]]) -> None:
    server, ready = VLLMServer(), anyio.Event()
    async with anyio.create_task_group() as group:
        for _ in range(50):
            group.start_soon(_server.while_telling, server, ready.wait)
        await anyio.sleep(0.1)
        ready.set()
    assert sum(said.startswith("started in ") for _, said in shown) == 1
    assert len(shown) < 40


@pytest.mark.anyio
async def test_the_provider_tells_of_servers_of_its_own_alone(
    shown: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeLensServer(model="org/told") as server:
        await get_model("lens/org/told", base_url=server.url, memoize=False).generate("hello")
        assert shown == []

        def start(*_: object, **__: object) -> tuple[str, None, int]:
            return f"{server.url}/v1", None, 1

        monkeypatch.setattr(_server, "start_local_server", start)
        monkeypatch.setattr(_server.importlib.util, "find_spec", lambda _: True)
        monkeypatch.delenv("VLLM_BASE_URL", raising=False)
        model = get_model("lens/org/told", memoize=False)
        await model.generate("hello")
        assert shown[-1][1].startswith("started in ")


@pytest.mark.anyio
@pytest.mark.usefixtures("shown")
async def test_arguments_that_come_after_the_start_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeLensServer(model="org/shared") as server:
        monkeypatch.setattr(
            _server, "start_local_server", lambda *_, **__: (f"{server.url}/v1", None, 1)
        )
        monkeypatch.setattr(_server.importlib.util, "find_spec", lambda _: True)
        monkeypatch.delenv("VLLM_BASE_URL", raising=False)
        in_time: list[dict[str, Any]] = [{"max_model_len": 64}, {"max_model_len": 64}, {}]
        for args in (*in_time, {"capture": [1]}):
            await get_model("lens/org/shared", memoize=False, **args).generate("hello")
        assert "has no effect" not in caplog.text
        late: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 2}
        await get_model("lens/org/shared", memoize=False, **late).generate("hello")
    for said in (
        "-M max_model_len=128 has no effect: the server of org/shared runs already, with "
        "max_model_len=64; give",
        "-M max_num_seqs=2 has no effect: the server of org/shared runs already, with no "
        "max_num_seqs; give",
    ):
        assert caplog.text.count(said) == 1


@pytest.mark.anyio
@pytest.mark.usefixtures("shown")
async def test_a_start_that_fails_has_failed_for_all_that_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts: list[float] = []

    def fail(*_: object, **__: object) -> None:
        starts.append(time.monotonic())
        time.sleep(0.2)
        raise RuntimeError("Failed to start vLLM server: it ended. Try rerunning with more")

    model = get_model("lens/org/failing", memoize=False)
    monkeypatch.setattr(_server, "start_local_server", fail)
    monkeypatch.setattr(_server.importlib.util, "find_spec", lambda _: True)
    monkeypatch.delenv("VLLM_BASE_URL", raising=False)

    async def ask() -> None:
        with pytest.raises(CaptureError, match=r"it ended\. To see all that it writes: "):
            await model.generate("hello")

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(ask)
    assert len(starts) == 1
    await ask()  # as an eval after it, in the same notebook
    assert len(starts) == 2


@pytest.mark.parametrize("begins", ["", "(Worker_TP1 pid=7) ERROR 12-01 14:00:00 [worker.py:9] "])
def test_the_reason_is_the_engines_own_whether_its_log_has_a_head_or_none(begins: str) -> None:
    _host.hear_server()
    said = logging.getLogger("inspect_ai._util.local_server")
    for line in (
        f"{begins}WorkerProc failed to start.",
        f"{begins}Traceback (most recent call last):",
        f"{begins}torch.OutOfMemoryError: CUDA out of memory",
        "(EngineCore_DP0 pid=6) Exception: WorkerProc initialization failed due to an exception",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ):
        said.debug(line)
    assert _host.last_error() == "torch.OutOfMemoryError: CUDA out of memory"


def test_a_level_that_somebody_gave_the_log_of_servers_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = logging.getLogger("inspect_ai._util.local_server")
    for level in (logging.WARNING, logging.INFO):
        said.setLevel(level)
        for _ in range(2):
            _host.hear_server()
            said.info("loads weights")
    assert caplog.messages == ["loads weights"] * 2
    said.setLevel(logging.NOTSET)
    _host.hear_server()


ASKED: list[tuple[dict[str, Any], str]] = [
    ({"capture": [2, 99]}, "capture.layers: layer 99; .*tiny has layers 0 to 5"),
    ({"lens": [6]}, "lens.layers: layer 6"),
    ({"qk": [6]}, "output_qk: layer 6"),
    ({"qk": [(7, 0)]}, "output_qk: layer 7"),
    ({"edits": Zero(layers=[6])}, r"edits\[0\].layers: layer 6"),
]


@pytest.mark.anyio
@pytest.mark.parametrize(("asked", "said"), ASKED)
async def test_layers_that_the_model_lacks_are_refused_before_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], said: str
) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    monkeypatch.setattr(_server, "start_local_server", no_start)
    for config in ({"num_hidden_layers": 6}, {"text_config": {"num_hidden_layers": 6}}):
        (folder / "config.json").write_text(json.dumps(config))
        model = get_model(f"vllm-lens/{folder}", memoize=False)
        with pytest.raises(SpecError, match=said):
            await model.generate("x", config=lens_config(**asked))
    # What the folder does not tell, or what a server is told otherwise, the server judges.
    (folder / "config.json").write_text("{}")
    args: dict[str, Any]
    for args in ({}, {"hf_overrides": {"num_hidden_layers": 200}}):
        model = get_model(f"vllm-lens/{folder}", memoize=False, **args)
        with pytest.raises(CaptureError, match="would start"):
            await model.generate("x", config=lens_config(**asked))
        (folder / "config.json").write_text('{"num_hidden_layers": 6}')


def no_start(*args: object, **options: object) -> None:
    raise RuntimeError("would start")
