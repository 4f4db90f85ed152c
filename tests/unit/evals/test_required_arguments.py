"""A task that needs an argument says so in one line, which Inspect prints without a traceback."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from inspect_lens.model._host import PrerequisiteError
from tests.kit.repository import ROOT


def tasks() -> list[tuple[str, str]]:
    return [
        (path.parent.name, entry["name"])
        for path in sorted((ROOT / "evals").glob("*/eval.yaml"))
        for entry in yaml.safe_load(path.read_text(encoding="utf-8"))["tasks"]
    ]


@pytest.mark.parametrize(("folder", "name"), tasks())
def test_without_arguments_a_task_is_made_or_asks_in_one_line(folder: str, name: str) -> None:
    make: Any = getattr(importlib.import_module(f"evals.{folder}.task"), name)
    try:
        made, said = make(), ""
    except PrerequisiteError as error:
        made, said = None, str(error.message)
    assert made is not None or ("-T " in said and "\n" not in said), said


def test_a_probe_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    from evals.sandbagging.task import sandbagging

    with pytest.raises(PrerequisiteError, match=r"-T probe=nobody/none"):
        sandbagging(probe="nobody/none", data=str(tmp_path))
