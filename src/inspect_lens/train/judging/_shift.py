"""What another engine does to a probe's scores and to the rates of its thresholds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from inspect_lens._base.arguments import judged_arguments
from inspect_lens.errors import SpecError
from inspect_lens.probe import MIN_GROUPS, AnyProbe, Interval, draws_of, rate_interval
from inspect_lens.spec import Value
from inspect_lens.train.sets._dataset import ActivationSet
from inspect_lens.train.sets._splits import find_seen

__all__ = ["RateShift", "ScoreShift", "score_shift"]


class RateShift(Value):
    """One threshold of a card on the same control answers, as two engines compute them."""

    statistic: str = Field(description="What is compared with it, in words.")
    value: float = Field(description="The threshold; a score strictly above it is flagged.")
    fpr: float = Field(description="False positive rate that it was set for.")
    n_outside: int
    """Answers of a length that the threshold does not hold for; left out here."""
    n: int = Field(description="Control answers, or their tokens, that were compared.")
    n_before: int = Field(description="Of these, above the threshold as they were stored.")
    before: Interval | None
    """Of the rate as they were stored; None where `n` is 0, as the others."""
    n_here: int = Field(description="Of these, above the threshold as the model computes them now.")
    here: Interval | None = Field(description="Of the rate as the model computes them now.")
    n_changed: int = Field(description="On the other side of the threshold than before.")
    changed: Interval | None = Field(description="Of the share that changed sides.")

    @property
    def holds(self) -> bool | None:
        """Whether no more are flagged here than the rate that it was set for allows.

        None where the control set is too small to tell: its interval reaches twice that rate.
        """
        return self._holds(self.here)

    @property
    def held(self) -> bool | None:
        """The same of what was stored: where False, these are other texts than it was set on."""
        return self._holds(self.before)

    def _holds(self, seen: Interval | None) -> bool | None:
        if seen is not None and seen.low > self.fpr:
            return False
        return None if seen is None or seen.high > 2 * self.fpr else True


class ScoreShift(Value):
    """How far a probe's scores moved on one control set, and what that does to its thresholds."""

    probe: str
    control: str = Field(description="Name of the control set.")
    model: str = Field(description="What the tokens were fed to: the model of the new rows.")
    stored_model: str = Field(description="What computed the stored rows.")
    n_calibrated: int | None
    """Of these answers, those that a threshold of the card was set on; None where the card does not
    list them."""
    n: int = Field(description="Harmless answers that were compared.")
    n_groups: int = Field(description="Independent groups of these.")
    differences: tuple[str, ...]
    """What is computed differently here than in the store, in words; empty where nothing is known
    to differ."""
    mean: float = Field(description="Mean of new minus stored score of an answer.")
    interval: Interval | None
    """Of the mean; groups are drawn. None without draws, and where groups are fewer than
    `MIN_GROUPS`."""
    largest: float = Field(description="Largest absolute difference of one answer.")
    spread: float = Field(description="Standard deviation of the stored scores, to compare with.")
    thresholds: tuple[RateShift, ...] = ()


