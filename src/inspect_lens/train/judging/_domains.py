"""What a probe is worth on other domains, in another style, and before a judge."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, clone

from inspect_lens._base.arguments import judged_arguments
from inspect_lens.errors import SpecError
from inspect_lens.probe import (
    AnyProbe,
    Comparison,
    Evaluation,
    FitRows,
    Interval,
    ProbeCard,
    Transfer,
    auroc,
    compare_auroc,
    delong_interval,
    rate_interval,
    split_classes,
)
from inspect_lens.train.families._binary import BinaryEstimator
from inspect_lens.train.families._logistic import as_family
from inspect_lens.train.fitting._fit import fit_on
from inspect_lens.train.sets._dataset import ActivationSet
from inspect_lens.train.sets._splits import warn_otherwise

__all__ = [
    "CascadePoint",
    "DomainScore",
    "StyleShift",
    "cascade_frontier",
    "leave_one_domain_out",
    "style_shift",
    "transfer_statement",
]


class DomainScore(NamedTuple):
    """AUROC on one domain of probes trained on all others, on it alone, and on all of them."""

    domain: str
    n_positive: int
    n_negative: int
    auroc: float
    """Of a probe that was trained on all other domains."""
    interval: Interval
    """Of `auroc`, by `delong_interval` with the groups."""
    within: float
    """Of a probe that was trained on other groups of this domain alone, over two halves: what the
    domain itself can give. NaN where a half lacks a class."""
    mixed: float
    """Of a probe that was trained on all other domains and on other groups of this one, over the
    same halves: what a mixture gives that holds the domain. NaN where a half lacks a class."""


@judged_arguments
def leave_one_domain_out(
    estimator: BinaryEstimator | BaseEstimator,
    data: ActivationSet,
    domains: str | Sequence[str],
    *,
    layer: int,
    rows: FitRows | None = None,
    pool: str = "mean",
    seed: int = 0,
) -> tuple[DomainScore, ...]:
    """Leave each domain out of training in turn, by name, and measure the probe on it.

    What a probe is worth on a new domain shows on one that it was not trained on. Beside it stand
    what the domain gives alone, and what the mixture gives once the domain is part of it.

    Args:
        estimator: unfitted; it is cloned for each domain.
        data: samples of several domains, with groups that lie within one.
        domains: column with the domain of each sample, or the domains, (samples,).
        layer: to train at; choose it on other data.
        rows: as in `fit_on`.
        pool: how token scores become one.
        seed: of the halves of a domain.

    Raises:
        SpecError: fewer than two domains, a group in two of them, or a domain or the rest lacks a
            class.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, LDAProbe, leave_one_domain_out

        data = ActivationSet.load("acts/train.safetensors")
        domains = ["first" if i < 80 else "second" for i in range(len(data))]
        scores = leave_one_domain_out(LDAProbe(), data, domains, layer=1)
        assert [score.domain for score in scores] == ["first", "second"]
        assert all(score.auroc > 0.8 for score in scores)
        ```
    """
    names = np.array(data.key(domains) if isinstance(domains, str) else list(domains))
    found = sorted(set(names.tolist()))
    _check(data, names, found)
    family = as_family(estimator)
    card = ProbeCard(name="domains/any", layers=(layer,), hidden=data.hidden, pool=pool)

    def judge(fit: ActivationSet, held: ActivationSet) -> NDArray[np.float64]:
        return held.scores(fit_on(clone(family), fit, layer, rows=rows).to_probe(card))

    made = []
    for name in found:
        inside = data.subset(np.flatnonzero(names == name))
        scores = judge(data.subset(np.flatnonzero(names != name)), inside)
        within, mixed = [], []
        unique = np.random.default_rng(seed).permutation(np.unique(inside.groups))
        first = np.isin(data.groups, unique[: len(unique) // 2])
        for half in ((names == name) & first, (names == name) & ~first):
            fit, held = (data.subset(np.flatnonzero(s)) for s in ((names == name) & ~half, half))
            both = all(0 < d.n_positive < len(d) for d in (fit, held))
            within.append(auroc(held.labels, judge(fit, held)) if both else np.nan)
            every = data.subset(np.flatnonzero(~half))
            mixed.append(auroc(held.labels, judge(every, held)) if both else np.nan)
        made.append(
            DomainScore(
                domain=name,
                n_positive=inside.n_positive,
                n_negative=inside.n_negative,
                auroc=auroc(inside.labels, scores),
                interval=delong_interval(inside.labels, scores, groups=inside.groups),
                within=float(np.mean(within)),
                mixed=float(np.mean(mixed)),
            )
        )
    return tuple(made)


def _check(data: ActivationSet, names: NDArray[np.str_], found: Sequence[str]) -> None:
    if len(names) != len(data) or len(found) < 2:
        raise SpecError(
            f"domains: {len(names)} values of {len(found)} domains for {len(data)} samples; "
            "allowed is one each, and two domains or more"
        )
    places: dict[str, str] = {}
    for group, name in zip(data.groups, names.tolist(), strict=True):
        if places.setdefault(group, name) != name:
            raise SpecError(
                f"domains: group {group!r} is in {places[group]!r} and {name!r}; allowed are "
                "groups within one domain, or the domain left out is known in part"
            )
    for name in found:
        for part, what in ((names == name, name), (names != name, f"all but {name}")):
            n_positive = int(data.labels[part].sum())
            if n_positive in (0, int(part.sum())):
                raise SpecError(
                    f"domains: {what} has {n_positive} positive of {int(part.sum())} samples; "
                    "allowed are both classes"
                )


class StyleShift(NamedTuple):
    """How the AUROC of a probe changes if the same samples are written in another style."""

    comparison: Comparison
    """AUROC of the original (a) and of the restyled samples (b), and whether they differ: DeLong's
    test, or Obuchowski's where groups hold several samples."""
    shift: float
    """Mean change of the negatives' score, in standard deviations of their score."""
    fpr: tuple[float, float] | None
    """Share of negatives above the threshold before and after; None without a threshold."""
    margin: float = 0.05
    """Loss of AUROC that would still count as none."""

    @property
    def verdict(self) -> Literal["robust", "not robust", "cannot tell"]:
        """What the comparison shows.

        `not robust`: the area is significantly lower (5%; or lower without any variance), or
        negatives moved by 0.5 or more. `robust`: neither, and the upper bound of the loss, of its
        two-sided 95% interval, lies below the margin, as in a test of non-inferiority. `cannot
        tell`: all else, such as few samples or groups.
        """
        loss = self.comparison
        # Areas that differ and do not vary have no p; too few groups have none either.
        sure = loss.p_value < 0.05 or (math.isnan(loss.p_value) and not loss.too_few)
        if (loss.difference > 0 and sure) or abs(self.shift) >= 0.5:
            return "not robust"
        return "robust" if loss.interval.high < self.margin else "cannot tell"

    @property
    def robust(self) -> bool:
        """The verdict is `robust`; False also where nobody can tell."""
        return self.verdict == "robust"


def style_shift(
    probe: AnyProbe, original: ActivationSet, restyled: ActivationSet, *, margin: float = 0.05
) -> StyleShift:
    """Score the same samples twice, the second time written in another style.

    Args:
        probe: to test.
        original: the set.
        restyled: the same ids and labels in the same order; other words.
        margin: loss of AUROC that would still count as none, inside (0, 1). The default is ours,
            from no paper; a set of about 70 independent samples per class can show it.

    Raises:
        SpecError: ids or labels disagree, a class has fewer than two samples, or the margin is
            none.

    Warns:
        UserWarning: the sets were computed with different engines, dtypes or quantisations.

    Example:
        ```python
        import numpy as np

        from inspect_lens.train import ActivationSet, LDAProbe, style_shift, train_probe

        train, control, test = (
            ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "control", "test")
        )
        probe = train_probe(LDAProbe(), train, name="mine/lda", control=control)
        # The same samples in another style; here the test set stands in for it.
        found = style_shift(probe, test, test, margin=0.1)
        assert found.comparison.difference == 0.0
        assert found.verdict == "robust"
        ```
    """
    if not 0.0 < margin < 1.0:
        raise SpecError(
            f"margin={margin!r}; allowed is a loss of AUROC between 0 and 1; 0.05 is the default"
        )
    if original.ids != restyled.ids or (original.labels != restyled.labels).any():
        raise SpecError(
            f"{restyled.name}: ids or labels are not those of {original.name!r}; allowed is the "
            "same sample in each place; restyle every sample, and keep its id"
        )
    warn_otherwise(restyled, original)
    before, after = original.scores(probe), restyled.scores(probe)
    negative = ~original.labels
    spread = float(before[negative].std()) or 1.0
    fpr = None
    if probe.threshold is not None:
        above = [s[negative] > probe.threshold.value for s in (before, after)]
        fpr = float(above[0].mean()), float(above[1].mean())
    return StyleShift(
        comparison=compare_auroc(original.labels, before, after, groups=original.groups),
        shift=float((after[negative] - before[negative]).mean()) / spread,
        fpr=fpr,
        margin=margin,
    )


def transfer_statement(
    trained_on: str, evaluation: Evaluation, *, bar: float = 0.7, copies: Sequence[str] = ()
) -> Transfer:
    """Say in one sentence whether a probe works on a set of another kind.

    A probe transfers where its AUROC lies above the bar and above that of every baseline that was
    measured on the same samples: both whole intervals, that of the area and that of each paired
    difference. To ask this of each baseline is a test of their best one (Berger 1982).

    Args:
        trained_on: what the probe was trained on, in words.
        evaluation: on the other set, with its baselines (`evaluate_probe`).
        bar: AUROC that counts; its interval has to lie above.
        copies: what `train_probe` says of samples of the set that are all but copies of training
            samples.

    Returns:
        The verdict with its sentence. It is no transfer either where a threshold's rate of false
        alarms does not hold on the honest answers (`RealisedRate.holds`). None, and a sentence that
        says why, where the set has too few independent groups (`inspect_lens.probe.count_groups`),
        no baseline that was compared, or copies of training samples.

    Raises:
        SpecError: the evaluation has no AUROC.

    Source:
        Intersection-union test: Berger 1982, Technometrics 24, 295-300.

    Example:
        ```python
        from inspect_lens.probe import load_probe
        from inspect_lens.train import transfer_statement

        card = load_probe("organism/deception-lr").card
        verdict = transfer_statement("probe_train", card.evaluations[0])
        print(verdict.transfers, verdict.statement)
        ```
    """
    interval = evaluation.auroc_interval
    if evaluation.auroc is None or interval is None:
        raise SpecError(
            f"{evaluation.name}: has one class only; allowed is a set with both; transfer is a "
            "statement about telling them apart"
        )
    made = partial(Transfer, set=evaluation.name, bar=bar)
    area = f"AUROC {evaluation.auroc:.3f}"
    compared = [b for b in evaluation.baselines if b.difference is not None]
    best = max(compared, key=lambda b: b.auroc or 0.0, default=None)
    if copies or evaluation.too_few or best is None:
        why = evaluation.too_few or "no baseline was compared with it"
        if copies:
            why = "some of its samples may be copies of training samples"
        return made(
            transfers=None,
            statement=(
                f"Trained on {trained_on}, whether the probe transfers to {evaluation.name} cannot "
                f"be told: {area}, {why}."
            ),
        )
    area += f" {interval:.3f}"
    worst = min(compared, key=lambda b: b.difference.low if b.difference else 0.0)
    rival = best if best.beaten is False or worst.beaten else worst
    than = f"{rival.name} has {rival.auroc:.3f}"
    if rival.difference is not None:
        than += f", difference {rival.difference:.3f}"
    broken = evaluation.broken_rates
    passes = interval.low > bar and all(b.beaten for b in compared) and not broken
    says = "transfers" if passes else "does not transfer"
    reason = f"and the bar is {bar:g}; of the baselines {than}"
    if interval.low > bar and broken:
        reason = f"above the bar of {bar:g}, but a rate does not hold: {broken[0]}"
    elif interval.low > bar and not passes:
        reason = f"above the bar of {bar:g}, but a baseline does as well: {than}"
    return made(
        transfers=passes,
        statement=f"Trained on {trained_on}, the probe {says} to {evaluation.name}: {area}, "
        f"{reason}.",
    )


class CascadePoint(NamedTuple):
    """One setting of a probe-then-judge cascade: share sent to the judge, accuracy and cost."""

    share: float
    """Of samples that the judge reads: those nearest to the probe's threshold."""
    cost: float
    """Per sample, in the units given."""
    recall: float
    fpr: float
    balanced_accuracy: float
    recall_interval: Interval
    """Of the recall, two-sided, by group where groups are given."""
    fpr_interval: Interval
    """Of the false positive rate, likewise."""


def cascade_frontier(
    labels: ArrayLike,
    probe_scores: ArrayLike,
    judge_scores: ArrayLike,
    *,
    probe_threshold: float,
    judge_threshold: float,
    groups: Sequence[Hashable] | None = None,
    probe_cost: float = 0.0,
    judge_cost: float | ArrayLike = 1.0,
    shares: Sequence[float] = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0),
    confidence: float = 0.95,
) -> tuple[CascadePoint, ...]:
    """Find what a probe costs and catches if a judge decides the unsure samples.

    Scores of a real judge come from a log (`inspect_lens.scorer.read_cascade`), with what each of
    its answers cost. `inspect_lens.view.draw_cascade` draws the points.

    Args:
        labels: (samples,) 0 and 1, both.
        probe_scores: (samples,) float.
        judge_scores: (samples,) float.
        probe_threshold: flagged strictly above it.
        judge_threshold: of the judge.
        groups: (samples,) what is independent, such as the scenario; None takes samples.
        probe_cost: of a sample.
        judge_cost: of a sample that the judge reads; one number, or (samples,) such as the tokens
            that it read and wrote.
        shares: of samples that go to the judge.
        confidence: of the intervals.

    Returns:
        One point per share, ascending; the first is the probe alone, the last the judge alone
        where shares reach from 0 to 1. Distance to the threshold counts in ranks.

    Raises:
        SpecError: shapes disagree, a class is missing, a score is NaN, a share is none, or a cost
            is negative or not finite.

    Source:
        arXiv:2506.10805 and arXiv:2601.11516: probe, then language model.

    Example:
        ```python
        import numpy as np

        from inspect_lens.train import cascade_frontier

        rng = np.random.default_rng(0)
        labels = np.arange(200) % 2
        probe, judge = (rng.standard_normal(200) + strength * labels for strength in (1.0, 4.0))
        alone, *_, judged = cascade_frontier(
            labels, probe, judge, probe_threshold=0.5, judge_threshold=2.0
        )
        assert judged.balanced_accuracy > alone.balanced_accuracy
        assert judged.recall_interval.low < judged.recall < judged.recall_interval.high
        assert (alone.cost, judged.cost) == (0.0, 1.0)
        ```
    """
    positive, negative = split_classes(labels, probe_scores)
    split_classes(labels, judge_scores)
    if not positive.size or not negative.size or not all(0.0 <= s <= 1.0 for s in shares):
        raise SpecError(
            f"{positive.size} positive, {negative.size} negative samples, shares {list(shares)}; "
            "allowed are both classes, and shares from 0 to 1"
        )
    y = np.asarray(labels).astype(bool)
    names: Sequence[Hashable] = range(y.size) if groups is None else list(groups)
    cheap = np.asarray(probe_scores, dtype=np.float64)
    judged = np.asarray(judge_scores, dtype=np.float64) > judge_threshold
    spent = _costs(judge_cost, probe_cost, y.size)
    if len(names) != y.size:
        raise SpecError(f"groups: {len(names)} for {y.size} samples; allowed is one each")
    # How many samples lie between each score and the threshold.
    ranked = np.sort(cheap)
    edge = np.searchsorted(ranked, probe_threshold, side="right")
    away = np.abs(np.searchsorted(ranked, cheap, side="left") + 0.5 - edge)
    order = np.argsort(away, kind="stable")
    points = []
    for share in sorted(shares):
        flagged = cheap > probe_threshold
        read = order[: math.ceil(share * y.size)]
        flagged[read] = judged[read]
        recall, fpr = float(flagged[y].mean()), float(flagged[~y].mean())
        groups_of = [[names[i] for i in np.flatnonzero(side)] for side in (y, ~y)]
        points.append(
            CascadePoint(
                share=share,
                cost=probe_cost + float(spent[read].sum()) / y.size,
                recall=recall,
                fpr=fpr,
                balanced_accuracy=(recall + 1.0 - fpr) / 2.0,
                recall_interval=rate_interval(flagged[y], groups_of[0], confidence=confidence),
                fpr_interval=rate_interval(flagged[~y], groups_of[1], confidence=confidence),
            )
        )
    return tuple(points)


def _costs(judge_cost: float | ArrayLike, probe_cost: float, n: int) -> NDArray[np.float64]:
    """What the judge costs for each sample, (samples,)."""
    given = np.asarray(judge_cost, dtype=np.float64)
    if given.shape not in ((), (n,)) or not (np.isfinite(given).all() and given.min() >= 0.0):
        raise SpecError(
            f"judge_cost: shape {given.shape} for {n} samples; allowed is one number or one per "
            "sample, each finite and 0 or more"
        )
    if not math.isfinite(probe_cost) or probe_cost < 0.0:
        raise SpecError(f"probe_cost={probe_cost!r}; allowed is a finite number, 0 or more")
    return np.broadcast_to(given, (n,))
