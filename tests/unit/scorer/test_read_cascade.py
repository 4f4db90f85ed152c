"""One log in which the judge read everything says what a cascade costs at every share."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inspect_ai.log import EvalLog
from inspect_ai.model import ModelOutput, ModelUsage, get_model

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.scorer import probe_cascade, read_cascade
from inspect_lens.train import cascade_frontier
from tests.kit.mock_evals import call, judge, planted_probe, run

PROBE = planted_probe(description="It lies.")
VALUES = [-5.0, -1.0, 0.5, 5.0, -4.0, 4.0]
LABELS = [0, 1, 0, 1, 0, 1]
SAYS = {0: "5", 1: "95", 2: "10", 3: "90", 4: "1", 5: "99"}


def counting() -> Any:
    """A judge that knows, and counts its tokens: 100, 101, ..."""
    outputs = []
    for i, text in SAYS.items():
        made = ModelOutput.from_content("judge", text)
        made.usage = ModelUsage(input_tokens=99, output_tokens=1 + i, total_tokens=100 + i)
        outputs.append(made)
    return get_model("mockllm/judge", custom_outputs=outputs, memoize=False)


def whole(folder: Path, model: Any, **options: Any) -> EvalLog:
    band = {"band": (-math.inf, math.inf), "unit": "score", **options}
    return run(
        [call([v, v]) for v in VALUES], probe_cascade(PROBE, judge=model, **band), folder=folder,
        labels=LABELS, max_samples=1,
    )  # fmt: skip


def test_the_frontier_of_a_log_is_that_of_its_scores(tmp_path: Path) -> None:
    log = whole(tmp_path, counting())
    found = read_cascade(log)
    assert found.labels == LABELS
    assert found.probe_scores == VALUES
    assert found.judge_scores == [0.05, 0.95, 0.1, 0.9, 0.01, 0.99]
    assert found.judge_cost == [100.0, 101.0, 102.0, 103.0, 104.0, 105.0]
    assert len(set(found.groups)) == 6
    assert PROBE.threshold is not None
    assert found.probe_threshold == PROBE.threshold.value
    points = cascade_frontier(**found.arguments(probe_threshold=0.0), shares=(0.0, 0.34, 1.0))
    assert [p.recall for p in points] == pytest.approx([2 / 3, 1.0, 1.0])
    assert [p.fpr for p in points] == pytest.approx([1 / 3, 0.0, 0.0])
    # Three of six: the two that the probe gets wrong lie nearest to its threshold.
    assert points[-1].cost == pytest.approx(102.5)
    assert points[1].cost == pytest.approx((101 + 102 + 104) / 6)
    assert read_cascade(log.location).labels == LABELS


def test_a_judge_that_does_not_count_costs_calls(tmp_path: Path) -> None:
    found = read_cascade(whole(tmp_path, judge(*SAYS.values())))
    assert found.judge_cost is None
    points = cascade_frontier(**found.arguments(probe_threshold=0.0))
    assert points[-1].cost == 1.0


def test_samples_without_a_number_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = read_cascade(whole(tmp_path, judge("5", "hm", "10", "90", "1", "99")))
    assert len(found.labels) == 5
    assert "1 of 6 samples have no number" in caplog.text


@pytest.mark.parametrize(
    ("made", "options", "match"),
    [
        (lambda f: whole(f, judge("50"), band=(0.0, 1.0)), {}, "the judge was not asked"),
        (lambda f: whole(f, judge("50")), {"label": "lie"}, "label metadata.lie"),
        (lambda f: whole(f, judge("50")), {"cluster": "scene"}, "cluster='scene'"),
        (lambda f: whole(f, judge("50")), {"name": "other"}, "no score 'other'"),
    ],
)
def test_logs_that_cannot_tell_are_refused(
    tmp_path: Path, made: Callable[[Path], EvalLog], options: dict[str, Any], match: str
) -> None:
    with pytest.raises((ArtifactError, SpecError), match=match):
        read_cascade(made(tmp_path), **options)
