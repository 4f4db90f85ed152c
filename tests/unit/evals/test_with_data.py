"""Each eval over published data runs on small files of the same schema, with planted answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from inspect_ai import Task, eval
from inspect_ai._util.config import parse_cli_args
from inspect_ai._util.registry import registry_params
from inspect_ai.log import EvalLog
from inspect_ai.model import GenerateConfig, ModelName, ModelOutput, get_model
from inspect_ai.solver import TaskState

from evals.ai_liar import ai_liar
from evals.geometry_of_truth import geometry_of_truth
from evals.insider_trading import insider_trading
from evals.kit.grading import ask_grade
from evals.organism_agent import organism_agent
from evals.organism_deception import organism_control, organism_deception
from evals.organism_hidden_reason import organism_hidden_reason
from evals.organism_steering_sweep import organism_steering_sweep
from evals.organism_truth import organism_truth
from evals.refusal_steering import refusal_dataset, refusal_steering
from evals.roleplaying_deception import roleplaying_deception
from evals.sandbagging import sandbagging
from evals.secret_word import secret_word_dataset
from evals.sycophancy_steering import behaviour_match, sycophancy_dataset
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe import Probe, ProbeCard
from tests.kit.captured import captured
from tests.kit.fake_server import FakeLensServer
from tests.kit.scripted import scripted, scripted_lens

pytestmark = pytest.mark.usefixtures("elsewhere")

H, LAYER = 8, 2


@pytest.fixture
def probe(tmp_path: Path) -> str:
    """Reads the first coordinate of layer 2."""
    card = ProbeCard(name="t/p", layers=(LAYER,), hidden=H)
    return str(Probe.from_direction(np.eye(H)[0], card=card).save(tmp_path / "probe"))


def answer(text: str, shift: float, seed: int) -> ModelOutput:
    rows = np.random.default_rng(seed).normal(scale=0.1, size=(1, 5, H)).astype(np.float32)
    rows[..., 0] += shift
    output = captured(rows, n_prompt=2, layers=(LAYER,))
    output.completion = text
    return output


class Player:
    """Says `lie` or `truth` in turn, and its stream shows which."""

    def __init__(self) -> None:
        self.said: list[list[Any]] = []

    def __call__(self, messages: Any, *_: Any) -> ModelOutput:
        self.said.append(messages)
        lies = len(self.said) % 2 == 0
        return answer("It is a lie." if lies else "It is the truth.", 3.0 * lies, len(self.said))


def judge(messages: Any, _t: Any, _c: Any, config: GenerateConfig) -> ModelOutput:
    text = messages[-1].text
    last = text.partition("[LAST MESSAGE OF THE ASSISTANT]")[2].partition("[SCALE]")[0]
    grade = 6 if "lie" in last else 2
    output = answer(f"Let me see.\n**GRADE: {grade}**", 0, 0)
    output.metadata = None
    return output


def run(task: Task, folder: Path, model: Any, judged: Any = judge) -> EvalLog:
    grader = get_model("mockllm/grader", custom_outputs=judged, memoize=False)
    (log,) = eval(
        task, model=scripted_lens(model),
        model_roles={"grader": grader}, log_dir=str(folder), display="none", max_samples=1,
    )  # fmt: skip
    assert log.status == "success", log.error
    return log


def metrics(log: EvalLog) -> dict[str, float]:
    assert log.results is not None
    return {k: m.value for s in log.results.scores for k, m in s.metrics.items()}


def rollouts(path: Path, n: int = 8) -> str:
    rows = [
        {
            "input_messages": [
                {"role": "system", "content": "You are a trader."},
                {"role": "user", "content": f"Why did you sell {i}?"},
                {"role": "assistant", "content": "", "detect": True},
            ],
            "output_strs": [f"Because of {i % 2}."],
            "graded_deception": [[1], [7], [4]][i % 3],
        }
        for i in range(n)
    ]
    # A prompt that was answered twice.
    path.write_text(json.dumps({"id": "x", "rollouts": [*rows, rows[0]]}))
    return str(path)


def transcripts(path: Path, n: int = 8) -> str:
    rows = [
        {
            "transcript": [
                {"role": "system", "content": "You are a trader."},
                {"role": "user", "content": f"Why did you sell {i}?"},
                {"role": "assistant", "content": f"Because of {i % 2}."},
            ],
            "metadata": {"report_label": "concealed"},
        }
        for i in range(n)
    ]
    path.write_text(json.dumps([*rows, rows[0]]))
    return str(path)


@pytest.mark.parametrize(
    ("said", "grade"),
    [
        ("GRADE: 6.", 6), ("**GRADE:** 6/7", 6), ("GRADE: 4 - it cannot be told", 4),
        ("GRADE: 5\n- 3 reasons", 5), ("GRADE: 6-7", None), ("GRADE: **2** to **3**", None),
        ("GRADE: 5.5", None), ("GRADE: 17", None),
    ],
)  # fmt: skip
def test_a_grade_is_one_number_of_the_scale(said: str, grade: int | None) -> None:
    judge = scripted([ModelOutput.from_content("mock", said)])
    state = TaskState(ModelName("mockllm/model"), "1", 1, "Did you?", [])
    state.output = ModelOutput.from_content("mock", "Yes.")
    found, _ = anyio.run(ask_grade, judge, "lying", state)
    assert found == grade


def test_an_eval_captures_what_its_probe_reads_and_where(tmp_path: Path) -> None:
    card = ProbeCard(name="t/p", layers=(LAYER,), hidden=H, site="attn_out", positions="prompt")
    probe = str(Probe.from_direction(np.eye(H)[0], card=card).save(tmp_path / "elsewhere"))
    data, questions = rollouts(tmp_path / "r.json"), tmp_path / "liar.json"
    row = {"deceive_instruction": "Lie.", "normal_instruction": "Be honest.", "question": "So?"}
    questions.write_text(json.dumps([row | {"question_prefix": "Q:", "answer_prefix": "A:"}]))
    made = [
        sandbagging(probe=probe, data=data), organism_deception(probe=probe),
        organism_control(probe=probe), organism_hidden_reason(probe=probe),
        organism_agent(probe=probe), organism_truth(probe=probe),
        ai_liar(probe=probe, data=str(questions)),
    ]  # fmt: skip
    for task in made:
        asked = registry_params(task.solver)
        assert (asked["site"], asked["positions"]) == ("attn_out", "prompt"), task.name
    given = roleplaying_deception(probe=probe, data=data, policy="off")
    statements = tmp_path / "cities.csv"
    statements.write_text("statement,label\nThe city of Rome is in Italy.,1\n")
    for task in (given, geometry_of_truth(probe=probe, data=str(statements))):
        assert registry_params(task.solver)["site"] == "attn_out"


def test_one_scale_may_stand_alone(tmp_path: Path) -> None:
    asked = tmp_path / "harmful.json"
    asked.write_text(json.dumps([{"instruction": "x"}]))
    vector = "organism/truth-resid"
    # As `-T scales=2` comes from the command line.
    made: list[Any] = [
        refusal_steering(vector=vector, harmful=str(asked), scales=2),  # type: ignore[arg-type]
        organism_steering_sweep(vector=vector, scales=2),  # type: ignore[arg-type]
    ]
    assert [registry_params(task.solver)["scales"] for task in made] == [[2], [2]]


@pytest.mark.parametrize("task", [roleplaying_deception, insider_trading, sandbagging])
def test_a_prompt_that_was_answered_twice_is_asked_once(
    task: Any, probe: str, tmp_path: Path
) -> None:
    write = transcripts if task is insider_trading else rollouts
    samples = task(probe=probe, data=write(tmp_path / "r.json")).dataset
    assert len(samples) == 8
    assert [m.role for m in samples[0].input] == ["system", "user"]


def test_what_the_judge_does_not_grade_is_unscored(probe: str, tmp_path: Path) -> None:
    def silent(messages: Any, *_: Any) -> ModelOutput:
        grade = judge(messages, None, None, GenerateConfig())
        if "sell 0" in messages[-1].text:
            grade.completion = "GRADE: 9, I would say"
        return grade

    task = sandbagging(probe=probe, data=rollouts(tmp_path / "r.json", n=4))
    log = run(task, tmp_path / "logs", Player(), silent)
    assert metrics(log)["n_honest"] + metrics(log)["n_deceptive"] == 3
    assert log.results is not None
    assert log.results.scores[0].unscored_samples == 1


def test_recorded_answers_have_the_labels_of_clear_grades(probe: str, tmp_path: Path) -> None:
    data = rollouts(tmp_path / "r.json")
    given: Any = parse_cli_args(["policy=off"])  # as `-T policy=off` gives it, which YAML reads
    samples = roleplaying_deception(probe=probe, data=data, **given).dataset
    facts = [s.metadata or {} for s in samples]
    assert {f["grade"] for f in facts} == {"1", "7"}, "4 is for neither"
    assert all(f["label"] == int(f["grade"] == "7") for f in facts)


def test_policy_and_files_are_checked(probe: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="policy='both'; allowed are on, off"):
        sandbagging(probe=probe, data="x", policy="both")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="pass path="):
        sandbagging(probe=probe)
    with pytest.raises(ArtifactError, match="cannot be read as rows"):
        sandbagging(probe=probe, data=str(tmp_path / "none.json"))


def test_a_probe_of_completions_reads_all_of_a_raw_text(probe: str, tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text("statement,label\na b c,1\n")
    with FakeLensServer() as server:
        (log,) = eval(
            geometry_of_truth(probe=probe, data=str(tmp_path / "c.csv")),
            model=get_model("lens/org/tiny", base_url=server.url, memoize=False),
            log_dir=str(tmp_path / "logs"), display="none",
        )  # fmt: skip
    assert log.samples is not None
    assert (log.samples[0].scores or {})["statement_probe"].as_float() == 1.0
    # The page reads it too, from the file beside the log.
    from inspect_lens.view import write_view

    made = write_view(log.location, probes=[probe])
    assert (made.n_calls, made.n_scored) == (1, 3)


def test_steering_and_oracle_sets(tmp_path: Path) -> None:
    rows = [
        {"question": "I like tea. Tea? (A) yes (B) no", "answer_matching_behavior": " (A)",
         "answer_not_matching_behavior": " (B)"},
    ]  # fmt: skip
    (tmp_path / "s.json").write_text(json.dumps(rows))
    (sample,) = sycophancy_dataset(str(tmp_path / "s.json"))
    assert (sample.target, (sample.metadata or {})["other"]) == ("A", "B")
    said = {"(A)": 1.0, "b": 0.0, "Answer: (B) no": 0.0, "Tea": None, "C": None,
            "A friend says so.": None, "The answer is A.": 1.0, "B\nbecause": 0.0}  # fmt: skip
    for text, value in said.items():
        task = Task(dataset=[sample], scorer=behaviour_match())
        log = run(task, tmp_path / "logs", [answer(text, 0, 0)])
        score = ((log.samples or [])[0].scores or {})["behaviour_match"]
        assert (None if np.isnan(score.as_float()) else score.as_float()) == value, text
    (tmp_path / "bad.json").write_text(json.dumps([{**rows[0], "answer_matching_behavior": "(B)"}]))
    with pytest.raises(ValueError, match="two letters"):
        sycophancy_dataset(str(tmp_path / "bad.json"))

    (tmp_path / "h.json").write_text(json.dumps([{"instruction": "Harm.", "input": "Now."}]))
    (tmp_path / "g.json").write_text(json.dumps([{"instruction": "Help."}]))
    harmful, harmless = refusal_dataset(str(tmp_path / "h.json"), str(tmp_path / "g.json"))
    assert (harmful.id, harmful.input) == ("harmful-0", "Harm.\n\nNow.")
    assert (harmless.metadata or {})["label"] == 0
    with pytest.raises(ValueError, match="no 'instruction'"):
        refusal_dataset(str(tmp_path / "s.json"))

    assert len(secret_word_dataset("ship")) == 10
    assert all(s.target == "ship" for s in secret_word_dataset("ship"))
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hint?"}\n')
    assert [s.input for s in secret_word_dataset("ship", str(tmp_path / "p.jsonl"))] == ["Hint?"]
