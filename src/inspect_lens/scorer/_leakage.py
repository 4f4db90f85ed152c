"""`leakage_baseline`: what the text alone gives away of the label, beside a probe.

A classifier needs all samples, and a scorer sees one. So the scorer notes what the text holds, and
the metrics train and judge on the samples of the eval.
"""

from __future__ import annotations

import base64
import math
import re
from typing import Any, Literal, get_args

import numpy as np
from inspect_ai.scorer import Metric, SampleScore, Score, Scorer, Target, Value, metric, scorer
from inspect_ai.solver import TaskState

from inspect_lens import probe as arithmetic
from inspect_lens.errors import SpecError
from inspect_lens.reading._shared import shared_parameters

from ._judges import shown
from ._labels import NO_BOUNDS, labelled, with_bounds

Text = Literal["completion", "prompt", "both"]
_WORD = re.compile(r"\b\w+\b")


@metric(scores="unreduced")
@shared_parameters
def words_auroc(
    label: str = "label", group: str | None = None, folds: int = 5, interval: bool = False
) -> Metric:
    """AUROC of a classifier on words, trained and judged on these samples by cross-validation.

    Each epoch is a text of its own, but the epochs of a sample share a fold, so none of them is
    judged by a classifier that saw another. Inside `grouped`, which Inspect gives reduced
    scores, the text of a sample is that of its first epoch.

    Args:
        group: key of the sample metadata that names what must share a fold, such as the scenario.
            By default it is `group` where all samples have it, else each sample is one by itself.
            Where a pair is in two folds, words that its sides share tell the wrong label.
        folds: of the cross-validation.
        interval: also give DeLong's 95% interval, as `words_auroc_low` and `words_auroc_high`;
            it takes texts as independent and the classifiers as given.

    Returns:
        The metric; NaN when a class has fewer than two groups.

    Source:
        arXiv:2509.21344: text baselines beside every probe.

    Example:
        ```python
        from inspect_ai import score
        from inspect_ai.log import read_eval_log

        from inspect_lens.scorer import leakage_baseline, words_auroc

        log = read_eval_log("logs/honesty.eval")
        metrics = [words_auroc(group="group", folds=2)]  # both sides of a pair share a fold
        log = score(log, leakage_baseline(), metrics=metrics, action="overwrite")
        assert 0.0 <= log.results.scores[0].metrics["words_auroc"].value <= 1.0
        ```
    """

    def compute(scores: list[SampleScore]) -> Value:
        area, bounds = math.nan, NO_BOUNDS
        found = labelled(scores, label)
        facts = [s.sample_metadata or {} for s in found.scores]
        key = group or ("group" if all("group" in known for known in facts) else None)
        names = found.groups if key is None else [str(known.get(key)) for known in facts]
        classes = [{n for n, y in zip(names, found.labels, strict=True) if y == c} for c in (0, 1)]
        if min(map(len, classes)) >= 2:
            ranks = arithmetic.cross_validated_words(
                [_words(s) for s in found.scores], found.labels, groups=names, folds=folds
            )
            area = arithmetic.auroc(found.labels, ranks)
            bounds = arithmetic.delong_interval(found.labels, ranks)
        return with_bounds("words_auroc", area, bounds if interval else None)

    return compute


@metric(scores="unreduced")
@shared_parameters
def length_auroc(label: str = "label", interval: bool = False) -> Metric:
    """AUROC of the length of the text, in words, whichever sign separates better.

    Args:
        interval: also give DeLong's 95% interval, as `length_auroc_low` and `length_auroc_high`.

    Returns:
        The metric: at least 0.5 by the choice of the sign; NaN when a class is missing.

    Example:
        ```python
        from inspect_ai import score
        from inspect_ai.log import read_eval_log

        from inspect_lens.scorer import leakage_baseline, length_auroc

        log = read_eval_log("logs/honesty.eval")
        log = score(
            log, leakage_baseline(), metrics=[length_auroc(interval=True)], action="overwrite"
        )
        found = log.results.scores[0].metrics
        assert found["length_auroc_low"].value <= found["length_auroc"].value
        ```
    """

    def compute(scores: list[SampleScore]) -> Value:
        found = labelled(scores, label)
        values = np.asarray(found.values, dtype=np.float64)
        area = arithmetic.auroc(found.labels, values)
        if area < 0.5:
            values, area = -values, 1.0 - area
        bounds = arithmetic.delong_interval(found.labels, values) if interval else None
        return with_bounds("length_auroc", area, bounds)

    return compute


@scorer(metrics=[words_auroc(), length_auroc()])
def leakage_baseline(text: Text = "completion") -> Scorer:
    """Record words and length of each text, to measure whether they give the label away.

    Put it beside a probe's scorer: where the text alone separates the classes as well, the probe
    may read the text and not what it is meant to find.

    Args:
        text: `completion`, `prompt` (all messages before the last answer), or `both`.

    Returns:
        The scorer. The value is the number of words. The metadata holds the distinct words and
        pairs of words as 16-bit hashes, about three characters each, so that a log can be judged
        without its text.

    Raises:
        SpecError: another text.

    Example:
        ```python
        from inspect_ai import score
        from inspect_ai.log import read_eval_log

        from inspect_lens.scorer import leakage_baseline

        log = score(
            read_eval_log("logs/honesty.eval"), leakage_baseline("prompt"), action="overwrite"
        )
        metrics = log.results.scores[0].metrics
        print(metrics["words_auroc"].value, metrics["length_auroc"].value)
        ```
    """
    if text not in get_args(Text):
        raise SpecError(f"text={text!r}; allowed are {', '.join(get_args(Text))}")

    async def score(state: TaskState, target: Target) -> Score:
        before, answer = shown(state)
        parts = {"completion": answer, "prompt": before, "both": f"{before}\n\n{answer}"}
        read = parts[text]
        hashes = arithmetic.hash_words(read).astype("<u2").tobytes()
        n = len(_WORD.findall(read))
        return Score(
            value=n,
            explanation=f"{n} words in the {text}.",
            metadata={"text": text, "words": base64.b64encode(hashes).decode()},
        )

    return score


def _words(score: SampleScore) -> np.ndarray[Any, np.dtype[np.uint16]]:
    found = (score.score.metadata or {}).get("words")
    if not isinstance(found, str):
        raise SpecError(
            f"words: sample {score.sample_id} was not scored by leakage_baseline; allowed is its "
            "own score; use words_auroc as a metric of leakage_baseline()"
        )
    return np.frombuffer(base64.b64decode(found), dtype="<u2")
