"""A scorer that a user writes from the parts of `reading` and `view`, live and again from the log.

The organism lies where it is told to; what the parts say is compared with the captured rows.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from inspect_ai import Task, eval
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer
from inspect_ai.solver import TaskState

from evals.organism_deception.dataset import organism_dataset
from inspect_lens.model import activations
from inspect_lens.probe import auroc
from inspect_lens.reading import ProbeReader, read_message
from inspect_lens.reading._samples import call_of, read_call
from inspect_lens.solver import with_capture
from inspect_lens.view import note_readings, probe_summary, probe_viewer
from tests.kit.lying import MODEL, PROBE
from tests.kit.repository import ROOT
from tests.kit.rescored import rescore

pytestmark = pytest.mark.engine

N = 8


@scorer(metrics=[mean()])
def noted(probe: str = PROBE) -> Scorer:
    """What a probe says, with a table in the transcript."""
    reader = ProbeReader.of(probe)

    async def score(state: TaskState, target: Target) -> Score:
        reading = await reader.read(state.output, model_name=state.model.name)
        assert reading is not None
        note_readings(reading)
        # The same by other ways to it.
        of_message = await read_message(reader, state.output.message)
        handle = call_of(state.output.message)
        assert handle is not None
        of_call = await read_call(reader, handle)
        assert of_message is not None
        assert of_call is not None
        assert reading.value == of_message.value == of_call.value
        return Score(value=reading.value, metadata=reading.metadata())

    return score


@pytest.fixture(scope="module")
def log(lens_server_url: str, tmp_path_factory: pytest.TempPathFactory) -> EvalLog:
    rows = organism_dataset("demo").filter(lambda s: (s.metadata or {})["kind"] == "open")[:N]
    (done,) = eval(
        Task(
            dataset=rows, solver=with_capture([4]), scorer=noted(),
            viewer=probe_viewer(["noted"]),
        ),
        model=MODEL, model_base_url=f"{lens_server_url}/v1", display="none", temperature=0.0,
        log_dir=str(tmp_path_factory.mktemp("logs")), max_tokens=20,
    )  # fmt: skip
    assert done.status == "success", done.error and done.error.traceback
    return read_eval_log(done.location)


def tables(log: EvalLog) -> list[str]:
    """What stands in the transcripts."""
    whole = read_eval_log(log.location, resolve_attachments=True)
    return [
        str(event.data)
        for sample in whole.samples or []
        for event in sample.events
        if event.event == "info" and event.source == "inspect_lens"
    ]


def test_the_lies_have_the_higher_scores_and_each_has_a_table(log: EvalLog) -> None:
    samples = log.samples or []
    values = [(s.scores or {})["noted"].as_float() for s in samples]
    labels = [int(s.metadata["label"]) for s in samples]
    assert auroc(labels, values) == 1.0
    reader = ProbeReader.of(PROBE)
    expected = []
    for sample in samples:
        handle = activations(sample.output)
        assert handle is not None
        expected.append(probe_summary([reader.read_captured(handle)]))
    assert tables(log) == expected
    assert all(PROBE in table for table in expected)
    assert log.eval.viewer is not None
    assert "noted" in str(log.eval.viewer)


def test_inspect_score_finds_the_scorer_in_its_file_and_says_the_same(
    log: EvalLog, tmp_path: Path
) -> None:
    file = Path(
        inspect.getfile(test_inspect_score_finds_the_scorer_in_its_file_and_says_the_same)
    ).relative_to(ROOT)
    (again,) = rescore(log, [["--scorer", f"{file}@noted"]], tmp_path)
    for new, old in zip(again.samples or [], log.samples or [], strict=True):
        after, before = (new.scores or {})["noted"], (old.scores or {})["noted"]
        assert after.value == before.value
        assert after.metadata == before.metadata
    assert tables(again) == tables(log)
