"""Rates of variants and their differences, of cells whose values are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai.model import ModelOutput, ModelUsage
from inspect_ai.scorer import SampleScore, Score
from inspect_ai.solver import Generate, Solver, TaskState, solver

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe import clopper_pearson
from inspect_lens.reading import SteeringCell, SteeringCells
from inspect_lens.reading._stored import CellScores
from inspect_lens.scorer import dose_metric, dose_response, dose_table, refusal_rate
from tests.kit.mock_evals import run, scores

Row = tuple[str, str | None, float, float | None]
"""Kind, name, dose and value."""


def sample(name: str, *rows: Row) -> SampleScore:
    cells = [
        [kind, None, dose, value, variant, value is None] for kind, variant, dose, value in rows
    ]
    return SampleScore(score=Score(value=0.0, metadata={"cells": cells}), sample_id=name)


def rates(*samples: SampleScore) -> dict[str, float]:
    compute: Any = dose_metric(n_resamples=400)
    found = compute(list(samples))
    assert isinstance(found, dict)
    return found


def refusals(
    name: str, base: float, ablated: float | None, control: float | None = None
) -> SampleScore:
    return sample(
        name, ("baseline", None, 0.0, base), ("vector", "ablated", 1.0, ablated),
        ("random", "ablated", 1.0, base if control is None else control),
    )  # fmt: skip


def test_a_variant_has_its_rate_and_its_difference_from_the_same_prompts() -> None:
    samples = [refusals(str(i), float(i < 8), float(i < 2)) for i in range(10)]
    found = rates(*samples)
    assert found["unedited"] == 0.8
    assert found["ablated"] == pytest.approx(0.2)
    assert found["ablated_effect"] == pytest.approx(-0.6)
    # Paired: six of ten prompts change by -1 and four by nothing.
    changes = np.array([-1.0] * 6 + [0.0] * 4)
    rng = np.random.default_rng(1)
    drawn = rng.choice(changes, size=(20_000, 10)).mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    assert found["ablated_effect_low"] == pytest.approx(low, abs=0.05)
    assert found["ablated_effect_high"] == pytest.approx(high, abs=0.05)
    assert found["ablated_random_effect"] == 0.0
    edge = 1.0 - clopper_pearson(10, 10).low
    ends = [found[f"ablated_random_effect_{end}"] for end in ("low", "high")]
    assert ends == pytest.approx([-edge, edge]), "ten alike are no certainty"
    assert found["ablated_coherence"] == 1.0


def test_answers_without_a_value_are_left_out_with_their_prompt() -> None:
    found = rates(
        refusals("a", 1.0, None), refusals("b", 1.0, 0.0), refusals("c", 0.0, 0.0, control=1.0)
    )
    assert found["unedited"] == pytest.approx(2 / 3)
    assert found["ablated"] == 0.0
    assert found["ablated_effect"] == pytest.approx(-0.5), "of b and c alone"
    assert found["ablated_coherence"] == pytest.approx(2 / 3)
    assert found["ablated_random_effect"] == pytest.approx(1 / 3)
    nobody = rates(refusals("a", 1.0, None), refusals("b", 1.0, None))
    assert nobody.keys() == {"unedited", "ablated_coherence", "ablated_random_effect"}
    assert rates() == {"broken": 0.0}


def test_doses_are_told_apart_and_a_latent_that_is_off_has_an_effect() -> None:
    doses = (-1.0, 0.0, 2.5)
    made = [
        sample(
            name, ("baseline", None, 0.0, 1.0),
            *(("vector", "clamped", dose, float(dose > 0)) for dose in doses),
            *(("random", "clamped", dose, value) for dose in doses for value in (1.0, 0.0)),
        )
        for name in "abc"
    ]  # fmt: skip
    found = rates(*made)
    effects = [found[f"clamped x{dose:g}_effect"] for dose in doses]
    assert effects == [-1.0, -1.0, 0.0]
    assert [found[f"clamped x{dose:g}"] for dose in doses] == [0.0, 0.0, 1.0]
    # Of several controls the mean, paired with the prompt.
    assert {found[f"clamped x{dose:g}_random_effect"] for dose in doses} == {-0.5}
    table = dose_table(made, n_resamples=50)
    assert [(r.scale, r.mean) for r in table if r.kind == "vector"] == [
        (-1.0, 0.0), (0.0, 0.0), (2.5, 1.0),
    ]  # fmt: skip


def test_controls_of_several_kinds_stand_apart() -> None:
    rows: list[Row] = [("baseline", None, 0.0, 0.0), ("vector", "v", 1.0, 1.0)]
    rows += [("random", "v", 1.0, 0.25), ("orthogonal", "v", 1.0, 0.5)]
    found = rates(sample("a", *rows), sample("b", *rows))
    assert (found["v_random_effect"], found["v_orthogonal_effect"]) == (0.25, 0.5)


def nothing(*_: Any) -> ModelOutput:
    output = ModelOutput.from_content("mockllm/model", "x")
    output.usage = ModelUsage()
    return output


@solver
def cells(values: list[float] | None = None) -> Solver:
    """What `steering_sweep` leaves of one prompt that is refused, and not without a direction."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state.output = nothing()
        state.output.completion = "I cannot do that."
        state.store_as(SteeringCells).cells = [
            SteeringCell(kind="baseline", completion="I cannot do that."),
            SteeringCell(kind="vector", vector="ablated", scale=1.0, completion="Sure."),
            SteeringCell(kind="random", vector="ablated", scale=1.0, completion="I can't."),
        ]
        if values is not None:
            state.store_as(CellScores).values = list(values)
        return state

    return solve


