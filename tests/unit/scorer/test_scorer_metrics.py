from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from inspect_ai import Epochs, Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import Model, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Metric, SampleScore, Score, Scorer, Target, grouped, scorer
from inspect_ai.solver import TaskState, generate
from sklearn.metrics import roc_auc_score

from inspect_lens.errors import SpecError
from inspect_lens.scorer import (
    _labels,
    at_threshold,
    auroc_metric,
    recall_at_fpr_metric,
    threshold_accuracy,
)

Value = Callable[[TaskState], Any]


def mock_model() -> Model:
    """A model whose token usage is given, so that nothing downloads a tokenizer to count it."""

    def reply(*_: Any) -> ModelOutput:
        output = ModelOutput.from_content("mockllm/model", "no")
        output.usage = ModelUsage()
        return output

    return get_model("mockllm/model", custom_outputs=reply, memoize=False)


def run(
    rows: list[dict[str, Any]], metrics: Any, *, value: Value | None = None, epochs: Any = None
) -> EvalLog:
    """A real eval in which a hand-made scorer returns `metadata["score"]`."""

    @scorer(metrics=metrics, name="hand_made")
    def hand_made() -> Scorer:
        async def score(state: TaskState, target: Target) -> Score:
            found = value(state) if value else state.metadata["score"]
            if found is None:
                return Score.unscored(reason="no_tokens")
            return Score(value=found, metadata={"threshold": state.metadata.get("threshold")})

        return score

    task = Task(
        dataset=[Sample(input="x", id=i, metadata=row) for i, row in enumerate(rows)],
        solver=generate(),
        scorer=hand_made(),
        epochs=epochs,
    )
    (log,) = eval(task, model=mock_model(), display="none", log_realtime=False)
    assert log.status == "success", log.error
    return log


