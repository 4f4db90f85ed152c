"""`probe_ensemble`: several probes on the same generation, and one number of all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

from inspect_ai.scorer import Score, Scorer, Target, scorer
from inspect_ai.solver import TaskState

from inspect_lens.errors import SpecError
from inspect_lens.reading import (
    CallReading,
    OnMissing,
    Over,
    ProbeReader,
    Reading,
    SampleReading,
    Source,
    read_sample,
)
from inspect_lens.reading._shared import shared_parameters

from ._metrics import auroc_metric
from ._operating import at_threshold
from ._probe import keep_tokens, no_tokens

Combine = Literal["mean", "stacked", "vote"]
ENSEMBLE: Final = "ensemble"


@scorer(metrics=[{"*": [auroc_metric()]}, at_threshold()])
@shared_parameters
def probe_ensemble(
    probes: Mapping[str, str | Path] | Sequence[str | Path],
    combine: Combine = "mean",
    weights: Sequence[float] | None = None,
    bias: float = 0.0,
    threshold: float | None = None,
    source: Source = "auto",
    check_model: bool = True,
    token_scores: bool = True,
    tokenizer: str | None = None,
    over: Over = "last",
    roles: Sequence[str] | None = None,
    on_missing: OnMissing = "error",
    name: str | None = None,
) -> Scorer:
    """Score each sample with several probes; the value is a dict with one entry each.

    Scores of different probes have different units, so that their mean says nothing. The entry
    `ensemble` combines calibrated log odds, or decisions: `mean` is the mean of the log odds that
    the calibrations of the cards give, `stacked` a weighted sum of them (weights from
    `inspect_lens.train.stack_weights`), `vote` the share of probes above their own threshold.
    Each probe reads the tokens of its own card.

    Args:
        probes: names or paths, by the key of their entry, or as a list, whose keys are the names.
            Objects are not taken here: a log could not show which they were.
        combine: `mean`, `stacked` or `vote`.
        weights: of `stacked`, in the order of the probes.
        bias: of `stacked`.
        threshold: of the entry `ensemble`, for its verdict and for `ensemble_recall` and
            `ensemble_fpr` of the metric `at_threshold`; no card holds one.
        over: `last` reads the call of the sample's answer, or the last one of `roles`; `all` reads
            every call, each choice by itself. Each entry is the largest of its own;
            `metadata["turns"]` says of which turn.
        name: under which tables show the score; what is combined by default.

    Returns:
        The scorer. A sample in which one probe has no token to read is unscored.

    Raises:
        ArtifactError: no such probe; while scoring, activations that are missing, or another
            model.
        SpecError: an argument is wrong, or a card lacks the calibration or threshold that
            `combine` needs.

    Source:
        arXiv:2604.13386 for combining calibrated log odds.

    Example:
        ```python
        from inspect_ai import score
        from inspect_ai.log import read_eval_log

        from inspect_lens.scorer import probe_ensemble

        probes = {"lr": "organism/deception-lr", "md": "organism/deception-md"}
        log = score(read_eval_log("logs/honesty.eval"), probe_ensemble(probes), action="overwrite")
        value = log.samples[0].scores["probe_ensemble"].value
        assert set(value) == {"lr", "md", "ensemble"}
        ```
    """
    readers = {
        key: ProbeReader.of(
            path, source=source, check_model=check_model, tokenizer=tokenizer, over=over,
            roles=roles, on_missing=on_missing,
        )
        for key, path in _named(probes).items()
    }  # fmt: skip
    _check(readers, combine, weights)
    title = name or f"{combine} of {', '.join(readers)}"

    async def score(state: TaskState, target: Target) -> Score:
        found: dict[str, SampleReading[Reading]] = {}
        for key, reader in readers.items():
            found[key] = await read_sample(reader, state)
            if not found[key].read:
                return no_tokens(found[key], reader.positions)
        # The combination is of one call: probes that fire in different turns do not add up.
        both = _common(found)
        if not both:
            first = next(iter(readers))
            return no_tokens(found[first], readers[first].positions)
        values = [_combine([r.reading for r in call], combine, weights, bias) for call in both]
        value = max(values)
        readings = {key: one.top.reading for key, one in found.items()}
        shared = replace(next(iter(found.values())), read=[call[0] for call in both])
        facts = shared.facts(both[values.index(value)][0])
        facts["turns"] = {key: one.top.turn.number for key, one in found.items()}
        facts["turns"][ENSEMBLE] = facts["turn"]
        if over == "all":
            facts |= {"turn_values": values, "fpr_bound": None}
        texts = [one.top.reading.explain() + one.say() for one in found.values()]
        return Score(
            value={**{key: r.value for key, r in readings.items()}, ENSEMBLE: value},
            answer=_verdict(value, threshold),
            explanation=" ".join(texts),
            metadata={"name": title}
            | _metadata(readings, combine, value, threshold)
            | facts
            | await keep_tokens(found.values() if token_scores else [], labels=found),
        )

    return score


def _common(found: Mapping[str, SampleReading[Reading]]) -> list[list[CallReading[Reading]]]:
    """The readings of each call that every probe read, in the order of the calls."""
    by_call = [{(o.turn.number, o.turn.choice): o for o in one.read} for one in found.values()]
    shared = [key for key in by_call[0] if all(key in one for one in by_call)]
    return [[one[key] for one in by_call] for key in shared]


def _named(probes: Mapping[str, str | Path] | Sequence[str | Path]) -> dict[str, str | Path]:
    if isinstance(probes, str | Path) or not probes:
        raise SpecError(
            f"probes={probes!r}; allowed is a dict or a list of names or paths, at least one; for "
            "one probe use probe_score"
        )
    named = dict(probes) if isinstance(probes, Mapping) else {str(p): p for p in probes}
    wrong = [value for value in named.values() if not isinstance(value, str | Path)]
    if wrong or ENSEMBLE in named or len(named) < len(probes):
        raise SpecError(
            f"probes={sorted(named)}{f' with {wrong[0]!r}' if wrong else ''}; allowed are names or "
            f"paths, each once, under keys other than {ENSEMBLE!r}; save a probe and pass its path"
        )
    return named


def _check(
    readers: Mapping[str, ProbeReader], combine: str, weights: Sequence[float] | None
) -> None:
    if combine not in get_args(Combine):
        raise SpecError(f"combine={combine!r}; allowed are {', '.join(get_args(Combine))}")
    if (combine == "stacked") != (weights is not None) or (
        weights is not None and len(weights) != len(readers)
    ):
        raise SpecError(
            f"weights={weights!r} with combine={combine!r} of {len(readers)} probes; allowed is "
            "one weight per probe with 'stacked', and none otherwise"
        )
    needed = "threshold" if combine == "vote" else "calibration"
    lacking = [name for name, reader in readers.items() if getattr(reader, needed) is None]
    if lacking:
        raise SpecError(
            f"probes: {', '.join(lacking)} have no {needed} on their card, without which their "
            f"scores cannot be combined by {combine!r}; allowed are probes that have one; add it "
            "with `inspect-lens probe calibrate`"
        )


def _combine(
    readings: Sequence[Reading], combine: str, weights: Sequence[float] | None, bias: float
) -> float:
    if combine == "vote":
        return sum(bool(r.is_above) for r in readings) / len(readings)
    logits = [r.reader.calibration.logit(r.value) for r in readings if r.reader.calibration]
    if weights is None:
        return sum(logits) / len(logits)
    return bias + sum(w * z for w, z in zip(weights, logits, strict=True))


def _verdict(value: float, threshold: float | None) -> str | None:
    if threshold is None:
        return None
    return "above threshold" if value > threshold else "below threshold"


def _metadata(
    readings: Mapping[str, Reading], combine: str, value: float, threshold: float | None
) -> dict[str, Any]:
    each = {name: reading.metadata() for name, reading in readings.items()}
    calibrations = {
        name: facts["calibration"] for name, facts in each.items() if "calibration" in facts
    }
    if combine != "vote":
        # The value is log odds already.
        calibrations[ENSEMBLE] = {"method": "temperature", "slope": 1.0, "set": "log odds"}
        z = math.exp(-abs(value))
        probability = (1.0 if value >= 0 else z) / (1.0 + z)
    else:
        probability = None
    return {
        "combine": combine,
        "probes": each,
        "threshold": None,
        "thresholds": {n: f["threshold"] for n, f in each.items()} | {ENSEMBLE: threshold},
        "calibrations": calibrations,
        "probability": probability,
    }
