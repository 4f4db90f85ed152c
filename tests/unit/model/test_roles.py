"""Models in roles capture by one option, which every error names; `-M` does not reach them."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from inspect_ai.log import list_eval_logs, read_eval_log

from inspect_lens.model import read_activations
from inspect_lens.model._request import capture_advice, role_advice
from tests.kit.fake_server import FakeLensServer
from tests.kit.forks import run_python

TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.solver import Generate, TaskState, solver


@solver
def asks_a_role():
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state.output = await get_model(role="helper").generate("hello there friend")
        return state

    return solve


@task
def roles():
    return Task(dataset=[Sample(input="x")], solver=asks_a_role())
"""


def run_inspect(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "roles.py").write_text(TASK, encoding="utf-8")
    words = ["eval", "roles.py", *options, "--display", "plain", "--log-dir", "logs"]
    return run_python("-m", "inspect_ai", *words, cwd=folder)


def test_the_option_that_errors_name_makes_a_role_capture(tmp_path: Path) -> None:
    assert role_advice([2]) in capture_advice([2])
    with FakeLensServer() as server:
        option = role_advice([2]).replace("ROLE", "helper").replace("vllm-lens/…", "lens/org/tiny")
        # As it stands there, and the address of the test's server.
        option = option.replace("capture: [2]", f"capture: [2], base_url: '{server.url}'")
        option = option.replace("'helper", '"helper').removesuffix("'") + '"'
        done = run_inspect(tmp_path, "--model", "none", *shlex.split(option))
    assert done.returncode == 0, done.stdout
    (info,) = list_eval_logs(str(tmp_path / "logs"))
    log = read_eval_log(info)
    assert log.status == "success", log.error
    (call,) = read_activations(log)
    assert call.activations.layers == (2,)


@pytest.mark.parametrize("argument", ["capture=4", "activations=drop"])
def test_an_argument_for_no_model_is_a_clear_error(tmp_path: Path, argument: str) -> None:
    done = run_inspect(tmp_path, "--model", "none", "-M", argument)
    said = " ".join(done.stdout.split())
    assert done.returncode != 0
    assert "TypeError" not in said
    assert "Traceback" not in said
    assert f"takes no -M {argument.partition('=')[0]}=" in said
    assert "--model-role 'ROLE={model: vllm-lens/…, model_args: {capture: …}}'" in said


def test_no_model_without_arguments_is_as_ever(tmp_path: Path) -> None:
    done = run_inspect(tmp_path, "--model", "none", "--model-role", "helper=mockllm/model")
    assert done.returncode == 0, done.stdout
