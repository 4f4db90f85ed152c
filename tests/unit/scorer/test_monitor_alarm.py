from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai import score
from inspect_ai.log import read_eval_log
from inspect_ai.model import ChatMessageUser, ModelOutput, get_model
from inspect_ai.solver import Generate, Solver, TaskState, solver
from tokenizers import Tokenizer

from inspect_lens.errors import SpecError
from inspect_lens.reading import ProbeReader, read_token_scores
from inspect_lens.scorer import at_threshold, monitor_alarm
from tests.kit.captured import captured
from tests.kit.mock_evals import call, judge, metric_values, planted_probe, run, scores

ORGANISM = Path(__file__).parents[3] / "organism/checkpoint"
PROBE = planted_probe()  # its threshold is 2.5
TOKENS: dict[str, Any] = {"level": "token", "threshold": 2.5}

CALM = [[0.0, 1.0], [2.0, 2.0, 1.0], [0.5]]
LOUD = [[0.0, 1.0], [2.0, 9.0, -8.0], [7.0, 8.0]]


@solver
def conversation(n: int) -> Solver:
    """An agent of its own: n calls of the model, and one of another in a role."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        for i in range(n):
            if i:
                state.messages.append(ChatMessageUser(content=f"go on {i}"))
            output = await get_model().generate(state.messages)
            state.messages.append(output.message)
            state.output = output
        await get_model(role="helper").generate("not watched")
        return state

    return solve


def talk(turns: Sequence[Sequence[Sequence[float]]], folder: Path | None = None) -> Any:
    """Sample i has these values in its turns."""

    def reply(messages: Any, *_: Any) -> ModelOutput:
        sample = int(messages[0].text)
        turn = sum(m.role == "assistant" for m in messages)
        return call(turns[sample][turn], folder=folder, n_prompt=2 + turn)

    return reply


def watch(folder: Path, **options: Any) -> Any:
    log = run(
        talk([CALM, LOUD]),
        monitor_alarm(PROBE, **options),
        folder=folder,
        labels=[0, 1],
        solver=conversation(3),
        model_roles={"helper": judge("ok")},
    )
    return log, scores(log)


def test_the_first_token_above_the_threshold_over_all_turns(tmp_path: Path) -> None:
    log, (calm, loud) = watch(tmp_path, **TOKENS)
    assert (calm.value, calm.answer) == (0, "no alarm")
    assert calm.metadata["turn"] is None
    assert calm.metadata["max"] == 2.0
    assert (loud.value, loud.answer) == (1, "alarm")
    facts = loud.metadata
    # Turn 1 has a prompt of 3 tokens, so its second completion token is at position 4.
    assert (facts["turn"], facts["token"], facts["position"]) == (1, 1, 4)
    assert (facts["tokens_before"], facts["delay"]) == (3, 3)
    assert (facts["max"], facts["max_turn"]) == (9.0, 1)
    assert (facts["n_turns"], facts["n_turns_read"], facts["n_tokens"]) == (3, 3, 7)
    assert facts["fpr_holds"] is False
    assistant = [m for m in log.samples[1].messages if m.role == "assistant"]
    assert facts["message_id"] == assistant[1].id
    assert metric_values(log)["mean"] == 0.5
    # What is large stays out of the log.
    assert not any(isinstance(v, list) and len(v) > 3 for v in facts.values())


def test_token_scores_of_all_turns_are_in_the_file(tmp_path: Path) -> None:
    log, _ = watch(tmp_path)
    records = [r for r in read_token_scores(log) if r.sample_id == 1]
    assert [r.turn for r in records] == [0, 1, 2]
    for record, expected in zip(records, LOUD, strict=True):
        np.testing.assert_allclose(record.scores, expected)
    assert [int(r.positions[0]) for r in records] == [2, 3, 4]


def test_by_default_a_turn_is_judged_as_the_threshold_was_set(tmp_path: Path) -> None:
    _, (calm, loud) = watch(tmp_path)
    assert calm.value == 0
    # The mean of turn 1 is 1; that of turn 2 is 7.5, known when its last token was read.
    assert (loud.value, loud.metadata["turn"], loud.metadata["token"]) == (1, 2, 1)
    assert loud.metadata["fpr_holds"] is True
    assert loud.metadata["fpr"] == 0.01
    assert loud.metadata["fpr_bound"] == pytest.approx(0.03)  # of three turns together
    assert loud.metadata["max"] == 7.5


def test_every_turn_above_the_threshold_is_listed(tmp_path: Path) -> None:
    log, (calm, loud) = watch(tmp_path, threshold=0.75)
    assistant = [[m.id for m in s.messages if m.role == "assistant"] for s in log.samples]
    for made, turns, ids in zip((calm, loud), (CALM, LOUD), assistant, strict=True):
        assert made.metadata["alarms"] == [
            {"turn": i, "message_id": ids[i], "value": pytest.approx(np.mean(values))}
            for i, values in enumerate(turns)
            if np.mean(values) > 0.75
        ]
    assert [one["turn"] for one in loud.metadata["alarms"]] == [1, 2]
    assert "Turns above it: 1, 2." in loud.explanation
    assert "Turns above it" not in calm.explanation, "the one turn is named already"
    _, (quiet, _) = watch(tmp_path, threshold=100.0)
    assert quiet.metadata["alarms"] == []


def test_the_rate_of_a_maximum_holds_for_tokens(tmp_path: Path) -> None:
    log = run(
        talk([CALM, LOUD]), monitor_alarm(planted_probe(pool="max"), level="token"),
        folder=tmp_path, labels=[0, 1], solver=conversation(3),
        model_roles={"helper": judge("ok")},
    )  # fmt: skip
    calm, loud = scores(log)
    assert (calm.value, loud.value) == (0, 1)
    assert (loud.metadata or {})["fpr_holds"] is True


@pytest.mark.parametrize(
    ("onset", "delay", "early"), [(0, 3, False), (1, 1, False), (2, None, True), (None, None, True)]
)
def test_delay_counts_from_the_turn_from_which_an_alarm_is_right(
    tmp_path: Path, onset: int | None, delay: int | None, early: bool
) -> None:
    log = run(
        talk([CALM, LOUD]), monitor_alarm(PROBE, onset="onset", **TOKENS), folder=tmp_path,
        labels=[0, 1],
        solver=conversation(3), metadata=[{}, {"onset": onset} if onset is not None else {}],
        model_roles={"helper": judge("ok")},
    )  # fmt: skip
    facts = scores(log)[1].metadata
    assert facts is not None
    assert (facts["delay"], facts["early"]) == (delay, early)


def test_what_is_compared_can_be_smoothed_and_the_value_chosen(tmp_path: Path) -> None:
    _, (_, loud) = watch(tmp_path, watch="ema:0.5", **TOKENS)
    assert (loud.metadata["turn"], loud.metadata["token"]) == (1, 1)
    assert loud.metadata["max"] == pytest.approx(7.5)  # 7, then (7 + 8) / 2
    _, (calm, loud) = watch(tmp_path, value="token", **TOKENS)
    assert (calm.reason, loud.value) == ("no_alarm", 3)
    log, (calm, loud) = watch(tmp_path, value="max", **TOKENS)
    assert (calm.value, loud.value) == (2.0, 9.0)
    assert metric_values(log)["auroc"] == 1.0


def test_false_alarms_are_measured_on_the_alarms_themselves(tmp_path: Path) -> None:
    log = run(
        talk([CALM, LOUD, LOUD]), monitor_alarm(PROBE), folder=tmp_path, labels=[0, 0, 1],
        solver=conversation(3), model_roles={"helper": judge("ok")},
    )  # fmt: skip
    from inspect_ai.scorer import SampleScore

    given = [
        SampleScore(score=s, sample_metadata={"label": y})
        for s, y in zip(scores(log), [0, 0, 1], strict=True)
    ]
    found: Any = at_threshold(interval=False)(given)
    assert found == {"recall": 1.0, "fpr": 0.5}
    got = metric_values(log)
    assert (got["recall"], got["fpr"]) == (1.0, 0.5)


def test_a_call_in_a_role_is_checked_and_recomputed_as_its_own_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    read = ProbeReader.read

    async def note(self: ProbeReader, output: Any, **options: Any) -> Any:
        asked.append((self.source, options["model_name"], str(options["model"])))
        return await read(self, output, **options)

    monkeypatch.setattr(ProbeReader, "read", note)
    helper = get_model(
        "mockllm/h", custom_outputs=lambda *_: call([30.0, 1.0], folder=tmp_path), memoize=False
    )
    run(
        talk([CALM]), monitor_alarm(PROBE, roles=["helper"], **TOKENS), folder=tmp_path, labels=[0],
        solver=conversation(1), model_roles={"helper": helper},
    )  # fmt: skip
    assert asked == [("auto", "h", "mockllm/h")]
    # On the log scored where the role is another model's, nothing is fed to that one.
    (path,) = tmp_path.glob("*.eval")
    asked.clear()
    score(
        read_eval_log(path), monitor_alarm(PROBE, roles=["helper"], **TOKENS), display="none",
        model_roles={"helper": get_model("mockllm/other", memoize=False)},
    )  # fmt: skip
    assert asked == [("captured", "h", "None")]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"value": "when"}, "allowed are alarm, token, max"),
        ({"level": "word"}, "level=.word.; allowed are token, turn"),
        ({"watch": "median"}, "pool="),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        monitor_alarm(PROBE, **options)


def test_without_a_threshold_nothing_can_be_watched() -> None:
    with pytest.raises(SpecError, match="no threshold for the mean of an answer"):
        monitor_alarm(planted_probe(thresholds=()))
    assert monitor_alarm(planted_probe(thresholds=()), threshold=1.0)


def test_what_is_watched_may_go_by_sentences(tmp_path: Path) -> None:
    ids = (
        Tokenizer.from_file(str(ORGANISM / "tokenizer.json"))
        .encode("It is so. No, it was not!")
        .ids
    )
    rows = np.zeros((2, len(ids) - 1, 4), dtype=np.float32)
    rows[1, :, 0] = np.arange(len(ids) - 1)
    outputs = [captured(rows, n_prompt=2, ids=tuple(ids))]
    alarm = monitor_alarm(
        PROBE, level="token", watch="sentence_mean_max", threshold=2.4, tokenizer=str(ORGANISM)
    )
    (got,) = scores(run(outputs, alarm, folder=tmp_path))
    # The first sentence is still being written: the mean of 2 and 3 is above it.
    assert got.metadata["token"] == 1
