"""Grades of an oracle's answers as AObench gives them, and its numbers beside those of controls."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from inspect_ai.log import EvalLog
from inspect_ai.model import ChatMessage, ChatMessageSystem, ChatMessageUser, get_model
from inspect_ai.scorer import Metric, SampleScore, Score, Scorer, Target, Value, metric, scorer
from inspect_ai.solver import TaskState
from inspect_ai.util import collect

from evals.aobench.asking import ANSWERS
from evals.aobench.dataset import TASKS, Item, Judge
from inspect_lens.oracle import CONTROLS
from inspect_lens.probe import auroc, clopper_pearson, delong_interval, rate_interval

__all__ = ["Estimate", "aobench_answer", "aobench_metrics", "aobench_table", "estimates"]

ORACLE: Final = "oracle"
SAME_TEXT: Final = "missing_info_same_text"
"""`missing_info` where both sides show the same tokens; no part of the mean."""
_ATTEMPTS: Final = 3


class Estimate(NamedTuple):
    """A number with its 95% interval."""

    value: float
    low: float
    high: float
    n: int
    groups: int


@metric(scores="unreduced")
def aobench_metrics() -> Metric:
    """Each task's number for the oracle and for each control, and their means.

    Returns:
        The metric. A task has its name, `_low` and `_high`, and the same behind the name of each
        control. `mean` is that of the tasks, each on a scale where 0 is chance or the worst grade
        and 1 is perfect; its interval is the mean of theirs, which is never too narrow, whatever
        the tasks share. `beats_controls` counts the tasks whose interval lies above that of every
        control.
    """

    def compute(scores: list[SampleScore]) -> Value:
        made: dict[str, float] = {}
        found = estimates(scores)
        for task, arms in found.items():
            for arm, one in arms.items():
                name = task if arm == ORACLE else f"{task}_{arm}"
                made |= {name: one.value, f"{name}_low": one.low, f"{name}_high": one.high}
        made["beats_controls"] = float(sum(_beats(found[task]) for task in TASKS if task in found))
        return dict(made)

    return compute


@scorer(metrics=[aobench_metrics()])
def aobench_answer() -> Scorer:
    """Grade what an oracle and its controls answered, as the task of the sample says.

    The value is 1 or 0, a grade from 1 to 5, or the log odds of yes. The model of the role
    `grader` judges, asked as the clone's script asks.

    Returns:
        The scorer. Answers and values of all arms are in the metadata under `arms`. A sample
        without a token to show, or whose answer the judge did not grade, is unscored.
    """

    async def score(state: TaskState, target: Target) -> Score:
        item = Item.model_validate(state.metadata)
        answers: list[Any] = state.store.get(ANSWERS) or []
        if len(answers) < len(item.contexts):
            return Score.unscored(
                reason="no_tokens", explanation="The context is too short to show these tokens."
            )
        names = [ORACLE, *(c for c in CONTROLS if c in answers[0]["controls"])]
        said = {name: [_said(answer, name) for answer in answers] for name in names}
        values = await collect(
            *(_grade(item, name, said[name], answers[0], target.text) for name in names)
        )
        arms = {
            name: {"answer": "\n\n".join(said[name]), "value": value}
            for name, value in zip(names, values, strict=True)
        }
        own = arms[ORACLE]
        if own["value"] is None:
            return Score.unscored(
                reason="scoring_failed", metadata={"arms": arms},
                explanation="The judge gave no grade, or neither yes nor no was likely.",
            )  # fmt: skip
        return Score(
            value=own["value"], answer=str(own["answer"]), metadata={"arms": arms},
            explanation=" ".join(f"{name}: {arm['value']!r}." for name, arm in arms.items()),
        )  # fmt: skip

    return score


def _said(answer: Mapping[str, Any], arm: str) -> str:
    return str(answer["answer"] if arm == ORACLE else answer["controls"][arm])


async def _grade(
    item: Item, arm: str, said: list[str], answer: Mapping[str, Any], target: str
) -> float | None:
    """The value of one arm; None where there is none."""
    if item.rule == "log_odds":
        odds = answer["log_odds"].get(arm)
        return None if odds is None else float(odds)
    if item.rule == "contains":
        return float(_bare(target) in _bare(said[0]))
    if item.rule == "number":
        number = re.search(r"-?\d+", said[0])
        return float(number is not None and int(number[0]) == int(target))
    assert item.judge is not None
    return await _judged(item.judge, said)


def _bare(text: str) -> str:
    return text.rstrip(".!?,;:").strip().lower()


async def _judged(judge: Judge, said: list[str]) -> float | None:
    """The grader's grade; it is asked again where it gives none."""
    answers = dict(zip(("response_a", "response_c"), said, strict=False)) | {"ao_response": said[0]}
    asked: list[ChatMessage] = [
        ChatMessageSystem(content=judge.system),
        ChatMessageUser(content=judge.template.format(**judge.fields, **answers)),
    ]
    model = get_model(role="grader", required=True)
    for _ in range(_ATTEMPTS):
        found = _read(judge, (await model.generate(asked)).completion)
        if found is not None:
            return found
    return None


