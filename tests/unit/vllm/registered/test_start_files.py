"""Files that settings name: what is wrong is said of the file, and none keeps a start waiting."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from inspect_lens._vllm.compat.features import fault_of, reason_of
from inspect_lens._vllm.frontend import state
from inspect_lens._vllm.frontend.state import FrontEnd
from inspect_lens._vllm.registered.contents import start_items
from inspect_lens._vllm.sinks.alerts import Alerts, AlertsConfig
from inspect_lens._vllm.sinks.sink import read_sinks
from inspect_lens.errors import SpecError
from tests.unit.vllm.compat.test_facts import config as engine_config


@pytest.mark.parametrize("content", ["[]", '"x"', "3", "[" * 100_000, "\udcff"])
def test_a_file_that_holds_nothing_to_register_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(SpecError, match="INSPECT_LENS_REGISTER: p: ") as found:
        start_items(f"p={path}")
    assert found.value.__notes__[0].startswith(f"{path}: ")
    with pytest.raises(SpecError, match="INSPECT_LENS_SINKS"):
        assert read_sinks(str(path))


@pytest.mark.parametrize(
    "settings",
    [
        {"INSPECT_LENS_REGISTER": "p={folder}/secret.json"},
        {"INSPECT_LENS_REGISTER": "p={folder}"},
        {"INSPECT_LENS_REGISTER": "{folder}"},
        {"INSPECT_LENS_SINKS": "{folder}/secret.json"},
        {"INSPECT_LENS_SINKS": "{folder}"},
        {
            "INSPECT_LENS_SINKS": '{{"r": {{"store": "memory://r", "layers": [1], '
            '"when_slow": "spill", "spill": "{folder}/file/r"}}}}'
        },
    ],
)
def test_clients_hear_no_path_and_the_log_has_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, str],
) -> None:
    monkeypatch.setattr(state, "install_when_serving", lambda front: None)
    (tmp_path / "file").touch()
    for name, value in settings.items():
        monkeypatch.setenv(name, value.format(folder=tmp_path))
    front = FrontEnd()
    front.learn(SimpleNamespace(), engine_config())
    assert front.refusal is not None
    assert next(iter(settings)) in front.refusal
    assert str(tmp_path) not in json.dumps(front.describe()) + front.refusal
    assert str(tmp_path) in caplog.text


def test_a_fault_at_start_names_no_file_to_clients() -> None:
    for error in (
        FileNotFoundError(2, "No such file or directory", "/srv/private"),
        OSError("/srv/private: is no regular file"),
        ImportError("no 'x' in 'y' (/srv/private/y.py)", name="y", path="/srv/private/y.py"),
    ):
        assert "/srv" not in reason_of(error) + str(fault_of(error))
        assert type(error).__name__ in reason_of(error)
    assert "division by zero" in reason_of(ZeroDivisionError("division by zero"))


@pytest.mark.parametrize(
    ("read", "why"),
    [
        (lambda path: start_items(f"p={path}"), "no regular file"),
        (read_sinks, "no regular file"),
        (lambda path: Alerts(AlertsConfig(url="https://host/x", dead_letter=path)), "No such dev"),
    ],
)
def test_no_start_waits_for_a_pipe(tmp_path: Path, read: Callable[[str], object], why: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SpecError) as found:
        read(str(tmp_path / "pipe"))
    assert why in " ".join([str(found.value), *getattr(found.value, "__notes__", ())])