@judged_arguments
def score_shift(
    probe: AnyProbe,
    before: ActivationSet,
    here: ActivationSet,
    *,
    n_resamples: int = 10_000,
    seed: int = 0,
) -> ScoreShift:
    """Compare what a probe says of the same tokens in two engines.

    Answers are compared one by one. The rates are those of the harmless answers.

    Args:
        probe: with thresholds on its card.
        before: harmless answers as they were stored; positives are left out.
        here: the same samples in the same order, with the rows of the other engine, as
            `dataclasses.replace(before, model=…, acts=…, capture=…)` makes it of `feed_again`.
        n_resamples: bootstrap draws for the mean difference; 0 leaves its interval out.
        seed: of the bootstrap.

    Raises:
        SpecError: the sets have other samples, none that is harmless, other tokenizers, or other
            weights in equal quantisation, as far as both sides tell.

    Example:
        ```python
        from dataclasses import replace

        from inspect_lens.train import ActivationSet, LDAProbe, score_shift, train_probe

        train, control = (
            ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "control")
        )
        probe = train_probe(LDAProbe(), train, name="mine/lda", control=control)
        rounded = replace(
            control, acts=tuple(a.astype("float16").astype("float32") for a in control.acts)
        )
        shift = score_shift(probe, control, rounded, n_resamples=200)
        assert shift.n_calibrated == shift.n and shift.largest < 0.01 * shift.spread
        ```
    """
    if before.ids != here.ids:
        raise SpecError("here: other samples than `before`; allowed are the same, in their order")
    old, new = before.negatives(), here.negatives()
    if not len(old):
        raise SpecError(f"{before.name}: no sample is harmless; allowed is a control set")
    refuse_another_model(old, new)
    scores = old.scores(probe)
    moved = new.scores(probe) - scores
    then, now, seen = old.capture, new.capture, find_seen(probe, old)
    return ScoreShift(
        probe=probe.name,
        control=before.name,
        model=here.model,
        stored_model=before.model,
        n_calibrated=None if seen is None else len(seen.get("control", ())),
        n=len(old),
        n_groups=len(set(old.groups)),
        differences=() if then is None or now is None else then.numerics.differences(now.numerics),
        mean=float(moved.mean()),
        interval=_mean_interval(moved, old.groups, n_resamples, seed),
        largest=float(np.abs(moved).max()),
        spread=float(scores.std()),
        thresholds=tuple(_rates(probe, old, new)),
    )


def refuse_another_model(old: ActivationSet, new: ActivationSet) -> None:
    """Refuse other weights: what these change is not due to engine, dtype or quantisation."""
    then, now = old.capture, new.capture
    pairs = []
    if then is not None and now is not None:
        pairs.append(("tokenizer", then.tokenizer_sha256, now.tokenizer_sha256))
    # Quantised weights are other weights, so that nothing is known where that differs.
    if then is None or now is None or then.quantization == now.quantization:
        pairs.append(("weights", old.model_sha256, new.model_sha256))
    for what, was, is_now in pairs:
        if was and is_now and was != is_now:
            raise SpecError(
                f"model: the {what} of {new.model!r} are not those of {old.model!r}, which "
                f"computed {old.name} (fingerprints {is_now[:12]} and {was[:12]}); allowed is the "
                "same model in another engine, dtype or quantisation; name that one"
            )


def _mean_interval(
    values: NDArray[np.float64], groups: Sequence[str], n_resamples: int, seed: int
) -> Interval | None:
    """Of the mean of values that come in groups, by drawing whole groups."""
    if not n_resamples or len(set(groups)) < MIN_GROUPS:
        return None
    draws = draws_of(values.size, groups, n_resamples, np.random.default_rng(seed))
    means = np.concatenate([part @ values / part.sum(axis=1) for part in draws])
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(low=float(low), high=float(high), method="cluster bootstrap")


def _rates(probe: AnyProbe, old: ActivationSet, new: ActivationSet) -> Iterator[RateShift]:
    for threshold in probe.card.thresholds:
        statistic = threshold.statistic or probe.card.answer
        length = None
        if statistic.over == "alarm" and threshold.n_tokens is not None:
            length = threshold.n_tokens[1]
        # Of a longer answer, an alarm's threshold is compared with as much as it was set on.
        read = [min(int(mask.sum()), length or mask.size) for mask in old.mask]
        kept = [i for i, n in enumerate(read) if statistic.covers(n, threshold.n_tokens)]
        values = [data.statistic(probe, statistic, length=length) for data in (old, new)]
        sides = [[one > threshold.value for one in of_set] for of_set in values]
        groups = [old.groups[i] for i in kept for _ in sides[0][i]]
        before, here = (
            np.concatenate([np.zeros(0, dtype=bool), *(side[i] for i in kept)]) for side in sides
        )
        of_before, of_here, of_changed = (
            rate_interval(hits, groups) if hits.size else None
            for hits in (before, here, before != here)
        )
        yield RateShift(
            statistic=str(statistic), value=threshold.value, fpr=threshold.fpr, n=before.size,
            n_outside=len(read) - len(kept),
            n_before=int(before.sum()), before=of_before, n_here=int(here.sum()), here=of_here,
            n_changed=int((before != here).sum()), changed=of_changed,
        )  # fmt: skip
