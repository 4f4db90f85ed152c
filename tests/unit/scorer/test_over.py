"""Which calls of a sample count: the last, or all, with every choice, and of ended samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai.log import EvalLog
from inspect_ai.model import ChatMessageUser, ModelOutput, get_model
from inspect_ai.scorer import Scorer
from inspect_ai.solver import Generate, Solver, TaskState, solver

from inspect_lens.collect import log_to_store
from inspect_lens.model import activations
from inspect_lens.reading import ProbeReader, read_sample_captured, read_token_scores
from inspect_lens.scorer import (
    monitor_alarm,
    probe_cascade,
    probe_ensemble,
    probe_score,
)
from tests.kit.mock_evals import call, judge, planted_probe, run, scores

PROBE = planted_probe()  # its threshold is 2.5, the mean over a turn

HONEST = [[0.0, 1.0], [2.0, 2.0, 1.0], [0.5]]
LIE_IN_THE_SECOND = [[0.0, 1.0], [7.0, 8.0, 9.0], [0.5]]


@solver
def turns(n: int, ends: bool = False) -> Solver:
    """An agent: n calls. One that ends loses its sample to a limit, before it has an answer."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        for i in range(n):
            if i:
                state.messages.append(ChatMessageUser(content=f"go on {i}"))
            output = await get_model().generate(state.messages)
            state.messages.append(output.message)
            if not ends:
                state.output = output
        return state

    return solve


def talk(said: Sequence[Sequence[Sequence[float]]], folder: Path | None = None) -> Any:
    """Sample i has these values in its turns."""

    def reply(messages: Any, *_: Any) -> ModelOutput:
        turn = sum(m.role == "assistant" for m in messages)
        return call(said[int(messages[0].text)][turn], text=f"turn {turn}", folder=folder)

    return reply


def watched(folder: Path, scorer: Scorer | list[Scorer], **options: Any) -> EvalLog:
    return run(
        talk([HONEST, LIE_IN_THE_SECOND], folder), scorer, folder=folder, labels=[0, 1],
        solver=turns(3, **options),
    )  # fmt: skip


def test_over_all_turns_a_false_positive_is_as_many_times_as_likely(tmp_path: Path) -> None:
    (_, lying) = scores(watched(tmp_path, probe_score(PROBE, over="all")))
    facts = lying.metadata or {}
    assert (facts["fpr"], facts["fpr_bound"]) == (0.01, pytest.approx(0.03))
    assert "turn 1" in str(lying.explanation)


def test_the_judge_of_a_cascade_reads_the_turn_that_was_found_and_what_came_before_it(
    tmp_path: Path,
) -> None:
    heard: list[str] = []
    cascade = probe_cascade(
        PROBE, "It is a lie.", band=(5.0, 9.0), unit="score", judge=judge("90", heard=heard),
        over="all",
    )  # fmt: skip
    (_, lying) = scores(watched(tmp_path, cascade))
    assert lying.value == 0.9
    assert (lying.metadata or {})["turn"] == 1
    assert "turn 1" in heard[0]
    assert "go on 1" in heard[0]
    assert "go on 2" not in heard[0]


def choices(*values: Sequence[float]) -> ModelOutput:
    """A call with several answers, each with activations of its own."""
    made = [call(one, text=f"choice {i}") for i, one in enumerate(values)]
    first = made[0]
    for other in made[1:]:
        message = other.choices[0].message
        message.metadata = {"activations": activations(other)}
        first.choices.append(other.choices[0])
    return first


def test_every_choice_is_read_or_refused(tmp_path: Path) -> None:
    three = [choices([0.0, 2.0], [5.0, 7.0], [1.0])]
    log = run(three, [probe_score(PROBE, over="all"), monitor_alarm(PROBE)], folder=tmp_path)
    (found,) = scores(log, "probe_score")
    assert found.value == 6.0
    facts = found.metadata or {}
    assert (facts["turn"], facts["choice"], facts["turn_values"]) == (0, 1, [1.0, 6.0, 1.0])
    assert facts["message_id"] == three[0].choices[1].message.id
    assert [len(r.scores) for r in read_token_scores(found)] == [2, 2, 1]
    (alarm,) = scores(log, "monitor_alarm")
    assert alarm.value == 1

    refused = run([choices([0.0], [5.0])], probe_score(PROBE), folder=tmp_path)
    assert refused.status == "error"
    assert "num_choices=2" in str(refused.error)
    assert refused.error is not None
    assert "over='all'" in refused.error.message


def test_a_sample_that_was_ended_without_an_answer_stays_in_the_metrics(tmp_path: Path) -> None:
    made = [probe_score(PROBE), probe_ensemble({"a": str(PROBE.save(tmp_path / "p"))}, "vote")]
    log = watched(tmp_path, made, ends=True)
    first = scores(log, "probe_score")
    assert [one.reason for one in first] == [None, None]
    assert [one.value for one in first] == [0.5, 0.5]
    assert not np.isnan(metric(log, "auroc"))
    # Where no call was made there is nothing to read.
    (none,) = scores(run([call([1.0])], probe_score(PROBE), folder=tmp_path, solver=turns(0)))
    assert none.reason == "no_tokens"
    assert none.explanation == "No call of the model or the roles that are read."


@solver
def consults(other: Any) -> Solver:
    """Two calls, and between them one of a model that is neither the eval's nor of a role."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        for i in range(2):
            state.output = await get_model().generate(state.messages)
            state.messages.append(state.output.message)
            if not i:
                said = await other.generate("What next?")
                state.messages.append(ChatMessageUser(content=said.completion))
        return state

    return solve


def test_a_log_has_the_calls_of_the_eval_s_model_too(tmp_path: Path) -> None:
    log = run(
        talk([LIE_IN_THE_SECOND], tmp_path), probe_score(PROBE, over="all"), folder=tmp_path,
        labels=[1], solver=consults(judge("go on")),
    )  # fmt: skip
    (found,) = scores(log)
    assert (found.metadata or {})["n_turns"] == 2
    assert log.samples is not None
    read = read_sample_captured(ProbeReader.of(PROBE, over="all"), log.samples[0])
    assert [one.reading.value for one in read.read] == (found.metadata or {})["turn_values"]
    assert len(log_to_store(log, tmp_path / "acts", over="all")) == 2


@solver
def asks_only(other: Any) -> Solver:
    """Two calls of a model in no role, and none of the eval's."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        for _ in range(2):
            state.output = await other.generate(state.messages)
            state.messages.append(state.output.message)
        return state

    return solve


def test_where_the_eval_s_model_made_no_call_the_one_that_answered_is_read(tmp_path: Path) -> None:
    talks = talk([LIE_IN_THE_SECOND], tmp_path)
    other = get_model("mockllm/other", custom_outputs=talks, memoize=False)
    log = run(
        talks, probe_score(PROBE, over="all"), folder=tmp_path, labels=[1],
        solver=asks_only(other),
    )  # fmt: skip
    (found,) = scores(log)
    assert (found.metadata or {})["n_turns"] == 2
    assert len(log_to_store(log, tmp_path / "acts", over="all")) == 2


def metric(log: EvalLog, name: str) -> float:
    assert log.results is not None
    return log.results.scores[0].metrics[name].value
