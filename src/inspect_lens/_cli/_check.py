"""`inspect-lens probe check`: a control set through another engine, and what changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anyio

from inspect_lens.collect import feed_again
from inspect_lens.data import ActivationStore
from inspect_lens.errors import SpecError
from inspect_lens.probe import SENTENCE_POOL, AnyProbe, Interval
from inspect_lens.train import ActivationSet, ScoreShift, score_shift

from ._stores import judged_set, pieces


def check_job(
    probe: AnyProbe,
    model: str,
    control: str,
    *,
    limit: int,
    concurrency: int,
    model_args: dict[str, Any],
    any_model: bool,
    tokenizer: str,
    n_resamples: int,
) -> ScoreShift:
    """Feed a control set again, and compare."""
    if not probe.card.thresholds:
        raise SpecError(
            f"probe {probe.name!r} has no threshold, so there is no rate to check; set one with "
            "inspect-lens probe calibrate"
        )
    judged_set(probe, control, any_model=any_model, tokenizer=tokenizer)
    store = ActivationStore.open(control)
    texts = pieces(store, tokenizer) if SENTENCE_POOL in probe.pool else None
    before = ActivationSet.from_store(store, layers=probe.layers, pieces=texts)
    chosen = [i for i, label in enumerate(before.labels) if not label][: limit or None]
    if not chosen:
        raise SpecError(f"--control: {control} has no harmless sample; give a control set")
    before = before.subset(chosen)
    wanted = set(before.ids)
    samples = [s for s in store.samples() if s.record.id in wanted and s.acts is not None]

    async def run() -> ActivationSet:
        again = await feed_again(
            model, samples, layers=probe.layers, concurrency=concurrency, model_args=model_args
        )
        return replace(before, acts=again.acts, capture=again.capture)

    return score_shift(probe, before, anyio.run(run), n_resamples=n_resamples)


def check_lines(shift: ScoreShift) -> Iterator[str]:
    """The same for people."""
    own = "which of them set its thresholds is not known"
    if shift.n_calibrated is not None:
        own = f"{shift.n_calibrated} of them set its thresholds"
    yield f"{shift.probe} on {shift.control}: {shift.n} answers of {shift.n_groups} groups, {own}"
    what = " and ".join(shift.differences)
    yield (
        f"  computed with {what}"
        if what
        else ("  engine, dtype and quantisation are those of the store, as far as both sides tell")
    )
    yield (
        f"  scores moved by {shift.mean:+.4g} on average {_span(shift.interval, '.4g')}, and by "
        f"{shift.largest:.4g} at most; they spread by {shift.spread:.4g}"
    )
    for one in shift.thresholds:
        said = {
            True: "the rate holds",
            False: "THE RATE DOES NOT HOLD HERE: calibrate on rows of this engine",
            None: f"{one.n} are too few to tell whether the rate holds",
        }[one.holds]
        yield (
            f"  fpr={one.fpr:g} ({one.value:.4g}, for {one.statistic}): "
            f"{one.n_here / one.n:.2%} {_span(one.here, '.2%')} above it here, "
            f"{one.n_before / one.n:.2%} {_span(one.before, '.2%')} in the store; "
            f"{one.n_changed} of {one.n} changed sides {_span(one.changed, '.2%')}: {said}"
        )
    yield (
        "  The same tokens were fed again. What the model would answer here may be other text: "
        "collect a control set here to measure that."
    )


def _span(interval: Interval, form: str) -> str:
    return f"[{interval.low:{form}}, {interval.high:{form}}]"
