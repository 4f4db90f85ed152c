"""Does a probe survive another style, another set; and what a judge behind it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens.errors import SpecError
from inspect_lens.probe import (
    AnyProbe,
    Comparison,
    Evaluation,
    Transfer,
    compare_auroc,
    split_classes,
)

from ._dataset import ActivationSet

__all__ = [
    "CascadePoint",
    "StyleShift",
    "cascade_frontier",
    "style_shift",
    "transfer_statement",
]


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

        `not robust`: the area is significantly lower (5%; or lower without any variance, as when
        every sample is now ordered wrongly), or negatives moved by 0.5 or more. `robust`: neither,
        and the upper bound of the loss, of its two-sided 95% interval, lies below the margin, as in
        a test of non-inferiority. `cannot tell`: all else, such as few samples, whose interval
        reaches beyond the margin, and too few groups.
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

    Returns:
        What changed.

    Raises:
        SpecError: ids or labels disagree, a class has fewer than two samples, or the margin is
            none.

    Example:
        ```python
        import numpy as np

        from inspect_lens.train import ActivationSet, LDAProbe, style_shift, train_probe

        train, control, test = (
            ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "control", "test")
        )
        probe = train_probe(LDAProbe(), train, name="mine/lda", control=control, n_resamples=100)
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
    before, after = original.scores(probe), restyled.scores(probe)
    negative = ~original.labels
    spread = float(before[negative].std()) or 1.0
    rates = None
    if probe.threshold is not None:
        value = probe.threshold.value
        rates = tuple(float((s[negative] > value).mean()) for s in (before, after))
    return StyleShift(
        comparison=compare_auroc(original.labels, before, after, groups=original.groups),
        shift=float((after[negative] - before[negative]).mean()) / spread,
        fpr=None if rates is None else (rates[0], rates[1]),
        margin=margin,
    )


def transfer_statement(trained_on: str, evaluation: Evaluation, *, bar: float = 0.7) -> Transfer:
    """Say in one sentence whether a probe works on a set of another kind.

    A probe transfers where its AUROC lies above the bar and above that of every baseline that was
    measured on the same samples: both whole intervals, that of the area and that of each paired
    difference. To ask this of each baseline is a test of their best one (Berger 1982), so a length
    or a word that tells the label as well is found.

    Args:
        trained_on: what the probe was trained on, in words.
        evaluation: on the other set, with its baselines (`evaluate_probe`).
        bar: AUROC that counts; its interval has to lie above.

    Returns:
        The verdict with its sentence. An interval that reaches below the bar is no transfer, nor is
        one that a baseline reaches. None, and a sentence that says why, where the set has too few
        independent groups (`inspect_lens.probe.count_groups`), groups that no bootstrap drew, or no
        baseline that was compared.

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
    interval = evaluation.interval
    if evaluation.auroc is None or interval is None:
        raise SpecError(
            f"{evaluation.name}: has one class only; allowed is a set with both; transfer is a "
            "statement about telling them apart"
        )
    made = partial(Transfer, set=evaluation.name, bar=bar)
    area = f"AUROC {evaluation.auroc:.3f}"
    compared = [b for b in evaluation.baselines if b.difference is not None]
    best = max(compared, key=lambda b: b.auroc or 0.0, default=None)
    low = evaluation.least
    if evaluation.not_judged or low is None or best is None:
        why = evaluation.not_judged or "no baseline was compared with it"
        return made(
            transfers=None,
            statement=(
                f"Trained on {trained_on}, whether the probe transfers to {evaluation.name} cannot "
                f"be told: {area}, {why}."
            ),
        )
    other = evaluation.auroc_interval or interval
    area += f" [{low:.3f}, {max(interval.high, other.high):.3f}]"
    worst = min(compared, key=lambda b: b.difference.low if b.difference else 0.0)
    rival = best if best.beaten is False or worst.beaten else worst
    than = f"{rival.name} has {rival.auroc:.3f}"
    if rival.difference is not None:
        than += f", difference [{rival.difference.low:.3f}, {rival.difference.high:.3f}]"
    passes = low > bar and all(b.beaten for b in compared)
    says = "transfers" if passes else "does not transfer"
    reason = f"and the bar is {bar:g}; of the baselines {than}"
    if low > bar and not passes:
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


def cascade_frontier(
    labels: ArrayLike,
    probe_scores: ArrayLike,
    judge_scores: ArrayLike,
    *,
    probe_threshold: float,
    judge_threshold: float,
    probe_cost: float = 0.0,
    judge_cost: float = 1.0,
    shares: Sequence[float] = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0),
) -> tuple[CascadePoint, ...]:
    """A cheap probe decides, and a judge decides again where the probe is unsure.

    Args:
        labels: (samples,) 0 and 1, both.
        probe_scores: (samples,) float.
        judge_scores: (samples,) float.
        probe_threshold: flagged strictly above it.
        judge_threshold: of the judge.
        probe_cost: of a sample.
        judge_cost: of a sample that the judge reads.
        shares: of samples that go to the judge.

    Returns:
        One point per share, ascending; the first is the probe alone, the last the judge alone
        where shares reach from 0 to 1. Distance to the threshold counts in ranks, so that the
        scale of the scores does not matter.

    Raises:
        SpecError: shapes disagree, a class is missing, a score is NaN, or a share is none.

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
    cheap = np.asarray(probe_scores, dtype=np.float64)
    judged = np.asarray(judge_scores, dtype=np.float64) > judge_threshold
    order = np.argsort(_distance(cheap, probe_threshold), kind="stable")
    points = []
    for share in sorted(shares):
        flagged = cheap > probe_threshold
        read = order[: math.ceil(share * y.size)]
        flagged[read] = judged[read]
        recall, fpr = float(flagged[y].mean()), float(flagged[~y].mean())
        cost = probe_cost + judge_cost * read.size / y.size
        points.append(CascadePoint(share, cost, recall, fpr, (recall + 1.0 - fpr) / 2.0))
    return tuple(points)


def _distance(scores: NDArray[np.float64], threshold: float) -> NDArray[np.float64]:
    """How many samples lie between each score and the threshold."""
    ranked = np.sort(scores)
    edge = np.searchsorted(ranked, threshold, side="right")
    rank = np.searchsorted(ranked, scores, side="left")
    made: NDArray[np.float64] = np.abs(rank + 0.5 - edge)
    return made
