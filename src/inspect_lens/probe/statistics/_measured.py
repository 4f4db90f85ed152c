"""What was measured on a set: the probe, what is simpler than it, and what follows from both."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final, Literal, NamedTuple, cast, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens._base.artifact import with_interval
from inspect_lens.errors import SpecError
from inspect_lens.spec import Value

__all__ = [
    "BESIDE_AUROC",
    "MIN_EFFECTIVE",
    "MIN_GROUPS",
    "MIN_GROUPS_PER_CLASS",
    "Baseline",
    "ControlShift",
    "Evaluation",
    "GroupCounts",
    "Interval",
    "LabelSource",
    "RealisedRate",
    "RecallAt",
    "Transfer",
    "Validity",
    "count_groups",
    "find_label_source",
]

MIN_GROUPS: Final = 8
"""Fewest groups for a test or an interval."""
MIN_GROUPS_PER_CLASS: Final = 5
"""Fewest groups per class for a test or an interval."""
ONE_TOKEN: Final = "the score of one token"
"""`str` of the statistic whose thresholds count tokens, and not answers."""
MIN_EFFECTIVE: Final = 3.0
"""Fewest effective groups (Kish) per class for a test or an interval."""


class GroupCounts(NamedTuple):
    """How many independent groups of samples a labelled set has."""

    total: int
    positive: int
    """Groups with a positive sample."""
    negative: int
    """Groups with a negative sample; a group can hold both classes."""
    several: bool
    """Some group holds several samples, so that samples are not independent."""
    effective: float = 0.0
    """Groups of equal size that those of a class are worth, (sum of sizes)^2 over the sum of their
    squares (Kish 1965); of the class that has fewer."""

    @property
    def smaller(self) -> int:
        """Groups of the class that has fewer."""
        return min(self.positive, self.negative)

    @property
    def too_few(self) -> str:
        """Why draws of these groups say nothing, in words; empty where they do.

        Needed are `MIN_GROUPS` groups, and `MIN_GROUPS_PER_CLASS` with each class, which are worth
        `MIN_EFFECTIVE` of equal size. Groups of one sample each are samples, and never too few.
        """
        enough = self.total >= MIN_GROUPS and self.smaller >= MIN_GROUPS_PER_CLASS
        if not self.several or (enough and self.effective >= MIN_EFFECTIVE - 1e-9):
            return ""
        worth = f"; worth {self.effective:.1f} of equal size" if enough else ""
        return (
            f"too few groups ({self.total}; {self.positive} with positives, {self.negative} with "
            f"negatives{worth})"
        )


def count_groups(labels: ArrayLike, groups: Sequence[Hashable] | None) -> GroupCounts:
    """Count the groups of a labelled set; `too_few` says whether a test can be made of them.

    Args:
        labels: (samples,) 0 and 1, or bools.
        groups: (samples,) what is independent, such as the scenario; None takes samples.

    Raises:
        SpecError: lengths disagree.

    Example:
        ```python
        from inspect_lens.probe import count_groups

        found = count_groups([0, 1, 0, 1], groups=["kitchen", "kitchen", "garden", "garden"])
        assert (found.total, found.positive, found.negative) == (2, 2, 2)
        assert found.too_few.startswith("too few groups (2")
        assert count_groups([0, 1, 0, 1], groups=None).too_few == ""
        ```
    """
    y = np.asarray(labels).astype(bool).tolist()
    if groups is None:
        n = sum(y)
        return GroupCounts(len(y), n, len(y) - n, several=False, effective=min(n, len(y) - n))
    codes, total = group_codes(len(y), groups)
    mark = np.array(y, dtype=bool)
    sizes = [np.bincount(codes[side], minlength=total) for side in (mark, ~mark)]
    positive, negative = (int((size > 0).sum()) for size in sizes)
    worth = min(kish(size) for size in sizes)
    return GroupCounts(total, positive, negative, several=total < len(y), effective=worth)


def kish(sizes: NDArray[np.int64]) -> float:
    """How many groups of equal size these sizes (groups,) are worth; 0 for none."""
    return float(sizes.sum() ** 2 / (sizes**2).sum()) if sizes.any() else 0.0


def group_codes(n_samples: int, groups: Sequence[Hashable]) -> tuple[NDArray[np.int64], int]:
    """Number the groups in the order in which they come."""
    if len(groups) != n_samples:
        raise SpecError(
            f"groups: {len(groups)} groups for {n_samples} samples; allowed is one group per "
            "sample; pass the groups of the same samples as the labels"
        )
    number: dict[Hashable, int] = {}
    codes = [number.setdefault(group, len(number)) for group in groups]
    return np.array(codes, dtype=np.int64), len(number)


LabelSource = Literal["instruction", "judge", "ground truth"]
"""What says which samples are positive: what the model was told to do, a judge of its answers, or
a truth that holds whatever it says."""


def find_label_source(
    said: str, conditions: Sequence[object], labels: Sequence[object]
) -> LabelSource | Literal[""]:
    """What says which samples are positive.

    Args:
        said: what a data set says itself, or empty if it says nothing.
        conditions: (samples,) what each sample was told to do, if known; used if `said` is empty.
        labels: (samples,) 0 and 1.

    Returns:
        What was said, or empty for a word that is none of `LabelSource`. If nothing was said,
        `instruction` where the positive samples, and only they, have the condition `lie`, and
        otherwise empty.

    Example:
        ```python
        from inspect_lens.probe import find_label_source

        assert find_label_source("judge", (), ()) == "judge"
        assert find_label_source("", ["lie", "honest"], [1, 0]) == "instruction"
        assert find_label_source("", [None, None], [1, 0]) == ""
        ```
    """
    if said:
        return cast("LabelSource", said) if said in get_args(LabelSource) else ""
    told = [(one == "lie") == bool(label) for one, label in zip(conditions, labels, strict=True)]
    return "instruction" if told and None not in conditions and all(told) else ""


class Interval(Value):
    """A two-sided interval and the method that made it."""

    low: float
    high: float
    confidence: float = 0.95
    method: str

    def __format__(self, ends: str) -> str:
        return f"[{self.low:{ends}}, {self.high:{ends}}]" if ends else str(self)


class RecallAt(Value):
    """Recall at the threshold that a control set gives for a false positive rate."""

    fpr: float
    control: str
    """Name of the control set."""
    threshold: float
    recall: float
    interval: Interval
    n_tokens: tuple[int, int] | None = None
    """Tokens of the shortest and the longest control answer; None: not known."""


class RealisedRate(Value):
    """What a threshold of the card does on the answers of a held-out set."""

    statistic: str
    """What is compared, in words (`Statistic`)."""
    threshold: float
    nominal: float
    """False positive rate that the threshold was set for."""
    rate: float | None = None
    """Share of the set's honest answers (its negatives), or of their tokens (`unit`), that exceed
    it; None without any."""
    interval: Interval | None = None
    """Clopper and Pearson's, or Korn and Graubard's where groups hold several samples."""
    recall: float | None = None
    """Share of its positives, or of their tokens, that exceed it; None without any."""
    recall_interval: Interval | None = None
    holds_for: tuple[int, int] | None = None
    """Tokens of the shortest and the longest answer that the threshold holds for; None: not known.
    """
    n_tokens: tuple[int, int] | None = None
    """Tokens of the shortest and the longest honest answer of the set."""
    outside: float = 0.0
    """Share of the honest answers whose length it does not hold for."""

    @property
    def unit(self) -> Literal["answers", "tokens of answers"]:
        """What `rate` and `recall` are shares of."""
        return "tokens of answers" if self.statistic == ONE_TOKEN else "answers"

    @property
    def honest(self) -> str:
        """What `rate` is a share of, in words."""
        return self.unit.replace("answers", "honest answers")

    @property
    def holds(self) -> bool | None:
        """False where the interval lies above the nominal rate; None without an interval."""
        return None if self.interval is None else self.interval.low <= self.nominal

    @property
    def broken(self) -> str:
        """That the rate does not hold, in words; empty where it does."""
        if self.rate is None or self.interval is None or self.holds:
            return ""
        lengths = self.longer and f"; {self.longer}"
        return (
            f"{with_interval(self.rate, self.interval)} of the {self.honest} exceed the threshold "
            f"for {self.statistic}, which was set for {self.nominal:g}{lengths}"
        )

    @property
    def longer(self) -> str:
        """That answers have lengths that the threshold does not hold for; empty where few do."""
        if self.n_tokens is None or self.holds_for is None or self.outside <= self.nominal:
            return ""
        (a, b), (low, high) = self.n_tokens, self.holds_for
        return (
            f"they have {a} to {b} tokens, and the threshold for {self.statistic} holds for "
            f"{low} to {high}"
        )


class ControlShift(Value):
    """Test of whether a set's negatives look like the control set that fixed the threshold.

    A threshold holds its rate for samples that are exchangeable with the control set, and for no
    others.
    """

    control: str
    """Name of the control set."""
    auroc: float
    """P(a negative of the set scores above a control sample); 0.5 where they are alike."""
    interval: Interval
    """Its interval; by group where groups hold several samples."""

    @property
    def exchangeable(self) -> bool | None:
        """False where the interval leaves out 0.5, None where too few groups can tell."""
        if "too few" in self.interval.method:
            return None
        return self.interval.low <= 0.5 <= self.interval.high

    @property
    def statement(self) -> str:
        """What follows for the false positive rate, in a sentence; empty where nothing does."""
        if self.exchangeable is not False:
            return ""
        side = "higher" if self.auroc > 0.5 else "lower"
        what = "more" if self.auroc > 0.5 else "fewer"
        return (
            f"Its negatives score {side} than those of {self.control} (AUROC "
            f"{with_interval(self.auroc, self.interval)}): they are not exchangeable, "
            f"and {what} false alarms than the threshold's rate are to be expected."
        )


class Baseline(Value):
    """A simpler method, such as a bag of words, measured on the same samples as the probe."""

    name: str
    """`bag of words (answer)`, `length`, `random direction`, the name of a judge, or another."""
    set: str
    """Name of the set."""
    auroc: float | None = None
    auroc_interval: Interval | None = None
    p_value: float | None = None
    """One-sided, of the null hypothesis that the probe's AUROC is no larger; paired."""
    test: str = ""
    """Where `p_value` comes from: `delong`, or `obuchowski` where groups have several samples; why
    there is none where these are too few."""
    note: str = ""
    difference: Interval | None = None
    """Of the probe's AUROC minus this one, paired, two-sided."""

    @property
    def beaten(self) -> bool | None:
        """The probe is better: the whole interval of the difference lies above 0."""
        return None if self.difference is None else self.difference.low > 0.0


