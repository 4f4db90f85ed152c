"""Arguments of a model that are objects: `get_model` tells them apart, and a log holds them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from inspect_ai import Task, eval, eval_retry, task
from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log
from inspect_ai.model import Model, get_model
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver
from pydantic_core import to_json

from inspect_lens.model._host import PrerequisiteError
from inspect_lens.probe import load_probe
from inspect_lens.spec import SteeringVector, parse_extra_args
from inspect_lens.vector import Vector, load_vector
from tests.kit.fake_server import FakeLensServer

TRUTH = load_vector("organism/truth-resid")


def model(url: str, **arguments: Any) -> Model:
    return get_model("lens/org/tiny", base_url=url, **arguments)


def test_models_with_other_contents_are_other_models(
    server: FakeLensServer, tmp_path: Path
) -> None:
    first, second, again = (
        Vector.from_raw(TRUTH.direction * sign, card=TRUTH.card) for sign in (1, -1, 1)
    )
    made = model(server.url, steer=first)
    assert model(server.url, steer=second) is not made
    assert model(server.url, steer=again) is made
    saved = load_vector(first.save(tmp_path / "saved"))
    assert model(server.url, steer=saved).model_args == {"steer": saved}, "with its path"
    probe = load_probe("organism/deception-lr")
    assert model(server.url, probes=[probe]) is not model(server.url, probes=None)


def _changed(array: Any) -> Any:
    array = copy.deepcopy(array)
    array[-1] = 1
    return array


_EVEN = np.arange(10)[::2]


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        (array, copy.deepcopy(array), _changed(array))
        for array in (np.zeros(5000), torch.zeros(5000, dtype=torch.bfloat16), np.array([None, 2]))
    ]
    + [
        (np.zeros((2, 3)), np.zeros((2, 3)), np.zeros((3, 2))),
        (_EVEN, _EVEN.copy(), np.arange(5)),
        (np.float64(0.5), np.float64(0.5), np.float64(0.25)),
        (*(np.ma.masked_array([1, 2], [False, mask]) for mask in (True, True, False)),),
        (*(pd.Series([[1], [1, last]]) for last in (2, 2, 3)),),
        (*(pd.Series([2**53 + more, 0.5], dtype=object) for more in (1, 1, 0)),),
    ],
    ids=["array", "tensor", "objects", "shape", "strides", "number", "mask", "lists", "mixed"],
)
def test_models_of_any_provider_with_other_arrays_are_other_models(
    server: FakeLensServer, one: Any, same: Any, other: Any
) -> None:
    made, again, another = (
        get_model("vllm/org/tiny", base_url=f"{server.url}/v1", given=given)
        for given in (one, same, other)
    )
    assert again is made
    assert another is not made


@pytest.mark.parametrize(
    "given",
    [
        {"capture": np.int64(1)},
        {"capture": {"layers": [np.int64(1)]}},
        {"edits": [{"op": "ablate", "direction": np.ones(8), "layers": [1]}]},
        {"edits": {"op": "ablate", "direction": torch.ones(8), "layers": [1]}},
        {"stream": np.bool_(True)},
        {"max_model_len": np.int64(64)},
        {"hf_overrides": {"rope_theta": np.float32(1e4)}},
    ],
    ids=["number", "inside", "array", "tensor", "flag", "of the server", "inside of the server"],
)
@pytest.mark.parametrize("memoize", [True, False])
def test_what_a_log_cannot_hold_is_refused(
    server: FakeLensServer, given: dict[str, Any], memoize: bool
) -> None:
    (name,) = given
    model(server.url, **{name: None})  # which is another model
    with pytest.raises(PrerequisiteError, match=rf"-M {name}=(?s:.*)tolist"):
        model(server.url, memoize=memoize, **given)


def test_a_number_of_numpy_that_is_one_of_python_is_logged(server: FakeLensServer) -> None:
    (scale,) = np.linspace(0.5, 1, 1)
    made = model(server.url, steer={"vector": str(TRUTH.path), "scale": scale})
    assert to_json(made.model_args["steer"]).endswith(b'"scale":0.5}')


@solver
def fails_once(flag: str) -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        if not Path(flag).exists():
            Path(flag).touch()
            raise RuntimeError("planted")
        return state

    return solve


@task
def planted(flag: str) -> Task:
    return Task(dataset=[Sample(input="hello")], solver=[generate(), fails_once(flag)])


def test_a_retry_steers_with_the_same_file(server: FakeLensServer, tmp_path: Path) -> None:
    (log,) = eval(
        planted(str(tmp_path / "flag")), model=model(server.url, steer=TRUTH), display="none",
        log_dir=str(tmp_path),
    )  # fmt: skip
    assert log.eval.model_args == {"steer": TRUTH} or log.eval.model_args == {
        "steer": str(TRUTH.path)
    }
    read = read_eval_log(log.location)
    assert read.eval.model_args == {"steer": str(TRUTH.path)}
    (again,) = eval_retry(read, log_dir=str(tmp_path), display="none")
    assert again.status == "success"
    first, second = (parse_extra_args(body["vllm_xargs"]) for body in server.requests)
    assert first is not None
    assert first.edits
    assert second == first


@pytest.mark.parametrize("solvers", [[], [generate()]], ids=["no call", "from the cache"])
def test_what_a_log_refers_to_is_beside_it_whatever_becomes_of_calls(
    server: FakeLensServer, tmp_path: Path, solvers: list[Solver]
) -> None:
    steered = SteeringVector(activations=np.arange(8.0)[None], layer_indices=[1])
    for name in ("first", "second"):
        flag = str(tmp_path / f"{name}-flag")
        (log,) = eval(
            Task(dataset=[Sample(input="hello")], solver=[*solvers, fails_once(flag)]),
            model=model(server.url, steer=steered), cache=True, display="none",
            log_dir=str(tmp_path / name),
        )  # fmt: skip
        assert log.status == "error"
        uri = log.eval.model_args["steer"]["vector"]["uri"]
        assert (tmp_path / name / uri).is_file()
    assert len(server.requests) == len(solvers)


def test_a_retry_says_that_a_vector_was_never_saved(server: FakeLensServer) -> None:
    with pytest.raises(PrerequisiteError, match="never saved"):
        model(server.url, steer={"name": TRUTH.name, "sha256": TRUTH.sha256})
