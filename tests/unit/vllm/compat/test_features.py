"""What a vLLM lacks turns off what needs it: with a reason, and without hurting its start."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from inspect_lens._vllm import plugin
from inspect_lens._vllm.compat import features
from inspect_lens._vllm.compat.features import USED_NAMES, busy, fault_of, has, problems
from inspect_lens._vllm.compat.monkeypatches import (
    EAGER_PATCHES,
    PATCHES,
    SERVER_PATCHES,
    Monkeypatch,
)
from inspect_lens._vllm.frontend import admission
from inspect_lens._vllm.http import server
from inspect_lens.errors import CompatError, UnsupportedError

ALL = [*((s.target, s.parameters) for s in PATCHES + SERVER_PATCHES + EAGER_PATCHES)]
ALL += [(used.target, ()) for used in USED_NAMES]


@cache
def sources(place: Path) -> dict[Path, str]:
    """Files in which the names stand."""
    names = {target.partition(":")[0].replace(".", "/") for target, _ in ALL}
    found = [place / f"{name}.py" for name in names]
    found += [file for name in names for file in (place / name).glob("*.py")]
    found += (place / "vllm/v1/worker").rglob("*.py")
    return {file: file.read_text(encoding="utf-8") for file in found if file.is_file()}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features._Off, "reasons", {})


@pytest.mark.parametrize(("target", "parameters"), ALL, ids=[target for target, _ in ALL])
def test_a_name_that_moves_is_missed(
    tmp_path: Path, target: str, parameters: tuple[str, ...]
) -> None:
    place = features._root()
    assert place is not None
    name = target.partition(":")[2].rpartition(".")[2]
    assert has(place, target, parameters)
    for source, text in sources(place).items():
        if name in text:
            copy = tmp_path / source.relative_to(place)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text.replace(name, f"moved_{len(name)}"), encoding="utf-8")
    assert not has(tmp_path, target, parameters)


def test_this_vllm_lacks_nothing() -> None:
    assert problems() == {}


def test_no_vllm_at_all_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    assert problems(tmp_path).keys() == features.FEATURES.keys()


@pytest.mark.parametrize("patch", EAGER_PATCHES, ids=[patch.name for patch in EAGER_PATCHES])
def test_what_decides_on_graphs_is_needed_by_hooks_and_autoencoders(
    monkeypatch: pytest.MonkeyPatch, patch: Monkeypatch
) -> None:
    known = features.has
    monkeypatch.setattr(
        features, "has", lambda place, name, more=(): name != patch.target and known(place, name)
    )
    assert problems().keys() >= {"hooks", "splice"}
    assert "lens" not in problems()


def test_a_missing_name_turns_one_feature_off_and_vllm_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("INSPECT_LENS_REQUIRED", raising=False)
    monkeypatch.setattr(features, "problems", lambda: {"hooks": "no dispatcher"})
    caplog.set_level("WARNING", logger="vllm.inspect_lens")
    plugin.register()
    assert features.is_off("hooks") == "no dispatcher"
    assert features.is_off("lens") is None
    with pytest.raises(UnsupportedError, match="no dispatcher"):
        features.require("hooks")
    features.require("http")
    monkeypatch.setenv("INSPECT_LENS_REQUIRED", "1")
    with pytest.raises(CompatError, match="no dispatcher"):
        plugin.register()


@pytest.mark.parametrize("error", [CompatError("moved"), ImportError("gone"), KeyError("a bug")])
def test_without_what_all_needs_vllm_runs_and_lens_requests_get_the_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(*args: Any) -> None:
        raise error

    wrapped: dict[str, Any] = {}
    monkeypatch.delenv("INSPECT_LENS_REQUIRED", raising=False)
    monkeypatch.setattr("inspect_lens._vllm.compat.monkeypatches.verify", broken)
    for module in (admission, server):
        monkeypatch.setattr(module, "wrap", lambda item, make: wrapped.update({item.name: make}))
    serving: list[bool] = []
    monkeypatch.setattr(server, "is_serving", lambda: bool(serving))
    plugin.register()
    assert wrapped.keys() == {"process_inputs", "add_request", "input_processor_init"}
    process = wrapped["process_inputs"](lambda self, key, prompt, params: params)
    for fine in ({"kv_hint": 1}, None):
        assert process(None, "r", "x", SimpleNamespace(extra_args=fine)).extra_args is fine
    with pytest.raises(UnsupportedError, match=str(error).strip("'")):
        process(None, "r", "x", SimpleNamespace(extra_args={"output_residual_stream": [1]}))
    # A request that somebody has made himself does not come by `process_inputs`.
    made = SimpleNamespace(sampling_params=SimpleNamespace(extra_args={"output_qk": [1]}))
    with pytest.raises(UnsupportedError, match=str(error).strip("'")):
        wrapped["add_request"](lambda *args: None)(None, made, "x", None, 0, None)
    # The server's modules may be there only when it has an engine.
    serving.append(True)
    wrapped["input_processor_init"](lambda self: None)(None)
    app = FastAPI()
    wrapped["routers"](lambda app: None)(app)
    asking = {"inspect_lens": {"capture": [1]}}
    answer = TestClient(app).post("/v1/completions", json=asking)
    assert answer.status_code == 400
    assert str(error).strip("'") in answer.json()["error"]["message"]
    assert TestClient(app).post("/v1/completions", json={"prompt": "x"}).status_code == 404
    monkeypatch.setenv("INSPECT_LENS_REQUIRED", "1")
    with pytest.raises(type(error)):
        plugin.register()


def test_busy_is_429() -> None:
    error: Any = busy("full")
    assert error.http_status == 429
    assert str(error) == "full"


def test_a_fault_that_a_client_is_told_of_names_no_file_of_the_server() -> None:
    fault = fault_of(PermissionError(13, "Permission denied", "/srv/secret"))
    assert "(PermissionError: Permission denied)" in str(fault)
    assert "secret" not in str(fault)
    assert "KeyError: 'a'" in str(fault_of(KeyError("a")))
