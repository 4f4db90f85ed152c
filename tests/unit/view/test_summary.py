"""What Inspect's own viewer shows of probes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.event import InfoEvent
from inspect_ai.log import read_eval_log
from inspect_ai.model import get_model
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer
from inspect_ai.solver import TaskState
from inspect_ai.viewer import TaskSamplesView

from inspect_lens.errors import SpecError
from inspect_lens.probe import Probe, Statistic, load_probe
from inspect_lens.reading import ProbeReader, Reading
from inspect_lens.view import note_readings, probe_summary, probe_viewer
from tests.kit.captured import captured
from tests.kit.planted_log import planted_probe


def reading_of(probe: Probe, scores: list[float]) -> Reading:
    rows = np.zeros((1, len(scores), 4), np.float32)
    rows[0, :, 0] = scores
    output = captured(rows, n_prompt=1, layers=(1,))
    reader = ProbeReader.of(probe, positions="completion")
    made = anyio.run(lambda: reader.read(output))
    assert made is not None
    return made


@pytest.fixture
def probe(tmp_path: Path) -> Probe:
    loaded = load_probe(planted_probe(tmp_path, layers=(1,)))
    assert isinstance(loaded, Probe)
    return loaded


def test_a_row_per_turn_with_bars_on_one_scale(probe: Probe) -> None:
    text = probe_summary([reading_of(probe, [0, 0, 7]), None, reading_of(probe, [0, 0, 0.5, -7])])
    head, _, first, second, third, _, foot = text.splitlines()
    assert head.count("|") == first.count("|") == third.count("|") == 8
    assert first == "| 1 | t/p | 3.5 | ▲ 1 | - | 7 at 2 | `▅█` |"
    assert "no token to read" in second
    assert third == "| 3 | t/p | -2.167 | ▽ 1 | - | 0.5 at 2 | `▅▅▁` |"
    assert foot.startswith("Bars go from -7 to 7")


def test_no_name_breaks_the_table(probe: Probe) -> None:
    named = replace(probe, card=probe.card.model_copy(update={"name": "t/a|b\nc"}))
    _, _, row, _, foot = probe_summary(reading_of(named, [0, 7])).splitlines()
    assert row.startswith("| 1 | t/a\\|b c | 7 |")
    assert foot.startswith("Bars go from")


def test_tokens_are_counted_against_a_threshold_for_tokens_alone(probe: Probe) -> None:
    (held,) = probe.card.thresholds
    token = held.model_copy(update={"value": 3.0, "statistic": Statistic(over="token")})
    card = probe.card.model_copy(update={"thresholds": (held, token)})
    row = probe_summary(reading_of(replace(probe, card=card), [0, 2, 7])).splitlines()[2]
    assert row.startswith("| 1 | t/p | 4.5 | ▲ 1 | 1 of 2 |"), (
        "2 is above the answer's 1, not above 3"
    )


def test_a_scorer_can_leave_it_in_the_transcript(probe: Probe, tmp_path: Path) -> None:
    reading = reading_of(probe, [0, 2, 3])

    @scorer(metrics=[mean()])
    def noted() -> Scorer:
        async def score(state: TaskState, target: Target) -> Score:
            note_readings(reading)
            return Score(value=reading.value)

        return score

    task = Task(dataset=[Sample(input="x")], scorer=noted())
    output = captured(np.zeros((1, 3, 4), np.float32), n_prompt=1)
    model = get_model("mockllm/model", custom_outputs=[output], memoize=False)
    (log,) = eval(task, model=model, log_dir=str(tmp_path), display="none")
    samples = read_eval_log(log.location, resolve_attachments=True).samples
    assert samples is not None
    notes = [e for e in samples[0].events if isinstance(e, InfoEvent)]
    assert [(e.source, e.data) for e in notes] == [("inspect_lens", probe_summary(reading))]


def test_the_viewer_lists_probes_first_and_highest_on_top() -> None:
    config = probe_viewer({"probe_score": (), "ensemble": ("a", "b")}, palette="neutral", low=0)
    view = config.task_samples_view
    assert isinstance(view, TaskSamplesView)
    names = [c.id for c in view.columns or []]
    assert names[2:5] == ["score__probe_score__probe_score", "score__ensemble__a",
                          "score__ensemble__b"]  # fmt: skip
    assert [(s.column, s.dir) for s in view.sort or []] == [(names[2], "desc")]
    assert set(view.score_color_scales or {}) == {"probe_score", "a", "b"}
    assert Task(dataset=[Sample(input="x")], viewer=config).viewer == config
    for wrong in ([], "deception_probe"):
        with pytest.raises(SpecError, match="list of names"):
            probe_viewer(wrong)
