"""Solvers and the scorer in an eval on the fake server, and the log scored again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.event import InfoEvent
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.model import GenerateConfig, Model, ModelOutput, ModelUsage, get_model
from inspect_ai.solver import Solver, generate

from inspect_lens.model import read_activations
from inspect_lens.scorer import oracle_answer
from inspect_lens.solver import activation_oracle, with_capture
from tests.kit.fake_server import FakeLensServer

QUESTION = "Is it a lie?"
STEERED, PLAIN = "steered word00 word01 word02", "word00 word01 word02"


def asked(server: FakeLensServer) -> list[dict[str, Any]]:
    """Chat requests that went to the adapter."""
    return [r for r in server.requests if r["model"] != server.model and "messages" in r]


def run_task(model: Model, folder: Path, solver: Any, scorer: Any = None) -> EvalLog:
    task = Task(
        dataset=[
            Sample(input=f"tell me about {i}", target="steered", metadata={"label": i})
            for i in (0, 1)
        ],
        solver=solver,
        scorer=scorer,
        # Neither is meant for the oracle.
        config=GenerateConfig(
            system_message="be brief",
            temperature=1.0,
            extra_body={"chat_template_kwargs": {"x": 1}},
        ),
    )
    (log,) = eval(task, model=model, display="none", log_dir=str(folder / "logs"))
    assert log.status == "success", log.error
    return log


def solvers(*more: Solver) -> list[Solver]:
    return [with_capture([2], positions="completion"), *more]


def test_solvers_keep_answers_and_show_a_table(
    server: FakeLensServer, model: Model, write_oracle: Any, tmp_path: Path
) -> None:
    write_oracle()
    log = run_task(
        model,
        tmp_path,
        solvers(
            activation_oracle(QUESTION, "tiny", layers=2),
            activation_oracle([QUESTION, "Who|what?"], "tiny", layers=2, key="talk"),
        ),
    )
    for body in asked(server):
        assert [m["role"] for m in body["messages"]] == ["user"]
        assert body["temperature"] == 0
    (sample, _) = read_eval_log(log.location, resolve_attachments=True).samples or []
    (single,) = sample.metadata["activation_oracle"]
    assert single["answer"] == STEERED
    assert single["controls"]["text_only"] == PLAIN
    assert single["layers"] == [2]
    assert sample.store["activation_oracle"] == [single]
    assert [a["question"] for a in sample.metadata["talk"]] == [QUESTION, "Who|what?"]
    # The conversation is that of the task.
    assert sample.output.completion == PLAIN
    (entry,) = [e for e in sample.events if isinstance(e, InfoEvent)]
    assert entry.source == "inspect_lens"
    table = str(entry.data).splitlines()
    assert table[0] == "| question | answer | text only | shuffled | random |"
    assert table[2] == f"| {QUESTION} | {STEERED} | {PLAIN} | {STEERED} | {STEERED} |"
    assert "Who\\|what?" in table[3]
    # No tensor reached the log, and no call of the oracle captured anything.
    assert "data" not in json.dumps(single)
    assert len(read_activations(log)) == 2


def test_a_grader_judges_what_words_do_not(
    server: FakeLensServer, model: Model, write_oracle: Any, tmp_path: Path
) -> None:
    write_oracle()
    verdicts = [ModelOutput.from_content("mock", f"GRADE: {v}") for v in "CIIIIIII"]
    for verdict in verdicts:
        # Without it the mock counts tokens with a tokenizer from the network.
        verdict.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    grader = get_model("mockllm/model", custom_outputs=verdicts)
    task = Task(
        dataset=[Sample(input="tell me", target="something steered")],
        solver=solvers(),
        scorer=oracle_answer(QUESTION, "tiny", layers=2, match="model"),
    )
    (log,) = eval(
        task, model=model, model_roles={"grader": grader}, display="none",
        log_dir=str(tmp_path / "logs"),
    )  # fmt: skip
    assert log.status == "success", log.error
    (sample,) = log.samples or []
    found = (sample.scores or {})["oracle_answer"]
    assert found.value == "C"
    assert found.metadata is not None
    assert [c["value"] for c in found.metadata["controls"].values()] == ["I", "I", "I"]


def test_a_sample_without_tokens_is_unscored(
    model: Model, write_oracle: Any, tmp_path: Path
) -> None:
    write_oracle()
    log = run_task(
        model,
        tmp_path,
        generate(max_tokens=1),
        oracle_answer(QUESTION, "tiny", layers=2, choices=["a", "b"]),
    )
    (sample, _) = log.samples or []
    found = (sample.scores or {})["oracle_answer"]
    assert found.reason == "no_tokens"
    assert math.isnan(found.as_float())
