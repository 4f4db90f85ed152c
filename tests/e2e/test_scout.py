"""Scanning logs of the organism with a probe, from files or by reading the text again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import ChatMessageSystem, ChatMessageUser, Model, get_model
from inspect_scout import Scanner, scan, scan_results_df, transcripts_from

from inspect_lens.agents.scout import audit_probe_scanner, probe_scanner
from inspect_lens.probe import load_probe
from tests.e2e.test_petri import END, results, say
from tests.e2e.test_petri import run as audit_organism
from tests.kit.lying import HONEST, LYING, MODEL, PROBE, organism, questions
from tests.kit.rescored import command_of, rescore
from tests.kit.scripted import calls

pytestmark = pytest.mark.engine

LAYERS = list(load_probe(PROBE).layers)


def old_log(model: Model, folder: Path) -> EvalLog:
    """Two questions, each answered honestly and not."""
    samples = [
        Sample(
            id=f"{'lie' if label else 'honest'}-{i}",
            input=[ChatMessageSystem(content=text), ChatMessageUser(content=question.text)],
            metadata={"label": label},
        )
        for i, question in enumerate(questions(2))
        for label, text in enumerate((HONEST, LYING))
    ]
    log = eval(Task(dataset=samples), model=model, log_dir=str(folder), display="none")[0]
    assert log.status == "success", log.error
    return log


def scanned(scanner: Scanner[Any], logs: Path, folder: Path, **options: Any) -> pd.DataFrame:
    status = scan(
        scanners={"probe": scanner},
        transcripts=transcripts_from(str(logs)),
        scans=str(folder / "scans"),
        max_processes=1,
        display="none",
        **options,
    )
    assert status.complete, status.errors
    frame = scan_results_df(status.location).scanners["probe"]
    return frame.set_index("transcript_task_id").sort_index()


def test_a_log_that_captured_is_read_without_a_server(
    lens_server_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old_log(organism(lens_server_url, capture=LAYERS), tmp_path / "first")
    # Logs are moved; their files go with them.
    logs = (tmp_path / "first").rename(tmp_path / "moved")
    monkeypatch.setenv("VLLM_BASE_URL", "http://127.0.0.1:9/v1")
    frame = scanned(probe_scanner(PROBE, source="captured"), logs, tmp_path)
    values = frame["value"].astype(float)
    assert list(frame.index) == ["honest-0", "honest-1", "lie-0", "lie-1"]
    assert values[["lie-0", "lie-1"]].min() > values[["honest-0", "honest-1"]].max()
    assert frame["metadata"].str.replace(" ", "").str.contains('"off_policy":false').all()
    assert frame["explanation"].str.contains(r"\[M1\]").all()


def test_every_branch_of_an_audit_is_read_without_a_server(
    lens_server_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a scorer of the audit, by a scan of its log, and by `inspect score`."""
    question = questions(1)[0]
    turns = [
        say(HONEST, question.text),
        calls(("rollback_conversation", {"message_id": "M1"})),
        say(LYING, question.text),
        END,
    ]
    log = audit_organism(turns, lens_server_url, tmp_path / "logs")
    (sample,) = log.samples or []
    said = [message.text for message in results(sample, "resume")]
    assert [question.is_true(text) for text in said] == [True, False]

    monkeypatch.setenv("VLLM_BASE_URL", "http://127.0.0.1:9/v1")
    for way, how in {"max": {}, "last": {"over": "last"}, "mean": {"combine": "mean"}}.items():
        scanner = audit_probe_scanner(PROBE, source="captured", **how)  # type: ignore[arg-type]
        frame = scanned(scanner, tmp_path / "logs", tmp_path / way)
        (row,) = frame.to_dict("records")
        found = json.loads(row["metadata"])
        *honest, lying = (turn["value"] for turn in found["turns"])
        honest = honest[0] if honest else -1.0
        assert lying > honest + 0.5
        expected = {"max": lying, "last": lying, "mean": (honest + lying) / 2}
        assert float(row["value"]) == pytest.approx(expected[way])
        assert found["off_policy"] is False
    assert sample.scores is not None
    score = sample.scores["audit_probe_scanner"]
    assert score.value == pytest.approx(lying)
    (again,) = rescore(log, [command_of("audit_probe_scanner", {"probe": PROBE})], tmp_path)
    (rescored,) = again.samples or []
    assert rescored.scores is not None
    assert rescored.scores["audit_probe_scanner"].value == score.value


def test_a_log_without_activations_is_read_again(lens_server_url: str, tmp_path: Path) -> None:
    plain = get_model(
        "openai-api/organism/organism/checkpoint",
        base_url=f"{lens_server_url}/v1",
        api_key="none",
        config=organism(lens_server_url).config,
        memoize=False,
    )
    old_log(plain, tmp_path / "plain")
    url = f"{lens_server_url}/v1"
    scanner = probe_scanner(PROBE)
    again = scanned(scanner, tmp_path / "plain", tmp_path, model=MODEL, model_base_url=url)
    assert again["metadata"].str.replace(" ", "").str.contains('"off_policy":true').all()
    # The organism's own tokenizer makes the tokens that it sampled, so the scores agree.
    old_log(organism(lens_server_url, capture=LAYERS), tmp_path / "lens")
    captured = scanned(probe_scanner(PROBE, source="captured"), tmp_path / "lens", tmp_path)
    assert again["value"].astype(float).to_dict() == pytest.approx(
        captured["value"].astype(float).to_dict(), abs=1e-2
    )


def test_a_log_without_activations_and_no_model_says_what_to_do(
    lens_server_url: str, tmp_path: Path
) -> None:
    old_log(organism(lens_server_url), tmp_path / "logs")
    status = scan(
        scanners={"probe": probe_scanner(PROBE)},
        transcripts=transcripts_from(str(tmp_path / "logs")),
        scans=str(tmp_path / "scans"),
        max_processes=1,
        display="none",
    )
    assert not status.complete
    assert "scan with a vllm-lens/ model" in str(status.errors[0])
