"""A task that needs an argument says so in one line, which Inspect prints without a traceback."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml
from inspect_ai._util.config import parse_cli_args

from inspect_lens.errors import SpecError
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


@pytest.mark.parametrize(("folder", "name"), tasks())
def test_an_argument_of_another_kind_is_refused_by_name(folder: str, name: str) -> None:
    make: Any = getattr(importlib.import_module(f"evals.{folder}.task"), name)
    judged = set(inspect.signature(make).parameters) - {"positions", "threshold"}
    for argument in sorted(judged):
        with pytest.raises(SpecError, match=rf"^{argument}="):
            make(**{argument: {"a": 1}})


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("organism_deception", "max_tokens=off", "max_tokens=False; allowed is an integer"),
        ("organism_deception", "max_tokens=0", "max_tokens=0; allowed are integers of 1 or more"),
        ("organism_lens", "lens=off", "lens=False; allowed is a text or None"),
        ("organism_causal_tracing", "early=0", "early=0; allowed are integers of 1 or more"),
        ("refusal_ablation", "n_layers=true", "n_layers=True; allowed is an integer or None"),
        ("refusal_ablation", "n_layers=0", "n_layers=0; allowed are integers of 1 or more"),
        ("refusal_ablation", "control_draws=-1", "control_draws=-1; allowed are integers of 0"),
        ("sycophancy_steering", "limit=-1", "limit=-1; allowed are integers of 1 or more"),
        ("sae_clamp", "only_if_active=maybe", "only_if_active='maybe'; allowed is true or false"),
        ("organism_oracle", "question=In one word, what?", "question=.*splits a text at its comma"),
        ("lens_audit", "vector=3", "vector=3; allowed is"),
    ],
)
def test_what_a_command_line_makes_of_a_value(name: str, given: str, message: str) -> None:
    make: Any = getattr(importlib.import_module(f"evals.{name}.task"), name)
    with pytest.raises(SpecError, match=message):
        make(**parse_cli_args([given]))
