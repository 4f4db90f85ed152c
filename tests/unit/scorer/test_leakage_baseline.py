from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai import Epochs, score
from inspect_ai._eval.task import run as inspect_run
from inspect_ai.log import read_eval_log
from inspect_ai.model import ModelOutput, ModelUsage
from inspect_ai.scorer import SampleScore, Score, grouped

from inspect_lens.errors import SpecError
from inspect_lens.model._host import is_interim
from inspect_lens.probe import auroc, cross_validated_words, hash_words
from inspect_lens.scorer import _baselines, leakage_baseline, length_auroc, validity, words_auroc
from tests.kit.mock_evals import metric_values, run, scores

N = 40


def answer(i: int, epoch: int, *, tell: bool = True) -> str:
    rng = np.random.default_rng([i, epoch])
    words = [f"w{j}" for j in rng.integers(30, size=10)]
    return " ".join([*words, "tell"] if tell and i % 2 else words)


def speaker(**options: Any) -> Any:
    said: dict[int, int] = {}

    def reply(messages: Any, *_: Any) -> ModelOutput:
        i = int(messages[0].text)
        said[i] = said.get(i, 0) + 1
        output = ModelOutput.from_content("mockllm/model", answer(i, said[i], **options))
        output.usage = ModelUsage()
        return output

    return reply


LABELS = [i % 2 for i in range(N)]


def test_the_text_alone_tells_the_label(tmp_path: Path) -> None:
    log = run(speaker(), leakage_baseline(), folder=tmp_path, labels=LABELS)
    got = metric_values(log)
    words = [hash_words(answer(i, 1)) for i in range(N)]
    ranks = cross_validated_words(words, LABELS, groups=[str(i) for i in range(N)])
    assert got["words_auroc"] == pytest.approx(auroc(LABELS, ranks))
    assert got["words_auroc"] > 0.6
    assert got["length_auroc"] == 1.0
    assert [s.value for s in scores(log)] == [10 + i % 2 for i in range(N)]
    assert max(len(s.model_dump_json()) for s in scores(log)) < 400
    again = score(
        read_eval_log(log.location), leakage_baseline(), action="overwrite", display="none"
    )
    assert metric_values(again) == got


def test_words_are_learned_once_behind_the_last_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inspect computes metrics for its display all the while, and every sample waits for it."""
    told: list[bool] = []
    learned: list[int] = []
    often = partial(inspect_run.update_metrics_display_fn, min_interval=0)
    monkeypatch.setattr(inspect_run, "update_metrics_display_fn", often)
    monkeypatch.setattr(_baselines, "is_interim", lambda: told.append(is_interim()) or told[-1])

    def learn(words: Any, *args: Any, **options: Any) -> Any:
        learned.append(len(words))
        return cross_validated_words(words, *args, **options)

    monkeypatch.setattr(_baselines.arithmetic, "cross_validated_words", learn)
    log = run(speaker(), leakage_baseline(), folder=tmp_path, labels=LABELS, max_samples=1)
    assert told[-1] is False
    assert any(told)
    assert learned == [N]
    assert metric_values(log)["words_auroc"] > 0.6


def test_the_display_does_without_a_look_at_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_baselines, "is_interim", lambda: True)
    monkeypatch.setattr(_baselines, "_words_or_none", None)
    facts = {"words": {"hashes": ""}, "n_tokens": 1}
    made = [
        SampleScore(
            score=Score(value=1.0, metadata=facts), sample_id=i, sample_metadata={"label": i % 2}
        )
        for i in range(4)
    ]
    found = validity()(made)
    assert isinstance(found, dict)
    assert math.isnan(found["words_auroc"])
    assert found["length_auroc"] == 0.5


def test_every_epoch_is_a_text_and_no_reducer_changes_that(tmp_path: Path) -> None:
    expected = None
    for reducer in ("mean", "max"):
        log = run(
            speaker(tell=False), leakage_baseline(), folder=tmp_path, labels=LABELS[:12],
            epochs=Epochs(3, reducer), max_samples=1,
        )  # fmt: skip
        got = metric_values(log)["words_auroc"]
        assert log.samples is not None
        ids = [str(s.id) for s in log.samples]
        words = [hash_words(s.output.completion) for s in log.samples]
        labels = [s.metadata["label"] for s in log.samples]
        assert len(words) == 36
        ranks = cross_validated_words(words, labels, groups=ids)
        assert got == pytest.approx(auroc(labels, ranks))
        expected = got if expected is None else expected
        assert got == pytest.approx(expected)


def test_prompt_both_and_groups(tmp_path: Path) -> None:
    more = [{"split": "ab"[i // 20]} for i in range(N)]
    for text, n in (("prompt", 2), ("both", 12)):
        log = run(
            speaker(tell=False), leakage_baseline(text), folder=tmp_path, labels=LABELS,  # type: ignore[arg-type]
        )  # fmt: skip
        assert [s.value for s in scores(log)][:3] == [n] * 3
    log = run(speaker(), leakage_baseline(), folder=tmp_path, labels=LABELS, metadata=more)
    metrics = [grouped(words_auroc(), "split")]
    again = score(log, leakage_baseline(), metrics=metrics, action="overwrite", display="none")  # type: ignore[arg-type]
    got = metric_values(again)
    assert set(got) == {"a", "b", "all"}
    assert got["all"] > 0.6


def test_alone(caplog: pytest.LogCaptureFixture) -> None:
    def sample(length: int, label: int, name: int = 0, **known: str) -> SampleScore:
        score = Score(value=length, metadata=known)
        return SampleScore(score=score, sample_id=name, sample_metadata={"label": label})

    lengths = [sample(n, label, words="") for n, label in ((9, 0), (8, 0), (3, 1), (8, 1))]
    found: Any = length_auroc(interval=True)(lengths)
    assert found["length_auroc"] == pytest.approx(1 - 0.125)
    assert math.isnan(length_auroc()([sample(9, i % 2) for i in range(8)]))  # type: ignore[arg-type]
    assert "length_auroc: 8 of 8 samples have no length" in caplog.text
    assert found["length_auroc_low"] < found["length_auroc"] < found["length_auroc_high"]
    assert math.isnan(length_auroc()([]))  # type: ignore[arg-type]
    assert math.isnan(words_auroc()(lengths[:3]))  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="scored by neither leakage_baseline nor a probe"):
        words_auroc()([sample(9, i % 2, i) for i in range(8)])
    with pytest.raises(SpecError, match="allowed are completion, prompt, both"):
        leakage_baseline("answer")  # type: ignore[arg-type]


def test_epochs_of_one_sample_are_no_more_samples_for_the_words() -> None:
    rng = np.random.default_rng(0)
    texts = [("yes " if rng.random() < 0.3 + 0.4 * (k % 2) else "no ") * 3 for k in range(40)]

    def width(epochs: int) -> float:
        made = [
            SampleScore(
                score=Score(value=3.0, metadata=_baselines.words_of(text)),
                sample_id=k, sample_metadata={"label": k % 2},
            )
            for _ in range(epochs)
            for k, text in enumerate(texts)
        ]  # fmt: skip
        found: Any = words_auroc(interval=True)(made)
        return float(found["words_auroc_high"] - found["words_auroc_low"])

    assert width(8) > 0.7 * width(1)
