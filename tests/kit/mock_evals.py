"""Real evals of a mock model whose calls captured what a test has planted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from inspect_ai import Epochs, Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import Model, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score
from inspect_ai.solver import generate

from inspect_lens.probe import Calibration, Interval, Probe, ProbeCard, Threshold

from .captured import captured
from .scripted import scripted_lens

__all__ = [
    "WIDTH",
    "answers",
    "call",
    "judge",
    "metric_values",
    "planted_probe",
    "platt",
    "run",
    "scores",
]

WIDTH = 4
N_PROMPT = 2


def planted_probe(axis: int = 0, *, name: str = "test/axis", **card: Any) -> Probe:
    """A probe that reads one axis of the stream at layer 1; its threshold is 2.5."""
    threshold = Threshold(
        value=2.5, fpr=0.01, control="controls", n_control=400, n_above=3,
        interval=Interval(low=0.0, high=0.02, method="m"),
    )  # fmt: skip
    facts = {"thresholds": (threshold,), **card}
    made = ProbeCard(name=name, layers=(1,), hidden=WIDTH, **facts)
    return Probe.from_direction(np.eye(WIDTH)[axis], card=made)


def platt(slope: float = 1.0, intercept: float = 0.0) -> Calibration:
    """A calibration of a card."""
    return Calibration(method="platt", set="made up", n=100, slope=slope, intercept=intercept)


def call(
    *axes: Sequence[float],
    text: str = "an answer",
    n_prompt: int = N_PROMPT,
    folder: Path | None = None,
    origin: Mapping[str, Any] | None = None,
) -> ModelOutput:
    """A call whose completion tokens have these values on the first axes, at layer 1."""
    n = len(axes[0])
    rows = np.full((2, n_prompt + n, WIDTH), 100.0, dtype=np.float32)
    rows[1, n_prompt:] = 0.0
    for axis, values in enumerate(axes):
        rows[1, n_prompt:, axis] = values
    output = captured(rows, n_prompt=n_prompt, folder=folder, origin=origin)
    output.completion = text
    return output


def answers(*texts: str, heard: list[str] | None = None) -> Callable[..., ModelOutput]:
    """What a mock model says, one text per call and the last one for ever."""
    left = list(texts)

    def reply(messages: Any, *_: Any) -> ModelOutput:
        if heard is not None:
            heard.append(messages[-1].text)
        output = ModelOutput.from_content("mockllm/judge", left[0])
        output.usage = ModelUsage()
        if len(left) > 1:
            left.pop(0)
        return output

    return reply


def judge(*texts: str, heard: list[str] | None = None) -> Model:
    """A judge that says these texts in turn, and notes what it is asked."""
    return get_model("mockllm/judge", custom_outputs=answers(*texts, heard=heard), memoize=False)


def run(
    outputs: Sequence[ModelOutput] | Callable[..., ModelOutput],
    scorer: Any,
    *,
    folder: Path,
    labels: Sequence[int] | None = None,
    solver: Any = None,
    metadata: Sequence[dict[str, Any]] | None = None,
    epochs: int | Epochs | None = None,
    **options: Any,
) -> EvalLog:
    """An eval in which sample i is answered by `outputs[i]`, or by what the function says."""
    given = outputs if callable(outputs) else None
    n = len(outputs) if not callable(outputs) else len(labels or [0])
    marks = list(labels) if labels is not None else [i % 2 for i in range(n)]
    more = metadata or [{} for _ in range(n)]

    def reply(messages: Any, *rest: Any) -> ModelOutput:
        if given is not None:
            return given(messages, *rest)
        assert not callable(outputs)
        return outputs[int(messages[0].text)]

    task = Task(
        dataset=[
            Sample(id=i, input=str(i), metadata={"label": marks[i], **more[i]}) for i in range(n)
        ],
        solver=solver or generate(),
        scorer=scorer,
        epochs=epochs,
    )
    # A solver of ours asks for a model that has a lens.
    model = (
        get_model("mockllm/model", custom_outputs=reply, memoize=False)
        if solver is None
        else scripted_lens(reply)
    )
    settings = {"display": "none", "log_realtime": False, **options}
    (log,) = eval(task, model=model, log_dir=str(folder), **settings)
    return log


def scores(log: EvalLog, name: str | None = None) -> list[Score]:
    """Scores of the samples, of the only scorer or of the one that is named."""
    assert log.status == "success", log.error
    assert log.samples is not None
    made = [sample.scores or {} for sample in log.samples]
    return [each[name] if name else next(iter(each.values())) for each in made]


def metric_values(log: EvalLog, scorer: str | None = None) -> dict[str, float]:
    """Metrics by name; those over epochs and those over reduced scores together."""
    assert log.results is not None
    return {
        name: m.value
        for each in log.results.scores
        if scorer in (None, each.scorer)
        for name, m in each.metrics.items()
    }
