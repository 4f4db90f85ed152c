"""`inspect-lens probe check`: a control set through another engine, and what changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio

from inspect_lens._base.artifact import with_interval
from inspect_lens._base.shipped import model_path
from inspect_lens.collect import feed_again
from inspect_lens.data import ActivationStore
from inspect_lens.errors import SpecError
from inspect_lens.probe import MIN_GROUPS, SENTENCE_POOL, AnyProbe, fingerprint_model
from inspect_lens.train import ActivationSet, RateShift, ScoreShift, score_shift
from inspect_lens.train.judging._shift import refuse_another_model

from ._stores import (
    COPIES,
    MEMORY,
    is_file,
    pieces,
    refuse_other_source,
    refuse_other_tokens,
)


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
    if is_file(control):
        raise SpecError(
            f"--control: {control} is a file of rows, without the tokens to feed; allowed is the "
            "folder of a store"
        )
    refuse_other_source(probe, control, any_model=any_model)
    store = ActivationStore.open(control)
    harmless = [r for r in store.records() if r.n_rows and r.label is not None and not r.label]
    chosen = harmless[: limit or None]
    if not chosen:
        raise SpecError(f"--control: {control} has no harmless sample; give a control set")
    size = 4e-9 * len(probe.layers) * store.hidden * sum(r.n_rows for r in chosen)
    if COPIES * size > MEMORY:
        raise SpecError(
            f"--control: {len(chosen)} samples of {control} have {size:.2g} GB of rows, which are "
            f"held several times; allowed are {MEMORY / COPIES:g} GB; pass --limit"
        )
    ids = {r.id for r in chosen}
    texts = pieces(store, tokenizer) if SENTENCE_POOL in probe.pool else None
    before = ActivationSet.from_store(store, layers=probe.layers, pieces=texts, ids=ids)
    refuse_other_tokens(probe, control, before)
    # Their tokens alone: the rows are of every layer of the store.
    samples = [
        replace(s, acts=None) for s in store.samples() if s.record.id in ids and s.acts is not None
    ]
    fed = model.partition("/")[2]
    _refuse_another_model(before, fed, model_args)

    async def run() -> ActivationSet:
        again = await feed_again(
            model, samples, layers=probe.layers, concurrency=concurrency, model_args=model_args
        )
        return replace(
            before, model=fed, model_sha256=fingerprint_model(fed), acts=again.acts,
            capture=again.capture,
        )  # fmt: skip

    return score_shift(probe, before, anyio.run(run), n_resamples=n_resamples)


def _refuse_another_model(before: ActivationSet, fed: str, model_args: dict[str, Any]) -> None:
    """Refuse other weights than those of the store, before anything is fed to them."""
    # Quantised weights always differ from those of the store, so they are judged after they ran.
    config = Path(model_path(fed)) / "config.json"
    if "quantization" in model_args or not config.is_file():
        return
    if b"quantization_config" in config.read_bytes():
        return
    facts = before.capture
    expected = None if facts is None else facts.model_copy(update={"quantization": None})
    refuse_another_model(
        before, replace(before, model=fed, model_sha256=fingerprint_model(fed), capture=expected)
    )


def check_lines(shift: ScoreShift) -> Iterator[str]:
    """The same for people."""
    own = "which of them set its thresholds is not known"
    if shift.n_calibrated is not None:
        own = f"{shift.n_calibrated} of them set its thresholds"
    yield f"{shift.probe} on {shift.control}: {shift.n} answers of {shift.n_groups} groups, {own}"
    yield f"  fed to {shift.model}; the store is of {shift.stored_model}"
    what = " and ".join(shift.differences)
    yield (
        f"  computed with {what}"
        if what
        else "  engine, dtype and quantisation are those of the store, as far as both sides tell"
    )
    span = "" if shift.interval is None else f" {shift.interval:.4g}"
    if shift.n_groups < MIN_GROUPS:
        span = f" (no interval: {shift.n_groups} groups are too few)"
    yield (
        f"  scores moved by {shift.mean:+.4g} on average{span}, and by "
        f"{shift.largest:.4g} at most; they spread by {shift.spread:.4g}"
    )
    for one in shift.thresholds:
        head = f"  fpr={one.fpr:g} ({one.value:.4g}, for {one.statistic}): "
        outside = ""
        if one.n_outside:
            outside = f"{one.n_outside} answers are of a length that it was not set on; "
        if not one.n:
            yield f"{head}{outside}none is left to compare"
            continue
        yield (
            f"{head}{outside}{with_interval(one.n_here / one.n, one.here, '.2%')} above it here, "
            f"{with_interval(one.n_before / one.n, one.before, '.2%')} in the store; "
            f"{one.n_changed} of {one.n} changed sides {one.changed:.2%}: {_verdict(one)}"
        )
    yield (
        "  The same tokens were fed again. What the model would answer here may be other text: "
        "collect a control set here to measure that."
    )


def _verdict(one: RateShift) -> str:
    if one.holds:
        assert one.here is not None
        assert one.before is not None
        if one.here.high < one.fpr <= one.before.high:
            return (
                "the rate holds, but fewer are flagged here than in the store, and positives may "
                "be missed as well: calibrate on rows of this engine"
            )
        return "the rate holds"
    if one.holds is None:
        return f"{one.n} are too few to tell whether the rate holds"
    if one.held is False:
        return (
            "the rate does not hold, and not in the store either: these are other texts than it "
            "was set on"
        )
    return "THE RATE DOES NOT HOLD HERE: calibrate on rows of this engine"
