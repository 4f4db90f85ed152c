from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from inspect_ai.model import ModelOutput, ModelUsage
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer
from inspect_ai.solver import Generate, Solver, TaskState, solver

from inspect_lens.reading import SteeringCell, SteeringCells
from inspect_lens.scorer import dose_response, probe_score
from tests.kit.mock_evals import call, planted_probe, run, scores

PROBE = planted_probe()


@solver
def sweep(cells: list[dict[str, Any]]) -> Solver:
    """What `steering_sweep` leaves behind; a cell with `values` captured them."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        made = []
        for cell in cells:
            fields = dict(cell)
            values = fields.pop("values", None)
            message_id = None
            if values is not None:
                output = call(values, text=fields["completion"])
                message_id = output.message.id
                state.output = output
                state.messages.append(output.message)
                output.message.metadata = dict(output.metadata or {})
                from inspect_lens.model._handle import MESSAGES

                assert message_id is not None
                MESSAGES.put(message_id, output.metadata["activations"])  # type: ignore[index]
            made.append(SteeringCell(message_id=message_id, **fields))
        state.store_as(SteeringCells).cells = made
        state.output = ModelOutput.from_content("mockllm/model", "the last one")
        return state

    return solve


def cell(text: str, scale: float = 0.0, kind: str = "vector", **more: Any) -> dict[str, Any]:
    if kind == "baseline":
        return {"completion": text, "kind": kind}
    return {"completion": text, "scale": scale, "kind": kind, "vector": "v", "layer": 2, **more}


@scorer(metrics=[mean()])
def length() -> Scorer:
    """Letters of the answer, so that effects are known; None for an empty one."""

    async def score(state: TaskState, target: Target) -> Score:
        assert state.messages[-1].text == state.output.completion
        assert state.messages[0].text == "0"
        n = len(state.output.completion)
        return Score(value=n) if n else Score.unscored(reason="no_response")

    return score


def effects(score: Score) -> dict[str, Any]:
    found: dict[str, Any] = (score.metadata or {})["effects"]
    return found


CELLS = [
    cell("ab", kind="baseline"),
    cell("abcd", 1.0),
    cell("abcdef", 2.0),
    cell("a", -1.0),
    cell("abc", 2.0, "random"),
    cell("abcde", 2.0, "random"),
    cell("ab", 2.0, "orthogonal"),
]


def nothing(*_: Any) -> ModelOutput:
    output = ModelOutput.from_content("mockllm/model", "x")
    output.usage = ModelUsage()
    return output


def test_every_cell_is_compared_with_the_baseline(tmp_path: Path) -> None:
    log = run(nothing, dose_response(length()), folder=tmp_path, labels=[0], solver=sweep(CELLS))
    (got,) = scores(log)
    assert effects(got) == {
        "baseline": 2.0,
        "v@2x1": 2.0,
        "v@2x2": 4.0,
        "v@2x-1": -1.0,
        "random:v@2x2": 2.0,  # the mean of 1 and 3
        "orthogonal:v@2x2": 0.0,
        # Through the baseline: (1·2 + 2·4 + (-1)·(-1)) / (1 + 4 + 1).
        "slope:v@2": pytest.approx(11 / 6),
        "beyond:random:v@2x2": 2.0,
        "beyond:orthogonal:v@2x2": 4.0,
    }
    assert got.value == 2.0, "of the unsteered answer"


def test_a_probe_reads_the_activations_of_each_cell(tmp_path: Path) -> None:
    cells = [
        cell("plain", kind="baseline", values=[1.0, 1.0]),
        cell("steered", 2.0, values=[4.0, 6.0]),
    ]
    cells[0]["values"] = [1.0, 1.0]
    log = run(
        nothing, dose_response(probe_score(PROBE, check_model=False)), folder=tmp_path,
        labels=[0], solver=sweep(cells),
    )  # fmt: skip
    (got,) = scores(log)
    assert effects(got) == {"baseline": 1.0, "v@2x2": 4.0, "slope:v@2": 2.0}


def test_a_cell_without_a_score_is_none_and_not_zero(tmp_path: Path) -> None:
    cells = [cell("ab", kind="baseline"), cell("", 1.0), cell("abc", 2.0)]
    log = run(nothing, dose_response(length()), folder=tmp_path, labels=[0], solver=sweep(cells))
    found = effects(scores(log)[0])
    assert (found["v@2x1"], found["slope:v@2"]) == (None, None)
    assert found["v@2x2"] == 1.0


def test_without_a_baseline_it_is_an_error(tmp_path: Path) -> None:
    for cells in ([], [cell("abc", 1.0)]):
        log = run(
            nothing, dose_response(length()), folder=tmp_path, labels=[0], solver=sweep(cells)
        )
        assert log.error is not None
        assert "no baseline among them" in log.error.message