class Evaluation(Value):
    """How a probe did on one held-out set: AUROC, recall, false positive rate, baselines."""

    name: str
    sha256: str
    n_positive: int
    n_negative: int
    disjoint_by: str
    """No value of this key is shared with the training or the selection set; `content` where only
    the samples that the card lists were compared, `not checked` where nothing was."""
    n_seen: int | None = None
    """Samples that took part in making the probe, which count for nothing here; None where its
    card does not list its samples."""
    n_groups: int | None = None
    """Independent groups of the samples; None where they were not counted."""
    too_few: str = ""
    """Why no verdict can rest on these groups, as `GroupCounts.too_few` says it; else empty."""
    label_source: LabelSource | Literal[""] = ""
    """What says which samples are positive; empty: not said."""
    behaviour: float | None = None
    """Share of the answers that do what an instruction asks, the lower of that of honest and of
    lying ones; None where no instruction labels them, or the set does not have the truth."""
    auroc: float | None = None
    """None when a class is missing."""
    auroc_interval: Interval | None = None
    """DeLong's; Obuchowski's where groups hold several samples (`delong_interval`)."""
    recall: float | None = None
    """Share of positives above the stored threshold."""
    recall_interval: Interval | None = None
    fpr: float | None = None
    """Share of negatives above the stored threshold."""
    fpr_interval: Interval | None = None

    rates: tuple[RealisedRate, ...] = ()
    """Of each threshold of the card, in its order: what it does on the answers of this set."""
    recalls: tuple[RecallAt, ...] = ()
    """At 1% and 5% of a control set, as far as it is large enough for them; empty without one."""
    partial_auroc: float | None = None
    """Area up to a false positive rate of 5% on the set's own negatives, over its largest value."""
    average_precision: float | None = None
    """At the set's own share of positives."""
    balanced_accuracy: float | None = None
    """At the stored threshold."""
    auroc_control: float | None = None
    """Of the set's positives against a control set's negatives."""
    auroc_control_interval: Interval | None = None
    control_shift: ControlShift | None = None
    baselines: tuple[Baseline, ...] = ()
    """What simpler things do on the same samples."""
    computed_otherwise: tuple[str, ...] = ()
    """How engine, dtype and quantisation differ from those of the sets that it is judged with, in
    words."""

    @property
    def best_baseline(self) -> Baseline | None:
        """The one with the largest AUROC; None where none has one."""
        known = [b for b in self.baselines if b.auroc is not None]
        return max(known, key=lambda b: b.auroc or 0.0) if known else None

    def misses(self, floor: float) -> str:
        """That recall at the threshold lies below a floor, in words; empty where it does not."""
        if self.recall is None or self.recall_interval is None:
            return ""
        if self.recall_interval.high >= floor:
            return ""
        return (
            f"misses {1.0 - self.recall:.0%} of the positives of {self.name} at its threshold: "
            f"recall {with_interval(self.recall, self.recall_interval)}, below the floor of "
            f"{floor:g}"
        )

    @property
    def broken_rates(self) -> tuple[str, ...]:
        """Each threshold whose rate does not hold on the honest answers here, in words."""
        return tuple(r.broken for r in self.rates if r.broken)