def _read(judge: Judge, text: str) -> float | None:
    """The grade in a judge's JSON; a category that it made up counts as wrong."""
    body = re.search(r"\{.*\}", text, re.DOTALL)
    try:
        grade = json.loads(body[0]).get(judge.key) if body else None
    except ValueError:
        return None
    if judge.key == "category":
        return float(grade in judge.good) if isinstance(grade, str) else None
    return float(grade) if isinstance(grade, int | float) and 1 <= grade <= 5 else None


class _Row(NamedTuple):
    """One graded answer of one arm."""

    item: Item
    value: float


def estimates(scores: Sequence[SampleScore]) -> dict[str, dict[str, Estimate]]:
    """Number and interval of each task and arm, and under `mean` those of all tasks.

    Args:
        scores: of `aobench_answer`, with the samples' metadata.

    Returns:
        By task, then `oracle` and controls. A task of several parts has the mean of these and of
        their bounds.
    """
    rows: dict[str, dict[str, list[_Row]]] = {}
    for sample in scores:
        item = Item.model_validate(sample.sample_metadata)
        arms: Mapping[str, Any] = (sample.score.metadata or {}).get("arms", {})
        if not arms or arms[ORACLE]["value"] is None:
            continue
        for arm, one in arms.items():
            if one["value"] is not None:
                rows.setdefault(item.task, {}).setdefault(arm, []).append(_Row(item, one["value"]))
    made = {
        task: {arm: _task(found) for arm, found in rows[task].items()}
        for task in TASKS
        if task in rows
    }
    kinds = {task: next(iter(arms.values()))[0].item.kind for task, arms in rows.items()}
    names = dict.fromkeys(arm for arms in made.values() for arm in arms)
    made["mean"] = {
        arm: _mean([_scaled(kinds[task], arms[arm]) for task, arms in made.items() if arm in arms])
        for arm in names
    }
    same = {
        arm: [row for row in found if row.item.condition in ("A_complete", "C_forced")]
        for arm, found in rows.get("missing_info", {}).items()
    }
    if any(row.item.condition == "C_forced" for row in same.get(ORACLE, ())):
        made[SAME_TEXT] = {arm: _task(found) for arm, found in same.items()}
    return made


def _task(rows: list[_Row]) -> Estimate:
    parts: dict[str, list[_Row]] = {}
    for row in rows:
        parts.setdefault(row.item.part, []).append(row)
    return _mean([_part(found) for found in parts.values()])


