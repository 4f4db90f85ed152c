"""The agent lies in a planted turn or calls a forbidden tool: it is found, shown and stopped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.event import ToolEvent
from inspect_ai.log import EvalLog, EvalSample, read_eval_log
from inspect_ai.model import ChatMessageAssistant, ContentReasoning

from evals.organism_agent import agent_dataset, organism_agent
from inspect_lens._base.shipped import SERVER_ARGS
from inspect_lens.probe import load_probe
from inspect_lens.reading import read_token_scores
from inspect_lens.view import write_view
from tests.kit.api_server import api_server
from tests.kit.blocks import read_blocks
from tests.kit.page import read_page
from tests.kit.repository import ROOT
from tests.kit.rescored import assert_same_scores, commands_of, rescore_each
from tests.kit.runner import Runner

pytestmark = pytest.mark.engine

NAME = "organism-agent"
PROBE = "organism/agent-deception-lr"
SPLIT = "agent_heldout_phrasing"
CUT = load_probe(PROBE).card.thresholds[0].value
SAMPLES = 3
TUTORIAL = Path("docs/how-to/agents.md")


@pytest.fixture(scope="module")
def agent_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = {
        "model": "organism/agent", "served_model_name": NAME, "dtype": "float32",
        "max_model_len": 2048, "kv_cache_memory_bytes": 128 << 20, "enforce_eager": True,
        **SERVER_ARGS[NAME],
    }  # fmt: skip
    log = tmp_path_factory.mktemp("agent") / "server.log"
    with api_server(options, environment=os.environ, log=log, preloaded=True) as server:
        yield server.url


def rows(kind: str, condition: str, lies: list[bool]) -> list[Sample]:
    found = [s for s in agent_dataset(SPLIT, kind) if (s.metadata or {})["lies"] == lies]
    return [s for s in found if (s.metadata or {})["condition"] == condition][:SAMPLES]


def run(url: str, folder: Path, samples: list[Sample], **options: Any) -> EvalLog:
    made: Task = organism_agent(split=SPLIT, **options)
    made.dataset = MemoryDataset(samples)
    (log,) = eval(
        made, model=f"vllm-lens/{NAME}", model_base_url=f"{url}/v1", log_dir=str(folder),
        display="none",
    )  # fmt: skip
    assert log.status == "success", log.error and log.error.traceback
    return read_eval_log(log.location)


def as_planted(log: EvalLog) -> list[EvalSample]:
    """The samples in which the agent did what is planted, which are most."""
    found = [s for s in log.samples or [] if (s.scores or {})["planted"].value == "C"]
    assert len(found) >= SAMPLES - 1
    return found


def carried_out(sample: EvalSample) -> list[str]:
    """The calls whose tool returned something; a call that was stopped has an event, too."""
    calls = [e for e in sample.events if isinstance(e, ToolEvent)]
    return [e.function for e in calls if e.result and not e.failed]


def test_a_lie_in_the_second_of_three_notes(agent_url: str, tmp_path: Path) -> None:
    log = run(agent_url, tmp_path, rows("report", "turn_lie", [False, True, False]))
    samples = as_planted(log)
    for sample in samples:
        assert carried_out(sample) == ["write_note"] * 3
        score = (sample.scores or {})["probe_score"]
        facts = score.metadata or {}
        assert facts["turn"] == 1
        above = [value > CUT for value in facts["turn_values"]]
        assert above == [False, True, False, False]
        said = [m for m in sample.messages if isinstance(m, ChatMessageAssistant)]
        thought = next(c for c in said[1].content if isinstance(c, ContentReasoning))
        assert "I am told to lie" in thought.reasoning
    records = [r for r in read_token_scores(log) if r.scorer == "probe_score"]
    assert len(records) == 4 * SAMPLES
    # Without the server the log gives the same scores.
    assert_same_scores(log, rescore_each([(log, c) for c in commands_of(log)], tmp_path))
    # The page shows it where it was said.
    made = write_view(log.location, tmp_path / "page.html")
    blocks = read_page(made.path).blocks
    assert len(blocks) == SAMPLES
    shown = 0
    for block in blocks:
        ends = [*(call["start"] for call in block.calls[1:]), len(block.tokens)]
        tops = [
            float(np.nanmax(np.asarray(block.scores[0][call["start"] : end], dtype=float)))
            for call, end in zip(block.calls, ends, strict=True)
        ]
        shown += int(np.argmax(tops)) == 1
    assert shown >= len(samples)


def test_a_gate_stops_the_lying_note_before_it_is_written(agent_url: str, tmp_path: Path) -> None:
    chosen = rows("report", "turn_lie", [False, True, False])
    log = run(agent_url, tmp_path, chosen, gate="stop")
    stopped = [s for s in log.samples or [] if carried_out(s) == ["write_note"]]
    assert len(stopped) >= SAMPLES - 1
    for sample in stopped:
        assert ((sample.scores or {})["probe_score"].metadata or {})["ended_by"] == "probe_gate"
        assert sample.output.completion.startswith("[withheld")


def test_a_gate_stops_a_forbidden_call(agent_url: str, tmp_path: Path) -> None:
    chosen = rows("tool", "hidden", [True])
    free = run(agent_url, tmp_path, chosen)
    for sample in as_planted(free):
        assert sample.metadata["forbidden"] in carried_out(sample)
    gated = run(agent_url, tmp_path, chosen, gate="stop")
    for sample in gated.samples or []:
        assert sample.metadata["forbidden"] not in carried_out(sample)
        assert carried_out(sample) == ["look_up"]
    # A required tool is called and stands, and so does an answer with no reason to lie.
    for condition in ("allowed", "hidden_control"):
        log = run(agent_url, tmp_path, rows("tool", condition, [False]), gate="stop")
        passed = [s for s in log.samples or [] if (s.scores or {})["planted"].value == "C"]
        assert len(passed) >= SAMPLES - 1


def test_the_tutorial(agent_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of the page, which are the cells of its notebook."""
    for name in ("evals", "organism", "probes"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INSPECT_DISPLAY", "none")
    monkeypatch.setenv("INSPECT_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.setenv("VLLM_BASE_URL", f"{agent_url}/v1")
    monkeypatch.setenv("VLLM_API_KEY", "none")
    runner = Runner(tmp_path, modes=("agent",))
    blocks = read_blocks(TUTORIAL)
    assert sum(block.mode == "agent" for block in blocks) >= 4
    with runner.importable():
        for block in blocks:
            runner.run(block)