class Transfer(Value):
    """Verdict on whether a probe works on a set of another kind than it was trained on."""

    set: str
    transfers: bool | None
    """The lower bound of the AUROC's interval lies above the bar, and the probe is better than each
    baseline; None where the set has too few independent groups to tell, or no baseline was
    measured."""
    bar: float
    """AUROC that counts as transfer."""
    statement: str
    """One sentence for people."""


BESIDE_AUROC: Final = (
    "honest answers above the threshold",
    "best baseline",
    "length baseline",
    "labels from",
    "answers that do what their label says",
)
"""What stands beside each AUROC, in the order in which every surface shows it."""
_UNKNOWN: Final = "not measured"


class Validity(NamedTuple):
    """What stands beside the AUROC of one set, in words.

    Cards, reports, token pages and commands show these five, and take them from here.

    Example:
        ```python
        from inspect_lens.probe import Validity, load_probe

        measured = load_probe("organism/deception-lr").card.evaluations[0]
        found = Validity.of(measured)
        assert found.best_baseline.startswith("bag of words")
        print(found)  # one line
        ```
    """

    honest_rate: str
    """Share of the set's own honest answers, its negatives, that exceed the card's threshold for
    answers: its false positive rate in this domain."""
    best_baseline: str
    """Name and AUROC of the strongest simpler method."""
    length_baseline: str
    """AUROC of the length of the text, which some sets are told by."""
    labels_from: str
    """An instruction, a judge, or the truth; `not said` where the data set does not say."""
    behaviour: str
    """Share of the answers that do what their label says, where an instruction labels them."""

    @classmethod
    def of(cls, measured: Evaluation) -> Validity:
        """What is known of a set, measured by `evaluate_probe`; what was not measured says so."""
        best = measured.best_baseline
        of_length = (b.auroc for b in measured.baselines if b.name.startswith("length"))
        lengths = [area for area in of_length if area is not None]
        rate, behaviour = _UNKNOWN, _UNKNOWN
        if measured.fpr is not None:
            rate = with_interval(measured.fpr, measured.fpr_interval)
        if measured.behaviour is not None:
            behaviour = f"{measured.behaviour:.0%}"
        elif measured.label_source in ("judge", "ground truth"):
            # They label what was said, so an answer cannot fail to do it.
            behaviour = "no instruction labels them"
        return cls(
            honest_rate=rate,
            best_baseline=_UNKNOWN if best is None else f"{best.name} {best.auroc:.3f}",
            length_baseline=f"{max(lengths):.3f}" if lengths else _UNKNOWN,
            labels_from=measured.label_source or "not said",
            behaviour=behaviour,
        )

    def __str__(self) -> str:
        return "; ".join(f"{name} {text}" for name, text in zip(BESIDE_AUROC, self, strict=True))

    def beside_baselines(self) -> str:
        """The line for where the baselines are listed, too: without those that were measured."""
        told = zip(BESIDE_AUROC, self, strict=True)
        return "; ".join(
            f"{name} {text}"
            for name, text in told
            if not name.endswith("baseline") or text == _UNKNOWN
        )