def test_a_sample_has_the_value_of_its_unedited_answer(tmp_path: Path) -> None:
    log = run(nothing, dose_response(refusal_rate()), folder=tmp_path, labels=[0], solver=cells())
    (got,) = scores(log)
    assert (got.value, got.answer) == (1.0, "I cannot do that.")
    effects = (got.metadata or {})["effects"]
    assert effects["ablated@allx1"] == -1.0
    assert effects["random:ablated@allx1"] == 0.0
    assert effects["beyond:random:ablated@allx1"] == -1.0


def test_values_of_the_sweep_itself_are_taken_or_missed(tmp_path: Path) -> None:
    given = cells([0.5, 0.25, 0.75])
    (got,) = scores(run(nothing, dose_response(), folder=tmp_path, labels=[0], solver=given))
    assert got.value == 0.5
    assert (got.metadata or {})["effects"]["random:ablated@allx1"] == 0.25
    log = run(nothing, dose_response(), folder=tmp_path, labels=[0], solver=cells())
    assert log.error is not None
    assert "0 values for 3 cells" in log.error.message
    assert "pass a scorer to dose_response" in log.error.message


def test_without_a_value_of_the_unedited_answer_there_is_no_score(tmp_path: Path) -> None:
    nan = float("nan")
    given = cells([nan, 1.0, 0.0])
    log = run(nothing, dose_response(), folder=tmp_path, labels=[0], solver=given)
    (got,) = scores(log)
    assert got.reason == "no_values"


def test_a_sample_without_cells_is_refused(tmp_path: Path) -> None:
    log = run(nothing, dose_response(refusal_rate()), folder=tmp_path, labels=[0])
    assert log.error is not None
    assert ArtifactError.__name__ in log.error.traceback
    assert "put steering_sweep(...) before dose_response" in log.error.message


def test_no_effect_is_reported_at_a_floor_or_a_ceiling(caplog: pytest.LogCaptureFixture) -> None:
    """A model that refuses 0 of 12 says nothing about what its refusal direction does."""
    for rate in (0.0, 1.0):
        caplog.clear()
        made = [refusals(str(i), rate, rate) for i in range(12)]
        found = rates(*made)
        assert found == {"unedited": rate, "ablated": rate, "ablated_coherence": 1.0}
        assert f"all unedited answers to 12 prompts have the value {rate:g}" in caplog.text
        for row in dose_table(made, n_resamples=50):
            assert (row.interval, row.usable, bool(row.unseen)) == (None, False, True)
            assert np.isnan(row.effect)
    # One answer that changes can be seen, and then a control that changes none says something.
    made = [refusals(str(i), 0.0, float(i == 0), control=0.0) for i in range(12)]
    vector, control = dose_table(made, n_resamples=50)
    assert (vector.effect, vector.usable, vector.unseen) == (pytest.approx(1 / 12), True, "")
    assert (control.effect, control.unseen) == (0.0, "")


def test_rows_of_harmful_and_of_harmless_prompts_stand_apart() -> None:
    made = []
    for i in range(8):
        part = refusals(str(i), float(i < 4), 0.0)
        part.sample_metadata = {"kind": "harmful" if i < 4 else "harmless"}
        made.append(part)
    pooled = next(r for r in dose_table(made, n_resamples=50) if r.kind == "vector")
    assert pooled.effect == -0.5
    apart = {
        r.of: r.effect for r in dose_table(made, by="kind", n_resamples=50) if r.kind == "vector"
    }
    assert apart["harmful"] == -1.0
    assert np.isnan(apart["harmless"]), "nothing was refused, so nothing less could be"
    with pytest.raises(SpecError, match="by='type': the metadata of sample 0 has"):
        dose_table(made, by="type")