def _part(rows: list[_Row]) -> Estimate:
    values = [row.value for row in rows]
    groups = [row.item.group for row in rows]
    counts = (len(rows), len(set(groups)))
    match rows[0].item.kind:
        case "auroc":
            labels = [int(bool(row.item.label)) for row in rows]
            bounds = delong_interval(labels, values, groups=groups)
            return Estimate(auroc(labels, values), bounds.low, bounds.high, *counts)
        case "share":
            bounds = rate_interval(np.array(values) > 0, groups)
            return Estimate(math.fsum(values) / len(values), bounds.low, bounds.high, *counts)
        case _:
            return _of_grades(np.array(values), groups)


def _of_grades(values: np.ndarray[Any, np.dtype[np.float64]], groups: list[str]) -> Estimate:
    """Mean of grades; its variance is that of the groups' sums about it (Cochran 1977, 2.11)."""
    from scipy.stats import t

    codes = np.unique(groups, return_inverse=True)[1]
    mean, k = float(values.mean()), int(codes.max()) + 1
    away = np.bincount(codes, weights=values - mean)
    if np.allclose(away, 0.0):  # of equal fractions no mean is exact
        # Nothing to measure a spread by: as careful as of as many rights and wrongs.
        exact = clopper_pearson(round(k * (mean - 1) / 4), k)
        return Estimate(mean, 1 + 4 * exact.low, 1 + 4 * exact.high, values.size, k)
    half = math.nan
    if k > 1:
        half = float(t.ppf(0.975, k - 1) * math.sqrt(k / (k - 1) * (away**2).sum()) / values.size)
    return Estimate(mean, max(1.0, mean - half), min(5.0, mean + half), values.size, k)


def _mean(parts: Sequence[Estimate]) -> Estimate:
    """Mean of numbers and of their bounds."""
    if not parts:
        return Estimate(math.nan, math.nan, math.nan, 0, 0)
    value, low, high = (math.fsum(p[i] for p in parts) / len(parts) for i in range(3))
    return Estimate(value, low, high, sum(p.n for p in parts), sum(p.groups for p in parts))


def _scaled(kind: str, one: Estimate) -> Estimate:
    """A number where chance, or the worst grade, is 0, and perfect is 1."""
    zero, unit = {"auroc": (0.5, 0.5), "scale": (1.0, 4.0)}.get(kind, (0.0, 1.0))
    value, low, high = ((number - zero) / unit for number in one[:3])
    return one._replace(value=value, low=low, high=high)


def _beats(arms: Mapping[str, Estimate]) -> bool:
    """Whether the oracle's interval lies above that of every control."""
    controls = [one.high for arm, one in arms.items() if arm != ORACLE]
    # Of an interval that is not known nothing is above.
    return ORACLE in arms and bool(controls) and all(arms[ORACLE].low > high for high in controls)


def aobench_table(log: EvalLog) -> str:
    """The numbers of a log as a Markdown table.

    Args:
        log: of `aobench`, with its samples.

    Returns:
        A line for each task, with the number of answers and of groups, and 95% intervals. Bold:
        the oracle's interval lies above that of every control.
    """
    scores = [
        SampleScore(score=score, sample_id=sample.id, sample_metadata=sample.metadata)
        for sample in log.samples or []
        for name, score in (sample.scores or {}).items()
        if name == "aobench_answer"
    ]
    found = estimates(scores)
    names = list(dict.fromkeys(arm for arms in found.values() for arm in arms))
    lines = [
        f"| task | n | groups | {' | '.join(name.replace('_', ' ') for name in names)} |",
        "|---|--:|--:|" + "---|" * len(names),
    ]
    for task, arms in found.items():
        shown = {
            arm: f"{one.value:.2f} [{one.low:.2f}, {one.high:.2f}]" for arm, one in arms.items()
        }
        if _beats(arms):
            shown[ORACLE] = f"**{shown[ORACLE]}**"
        first = next(iter(arms.values()), Estimate(math.nan, math.nan, math.nan, 0, 0))
        cells = [task, str(first.n), str(first.groups), *(shown.get(name, "") for name in names)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
