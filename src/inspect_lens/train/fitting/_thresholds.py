"""What other sets add to a card: thresholds for a statistic of a probe, and probabilities."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize_scalar
from sklearn.isotonic import IsotonicRegression

from inspect_lens._base.arguments import judged_arguments
from inspect_lens.errors import SpecError
from inspect_lens.probe import (
    AnyProbe,
    Calibration,
    ProbabilityMap,
    Statistic,
    Threshold,
    brier_score,
    conformal_threshold,
    count_groups,
    expected_calibration_error,
    is_learned,
    rate_interval,
    required_negatives,
    smallest_rate,
    split_classes,
)
from inspect_lens.spec import Numerics, check_word
from inspect_lens.train.families._ensemble import fit_platt
from inspect_lens.train.sets._dataset import ActivationSet

__all__ = ["calibrate", "calibrate_threshold", "fit_threshold"]


@judged_arguments
def fit_threshold(
    control_scores: ArrayLike,
    fpr: float = 0.01,
    *,
    statistic: Statistic | None = None,
    n_tokens: tuple[int, int] | None = None,
    control: str = "control",
    control_sha256: str | None = None,
    groups: Sequence[Hashable] | None = None,
    allow_few: bool = False,
) -> Threshold:
    """Set a threshold that new control samples exceed with probability at most `fpr`.

    Args:
        control_scores: (samples,) scores of harmless samples, written by the same model.
        fpr: false positive rate to allow.
        statistic: what the scores are, which the threshold acts on alone; None for scores of
            whole answers by the pool of the probe.
        n_tokens: tokens of the shortest and the longest control answer.
        control: name of the control set.
        control_sha256: its hash.
        groups: (samples,) what is independent, such as the scenario; None takes samples. Groups
            are what is counted: ten answers to one question are one. Where they hold several
            samples and are as many as the rate asks for (99 for 1%), each has the same weight
            in the quantile (`Threshold.rule`); fewer cannot have it, and samples are counted.
        allow_few: accept fewer than `required_negatives(fpr)` groups.

    Returns:
        The threshold, with the realised rate and its interval: Clopper and Pearson's of
        independent samples, else of as many as the groups are worth (Korn and Graubard 1998).

    Raises:
        SpecError: too few samples or groups, or a score is NaN.

    Source:
        Rule and limits: `conformal_threshold`, `required_negatives`.

    Example:
        ```python
        import numpy as np

        from inspect_lens.train import fit_threshold

        control = np.random.default_rng(0).standard_normal(500)
        threshold = fit_threshold(control, fpr=0.01)
        assert threshold.n_above <= 5
        print(threshold.value, threshold.interval)
        ```
    """
    scores = np.asarray(control_scores, dtype=np.float64).ravel()
    need = required_negatives(fpr)
    found = count_groups(np.zeros(scores.size), groups).total
    if found < need and not allow_few:
        size = f"{scores.size}"
        size += "" if found == scores.size else f", but {found} independent groups"
        larger = ""
        with suppress(SpecError):  # so few show none
            larger = f"ask for fpr={smallest_rate(found):g}, the smallest rate that {found} can "
            larger += "show, "
        raise SpecError(
            f"control_scores: {size} of {control!r} for a false positive rate of {fpr:g}; allowed "
            f"are {need} or more, as fewer cannot show that rate; {larger}score more control "
            "samples of other groups, or pass allow_few=True and read the interval"
        )
    by_group = groups is not None and found < scores.size and found + 1 >= 1.0 / fpr - 1e-9
    value = conformal_threshold(scores, fpr, groups=groups if by_group else None)
    above = scores > value
    return Threshold(
        value=value,
        statistic=statistic,
        n_tokens=n_tokens,
        fpr=fpr,
        control=control,
        control_sha256=control_sha256,
        n_control=scores.size,
        n_groups=None if groups is None else found,
        n_above=int(above.sum()),
        interval=rate_interval(above, groups),
        rule="groups" if by_group else "samples",
    )


@judged_arguments
def calibrate_threshold(
    probe: AnyProbe,
    control: ActivationSet,
    fpr: float = 0.01,
    *,
    statistic: Statistic | str = "answer",
    length: int | None = None,
    allow_few: bool = False,
) -> Threshold:
    """Set a threshold of a probe for the statistic that it will act on.

    For `answer` it is compared with the score of a whole answer. For `alarm` it is compared with
    the running score after every token, so each control answer counts by the largest value that it
    reaches up to token `length`; and as longer answers have more chances, it is the larger of the
    conformal quantiles of all and of those of that length. For `token`, each token of an answer
    counts, and answers are the groups.

    Args:
        probe: whose card gets the threshold.
        control: harmless answers of the same model. Positive ones are left out, and
            `Threshold.n_left_out` counts them.
        fpr: false positive rate to allow.
        statistic: `answer`, `alarm` or `token`, or one with a pool, such as `alarm:ema:0.1`.
        length: of `alarm`, tokens up to which it holds; by default the longest length that enough
            control groups have to show the rate (`required_negatives`), else to have a quantile of
            their own (1 / `fpr`), else that all groups have.
        allow_few: as in `fit_threshold`, and for a `length` that fewer than 1 / `fpr` control
            groups have.

    Raises:
        SpecError: as `fit_threshold`; too few control groups are as long as `length`, so that
            nothing is known of such answers; or the statistic takes none.

    Source:
        Split conformal prediction as in `conformal_threshold`, of the supremum of a trajectory; the
        larger of two quantiles as in Mondrian prediction (Vovk et al. 2005, section 4.5).

    Example:
        ```python
        from inspect_lens.train import ActivationSet, LDAProbe, calibrate_threshold, train_probe

        train, control = (
            ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "control")
        )
        probe = train_probe(LDAProbe(), train, name="mine/lda", control=control)
        made = calibrate_threshold(probe, control, 0.05, statistic="alarm:ema:0.1")
        assert made.statistic.over == "alarm"
        print(made.value, made.holds_for)
        ```
    """
    harmless = control.negatives()
    asked = (
        statistic if isinstance(statistic, Statistic) else Statistic.parse(statistic, probe.pool)
    )
    if length is not None and (asked.over != "alarm" or length < 1):
        raise SpecError(
            f"length={length} for {asked}: allowed is 1 or more, for an alarm; leave it out"
        )
    lengths = np.array([int(mask.sum()) for mask in harmless.mask])
    made = partial(
        fit_threshold, fpr=fpr, statistic=asked, control=control.name,
        control_sha256=harmless.sha256,
        # Enough samples of too few groups are used, and the threshold says so.
        allow_few=allow_few or len(harmless) >= required_negatives(fpr),
    )  # fmt: skip
    facts = {
        "n_left_out": len(control) - len(harmless),
        "numerics": control.capture.numerics if control.capture else Numerics(),
    }
    if asked.over != "alarm":
        values = harmless.statistic(probe, asked)
        groups = harmless.groups
        if asked.over == "token":
            groups = tuple(np.repeat(np.array(groups), lengths).tolist())
        span = (int(lengths.min()), int(lengths.max()))
        found = made(np.concatenate(values), groups=groups, n_tokens=span)
        return found.model_copy(update=facts)
    # The longest answer of each group, in tokens, the longest first.
    of_group: dict[str, int] = {}
    for group, n in zip(harmless.groups, lengths.tolist(), strict=True):
        of_group[group] = max(of_group.get(group, 0), n)
    ranked = sorted(of_group.values(), reverse=True)
    need = round(1.0 / fpr)
    # By default the longest length that enough groups have; that of all where groups are few.
    enough = (n for n in (required_negatives(fpr), need, len(ranked)) if n <= len(ranked))
    cut = ranked[next(enough) - 1] if length is None else length
    n_long = sum(n >= cut for n in ranked)
    if length is not None and (not n_long or (n_long < need and not allow_few)):
        most = f"{ranked[need - 1]} tokens" if len(ranked) >= need else "no length"
        raise SpecError(
            f"length={length}: {n_long} of {len(ranked)} control groups of {control.name!r} have "
            f"an answer as long (the longest has {ranked[0]} tokens), and a rate of {fpr:g} needs "
            f"{need}, which allows {most}; collect longer control answers, ask for a larger rate, "
            "or pass allow_few=True for up to the longest"
        )
    full = np.flatnonzero(lengths >= cut)
    values = harmless.statistic(probe, asked, length=cut)
    every = made(np.concatenate(values), groups=harmless.groups, n_tokens=(1, cut))
    if full.size < len(harmless) and n_long >= need:
        longest = made(
            np.concatenate([values[i] for i in full]), n_tokens=(1, cut), allow_few=True,
            groups=[harmless.groups[i] for i in full],
        )  # fmt: skip
        every = max(every, longest, key=lambda threshold: threshold.value)
    return every.model_copy(update=facts)


def calibrate_thresholds(
    probe: AnyProbe, control: ActivationSet, fpr: float, *, allow_few: bool = False
) -> tuple[Threshold, ...]:
    """Those of a new probe: for whole answers, for alarms, and for one token."""
    asked = [probe.card.answer, Statistic(over="alarm", pool=probe.pool)]
    if not is_learned(probe.pool):  # whose scores are of the text up to a token
        asked.append(Statistic(over="token"))
    return tuple(
        calibrate_threshold(probe, control, fpr, statistic=statistic, allow_few=allow_few)
        for statistic in dict.fromkeys(asked)
    )


_ISOTONIC_FROM: Final = 1000


def calibrate(
    scores: ArrayLike,
    labels: ArrayLike,
    *,
    method: str = "platt",
    name: str = "",
    check: tuple[ArrayLike, ArrayLike] | None = None,
    numerics: Numerics | None = None,
    allow_few: bool = False,
) -> Calibration:
    """Fit a map from scores to probabilities, for a card; `check` measures its error.

    `platt` is sigmoid(slope · score + intercept) with smoothed targets; `temperature` is
    sigmoid(score / temperature), for scores that are logits; `isotonic` is the best non-decreasing
    map, which needs 1000 samples or more.

    Args:
        scores: (samples,) float, of a set that the probe was not trained on.
        labels: (samples,) 0 and 1, both.
        method: `platt`, `temperature` or `isotonic`.
        name: of the set.
        check: scores and labels of another set, to measure the calibration error on.
        numerics: what computed the set, such as its `capture.numerics`; the card compares it with
            the other sets of the probe.
        allow_few: accept fewer samples for `isotonic`.

    Raises:
        SpecError: an unknown method, a missing class, a score that is not finite, or too few
            samples.

    Source:
        Platt 1999, in the stable form of Lin, Lin and Weng 2007; arXiv:1706.04599; Zadrozny and
        Elkan 2002, as scikit-learn computes it.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, LDAProbe, calibrate, train_probe

        train, control, selection = (
            ActivationSet.load(f"acts/{name}.safetensors")
            for name in ("train", "control", "selection")
        )
        probe = train_probe(LDAProbe(), train, name="mine/lda", control=control)
        made = calibrate(selection.scores(probe), selection.labels, name="selection")
        assert 0.0 < made.probability(0.0) < made.probability(5.0) <= 1.0
        ```
    """
    check_word("method", method, ProbabilityMap)
    positive, negative = split_classes(labels, scores)
    if not positive.size or not negative.size:
        raise SpecError(
            f"labels: {positive.size} positive and {negative.size} negative; allowed are both "
            "classes; a calibration set holds both"
        )
    s, y = np.asarray(scores, dtype=np.float64), np.asarray(labels).astype(bool)
    if not np.isfinite(s).all():
        raise SpecError(
            f"scores: {int(np.isinf(s).sum())} of {s.size} are infinite; allowed are finite "
            "numbers; leave those samples out"
        )
    made = Calibration.model_validate(
        {"method": method, "set": name, "n": s.size, "numerics": numerics}
        | _fitted(s, y, method, allow_few)
    )
    if check is None:
        return made
    p = np.array([made.probability(score) for score in np.asarray(check[0], dtype=np.float64)])
    error = {"ece": expected_calibration_error(check[1], p), "brier": brier_score(check[1], p)}
    return made.model_copy(update=error)


def _fitted(
    scores: NDArray[np.float64], positive: NDArray[np.bool_], method: str, allow_few: bool
) -> dict[str, Any]:
    if method == "platt":
        slope, intercept = fit_platt(scores, positive)
        return {"slope": slope, "intercept": intercept}
    if method == "temperature":
        size = float(np.abs(scores).max()) or 1.0
        unit = scores / size

        def loss(log_slope: float) -> float:
            f = math.exp(log_slope) * unit
            return float((np.logaddexp(0.0, f) - positive * f).mean())

        found = minimize_scalar(loss, bounds=(-12.0, 12.0), method="bounded")
        return {"slope": math.exp(float(found.x)) / size, "intercept": 0.0}
    if scores.size < _ISOTONIC_FROM and not allow_few:
        raise SpecError(
            f"scores: {scores.size} for isotonic regression; allowed are {_ISOTONIC_FROM} or "
            "more, as it memorises fewer; use method='platt', or pass allow_few=True"
        )
    model = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip")
    model.fit(scores, positive.astype(np.float64))
    return {"x": tuple(model.X_thresholds_.tolist()), "y": tuple(model.y_thresholds_.tolist())}
