"""What `score_shift` says of two engines, and what it leaves to others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from inspect_lens._cli._jobs import check_lines
from inspect_lens.errors import SpecError
from inspect_lens.probe import CaptureFacts, Probe, ProbeCard
from inspect_lens.probe.statistics._compare import CELLS, draws_of
from inspect_lens.train import ActivationSet, ScoreShift, calibrate_threshold, score_shift

MADE = CaptureFacts(engine="vllm 0.32.0", dtype="bfloat16", tokenizer_sha256="a" * 64)


def harmless(
    n: int,
    *,
    lengths: Sequence[int] = (3,),
    groups: int | None = None,
    mean: float = 0.0,
    seed: int = 0,
) -> ActivationSet:
    rng = np.random.default_rng(seed)
    return ActivationSet(
        name="control", model="org/one", layers=(1,), labels=np.zeros(n, dtype=bool),
        acts=tuple(
            rng.normal(mean, 1.0, (1, lengths[i % len(lengths)], 4)).astype(np.float32)
            for i in range(n)
        ),
        groups=tuple(str(i % (groups or n)) for i in range(n)), model_sha256="b" * 64, capture=MADE,
    )  # fmt: skip


def probe_on(data: ActivationSet, *over: Any) -> Probe:
    bare = Probe.from_direction(np.ones(4), card=ProbeCard(name="t/p", layers=(1,), hidden=4))
    held = [calibrate_threshold(bare, data, 0.05, statistic=s, allow_few=True) for s in over]
    return replace(bare, card=bare.card.model_copy(update={"thresholds": tuple(held)}))


def moved(data: ActivationSet, by: float, **facts: Any) -> ActivationSet:
    return replace(data, acts=tuple(a + np.float32(by) for a in data.acts), **facts)


def said(shift: ScoreShift) -> str:
    return "\n".join(check_lines(shift))


def test_a_rate_that_never_held_on_these_texts_is_not_the_engines_fault() -> None:
    probe = probe_on(harmless(400), "answer", "alarm", "token")
    others = harmless(400, mean=2.0, seed=1)
    shift = score_shift(probe, others, others, n_resamples=50)
    assert shift.largest == 0.0
    for one in shift.thresholds:
        assert (one.holds, one.held) == (False, False)
    assert said(shift).count("not in the store either: these are other texts") == 3
    assert "HERE" not in said(shift)
    own = harmless(400)
    shift = score_shift(probe, own, moved(own, 1.0), n_resamples=50)
    assert shift.thresholds[0].holds is False
    assert shift.thresholds[0].held is not False
    assert "THE RATE DOES NOT HOLD HERE" in said(shift)


def test_scores_that_fell_keep_the_rate_and_that_positives_may_be_missed_is_said() -> None:
    own = harmless(400)
    probe = probe_on(own, "answer")
    shift = score_shift(probe, own, moved(own, -2.0), n_resamples=50)
    assert (shift.thresholds[0].holds, shift.thresholds[0].n_here) == (True, 0)
    assert "fewer are flagged here than in the store, and positives may be missed" in said(shift)
    assert "the rate holds" in said(score_shift(probe, own, own, n_resamples=50))
    assert "missed" not in said(score_shift(probe, own, own, n_resamples=50))


def test_answers_of_lengths_that_the_threshold_was_not_set_on_are_left_out_and_counted() -> None:
    probe = probe_on(harmless(400, lengths=(3, 4)), "answer", "alarm", "token")
    mixed = harmless(400, lengths=(3, 9, 4, 1), seed=1)
    answer, alarm, token = score_shift(probe, mixed, moved(mixed, 0.1), n_resamples=0).thresholds
    assert (answer.n_outside, answer.n) == (200, 200)
    covered = mixed.subset([i for i in range(400) if mixed.acts[i].shape[1] in (3, 4)])
    assert answer.n_before == int((covered.scores(probe) > answer.value).sum())
    assert (alarm.n_outside, alarm.n) == (0, 400), "a shorter answer, or as much of a longer one"
    assert (token.n_outside, token.n) == (0, 100 * (3 + 9 + 4 + 1))
    longer = harmless(60, lengths=(9,), seed=2)
    shift = score_shift(probe, longer, moved(longer, 0.1), n_resamples=0)
    none = shift.thresholds[0]
    assert (none.n_outside, none.n, none.here, none.holds) == (60, 0, None, None)
    assert "60 answers are of a length that it was not set on; none is left" in said(shift)
    assert ScoreShift.model_validate_json(shift.model_dump_json()) == shift


def test_the_interval_of_the_shift_needs_draws_and_groups() -> None:
    def shift(groups: int | None, n_resamples: int) -> ScoreShift:
        data = harmless(64, groups=groups)
        here = replace(data, acts=tuple(a + np.float32(i % 7) for i, a in enumerate(data.acts)))
        return score_shift(probe_on(data, "answer"), data, here, n_resamples=n_resamples)

    few, enough, undrawn = shift(7, 300), shift(8, 300), shift(None, 0)
    assert few.interval is None
    assert "(no interval: 7 groups are too few)" in said(few)
    assert undrawn.interval is None
    assert "nan" not in said(undrawn)
    assert "too few groups" not in said(undrawn)
    assert enough.interval is not None
    assert enough.interval.low < enough.mean < enough.interval.high
    assert shift(8, 300) == enough, "the seed decides"


def test_only_harmless_answers_are_compared() -> None:
    data = harmless(60)
    probe = probe_on(data, "answer")
    labels = np.arange(60) % 3 == 0
    mixed = replace(data, labels=labels)
    acts = [a + np.float32(9 * label) for a, label in zip(data.acts, labels, strict=True)]
    shift = score_shift(probe, mixed, replace(mixed, acts=tuple(acts)), n_resamples=0)
    assert (shift.n, shift.largest, shift.thresholds[0].n) == (40, 0.0, 40)


def test_draws_are_made_in_pieces_of_bounded_memory() -> None:
    parts = [len(part) for part in draws_of(5000, None, 1000, np.random.default_rng(0))]
    assert max(parts) * 5000 <= CELLS < 1000 * 5000
    assert sum(parts) == 1000


@pytest.mark.parametrize(
    ("here", "names"),
    [
        ({"capture": MADE.model_copy(update={"tokenizer_sha256": "c" * 64})}, "tokenizer"),
        ({"model_sha256": "c" * 64}, "weights"),
        ({"model_sha256": "c" * 64, "capture": None}, "weights"),
        (
            {"model_sha256": "c" * 64, "capture": MADE.model_copy(update={"quantization": "fp8"})},
            "",
        ),
        ({"model_sha256": None, "capture": None}, ""),
    ],
)
def test_another_model_is_no_shift_of_the_engine(here: dict[str, Any], names: str) -> None:
    data = harmless(60)
    probe, other = probe_on(data, "answer"), moved(data, 0.1, model="org/two", **here)
    if names:
        with pytest.raises(SpecError, match=f"the {names} of 'org/two' are not those of 'org/one'"):
            score_shift(probe, data, other)
        return
    shift = score_shift(probe, data, other, n_resamples=0)
    assert (shift.model, shift.stored_model) == ("org/two", "org/one")
    assert "fed to org/two; the store is of org/one" in said(shift)
