"""Files that settings name: what is wrong is said of the file, and none keeps a start waiting."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from inspect_lens._vllm.registered.contents import start_items
from inspect_lens._vllm.sinks.alerts import Alerts, AlertsConfig
from inspect_lens._vllm.sinks.sink import read_sinks
from inspect_lens.errors import SpecError


@pytest.mark.parametrize("content", ["[]", '"x"', "3", "[" * 100_000, "\udcff"])
def test_a_file_that_holds_nothing_to_register_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(SpecError, match=f"INSPECT_LENS_REGISTER: p={path}: "):
        start_items(f"p={path}")
    with pytest.raises(SpecError, match="INSPECT_LENS_SINKS"):
        assert read_sinks(str(path))


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
    with pytest.raises(SpecError, match=why):
        read(str(tmp_path / "pipe"))