@pytest.fixture(autouse=True)
def _in_memory(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSPECT_LOG_DIR", str(tmp_path))


def values(log: EvalLog, which: int = 0) -> dict[str, float]:
    assert log.results is not None
    return {name: m.value for name, m in log.results.scores[which].metrics.items()}


def rows(n: int = 20, *, seed: int = 0, gap: float = 1.0, **more: Any) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [
        {"label": i % 2 == 0, "score": float(rng.normal(gap * (i % 2 == 0))), **more}
        for i in range(n)
    ]


def expected_auroc(data: list[dict[str, Any]]) -> float:
    return float(roc_auc_score([r["label"] for r in data], [r["score"] for r in data]))


def sample(value: float, **metadata: Any) -> SampleScore:
    return SampleScore(score=Score(value=value), sample_id="s", sample_metadata=metadata)


class TestThroughInspect:
    def test_epochs_are_reduced_first(self) -> None:
        rng = np.random.default_rng(3)
        noise: dict[tuple[int, int], float] = {}

        def value(state: TaskState) -> float:
            key = (int(state.sample_id), state.epoch)
            noise[key] = float(rng.normal() + state.metadata["score"])
            return noise[key]

        data = rows(threshold=0.5)
        log = run(
            data, [auroc_metric(), threshold_accuracy()], value=value, epochs=Epochs(3, "mean")
        )
        means = [np.mean([noise[i, e] for e in (1, 2, 3)]) for i in range(len(data))]
        labels = [r["label"] for r in data]
        got = values(log)
        assert got["auroc"] == pytest.approx(roc_auc_score(labels, means))
        right = np.mean([(m > 0.5) == y for m, y in zip(means, labels, strict=True)])
        assert got["threshold_accuracy"] == pytest.approx(right)

    def test_grouped(self) -> None:
        data = [{**r, "split": "ab"[i % 4 // 2]} for i, r in enumerate(rows(40))]
        got = values(run(data, [grouped(auroc_metric(), "split")]))
        for name in "ab":
            part = [r for r in data if r["split"] == name]
            assert got[name] == pytest.approx(expected_auroc(part))
        assert got["all"] == pytest.approx(expected_auroc(data))

    def test_dict_scores(self) -> None:
        data = rows()

        def value(state: TaskState) -> dict[str, float]:
            return {"up": state.metadata["score"], "down": -state.metadata["score"]}

        log = run(data, {"*": [auroc_metric(), at_threshold(threshold=0.0)]}, value=value)
        assert log.results is not None
        by_name = {s.name: s.metrics for s in log.results.scores}
        assert by_name["up"]["inspect_lens/auroc"].value == pytest.approx(expected_auroc(data))
        assert by_name["down"]["inspect_lens/auroc"].value == pytest.approx(
            1 - expected_auroc(data)
        )
        above = [r["score"] > 0 for r in data if not r["label"]]
        assert by_name["up"]["inspect_lens/at_threshold_fpr"].value == np.mean(above)

    def test_unscored_samples_are_left_out(self) -> None:
        data = rows()
        extra = [*data, {"label": True, "score": None}]
        log = run(extra, [auroc_metric()])
        assert values(log)["auroc"] == pytest.approx(expected_auroc(data))
        assert log.results is not None
        assert log.results.scores[0].unscored_samples == 1

    def test_recall_at_a_rate(self) -> None:
        data = [{"label": 0, "score": float(i)} for i in range(30)]
        data += [{"label": 1, "score": s} for s in (50.0, 28.0, 10.0, 27.0)]
        got = values(run(data, [recall_at_fpr_metric(0.1), recall_at_fpr_metric()]))
        assert got["recall_at_fpr"] == 0.5
        assert math.isnan(got["recall_at_fpr2"])  # 30 negatives say nothing about 1%

    def test_recall_against_a_control_set(self) -> None:
        data: list[dict[str, Any]] = [{"control": True, "score": float(i)} for i in range(30)]
        data += [{"label": 0, "score": 1e6}, {"label": 1, "score": 28.0}]
        got = values(run(data, [recall_at_fpr_metric(0.1, control="control")]))
        assert got["recall_at_fpr"] == 1.0

    def test_the_warning_comes_once_and_with_the_count_of_the_end(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        metric: Any = recall_at_fpr_metric()
        with caplog.at_level(logging.WARNING):
            for n in (4, 8, 12):  # as Inspect asks while samples come in
                monkeypatch.setattr(_labels, "is_interim", lambda: n < 12)  # noqa: B023
                made = [sample(float(i), label=i % 2) for i in range(n)]
                assert math.isnan(metric(made))
        (record,) = caplog.records
        assert "6 scores for recall" in record.getMessage()
        assert "300 negatives or more" in record.getMessage()

    def test_a_threshold_of_the_caller_goes_before_that_of_the_scores(self) -> None:
        scored = [
            SampleScore(
                score=Score(value=value, metadata={"threshold": 0.9}), sample_id=i,
                sample_metadata={"label": label},
            )
            for i, (value, label) in enumerate(((0.2, 0), (0.7, 0), (0.8, 1), (0.95, 1)))
        ]  # fmt: skip
        assert at_threshold(interval=False)(scored) == {"recall": 0.5, "fpr": 0.0}
        assert at_threshold(0.5, interval=False)(scored) == {"recall": 1.0, "fpr": 0.5}
        assert threshold_accuracy(0.1)(scored) == 0.5

    def test_a_rate_that_cannot_be_known_is_left_out(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        harmless = [{"label": 0, "score": float(i), "threshold": 2.5} for i in range(5)]
        assert values(run(harmless, [at_threshold(interval=False)])) == {"fpr": 0.4}
        assert "no threshold" not in caplog.text
        with caplog.at_level(logging.WARNING):
            assert values(run(rows(), [at_threshold()])) == {}
        assert caplog.text.count("recall and fpr are left out: the scores carry no threshold") == 1

    def test_control_samples_alone_make_the_rate(self) -> None:
        data: list[dict[str, Any]] = [{"control": True, "score": float(i)} for i in range(4)]
        data += [{"label": 0, "score": 99.0}, {"label": 1, "score": 99.0}]
        got = values(run(data, [at_threshold(2.5, control="control", interval=False)]))
        assert got == {"recall": 1.0, "fpr": 0.25}

    def test_each_entry_of_a_dict_score_has_its_own_threshold(self) -> None:
        cuts = {"up": 1.0, "down": -1.0}

        @scorer(
            metrics=[at_threshold(interval=False), at_threshold(key="down", interval=False)],
            name="both",
        )
        def both() -> Scorer:
            async def score(state: TaskState, target: Target) -> Score:
                s = state.metadata["score"]
                value = {"up": s, "down": -s, "bare": s}
                return Score(value=value, metadata={"thresholds": cuts})

            return score

        data = [{"label": i % 2, "score": float(i)} for i in range(4)]
        task = Task(
            [Sample(input="x", id=i, metadata=r) for i, r in enumerate(data)], scorer=both()
        )
        (log,) = eval(task, model=mock_model(), display="none", log_realtime=False)
        assert values(log) == {
            "up_recall": 0.5, "up_fpr": 0.5, "down_recall": 0.0, "down_fpr": 0.5,
            "recall": 0.0, "fpr": 0.5,
        }  # fmt: skip

    def test_samples_without_labels_are_counted_aloud(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        data: list[dict[str, Any]] = [*rows(), {"score": 99.0}]
        with caplog.at_level(logging.WARNING):
            got = values(run(data, [auroc_metric()]))
        assert got["auroc"] == pytest.approx(expected_auroc(data[:-1]))
        assert "1 of 21 scored samples have no 'label' in their metadata" in caplog.text

    def test_no_labels_at_all_is_nan_and_said_once(self, caplog: pytest.LogCaptureFixture) -> None:
        metrics = [auroc_metric(), recall_at_fpr_metric(), threshold_accuracy()]
        for times in (1, 2):
            got = values(run([{"score": 1.0}] * 2, metrics))
            assert all(math.isnan(v) for v in got.values())
            assert caplog.text.count("2 of 2 scored samples have no 'label'") == times


class TestAlone:
    def test_a_csv_file_has_labels_as_texts(self) -> None:
        made = [sample(v, label=y) for v, y in ((1.0, "1"), (0.0, "0"), (2.0, "True"), (0.5, "0"))]
        assert auroc_metric()(made) == 1.0  # type: ignore[arg-type]

    @pytest.mark.parametrize("bad", ["yes", "", 2, 0.5, [1]])
    def test_a_label_that_is_no_class_is_refused(self, bad: object) -> None:
        with pytest.raises(SpecError, match=r"metadata\.label="):
            auroc_metric()([sample(1.0, label=bad)])

    def test_threshold_accuracy_without_a_threshold_is_nan(self) -> None:
        scores = [sample(1.0, label=1), sample(0.0, label=0)]
        assert math.isnan(threshold_accuracy()(scores))  # type: ignore[arg-type]
        assert threshold_accuracy(threshold=0.5)(scores) == 1.0

    def test_mixed_thresholds_are_refused(self) -> None:
        scores = [
            SampleScore(
                score=Score(value=1.0, metadata={"threshold": t}), sample_metadata={"label": 0}
            )
            for t in (0.1, 0.2)
        ]
        with pytest.raises(SpecError, match="2 different ones"):
            at_threshold()(scores)

    @pytest.mark.parametrize(
        "made", [auroc_metric(), recall_at_fpr_metric(), threshold_accuracy(), at_threshold()]
    )
    def test_no_sample_is_nan(self, made: Metric) -> None:
        got: Any = made([])
        assert all(math.isnan(v) for v in (got.values() if isinstance(got, dict) else [got]))
