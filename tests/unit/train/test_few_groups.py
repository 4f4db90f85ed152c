"""Sets of few groups: what is measured stays, what cannot be told is said."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from inspect_lens.errors import SpecError
from inspect_lens.probe import (
    Evaluation,
    Interval,
    Probe,
    ProbeCard,
    Threshold,
    Transfer,
    clopper_pearson,
    rate_interval,
)
from inspect_lens.train import (
    ActivationSet,
    baseline,
    evaluate_probe,
    fit_threshold,
    transfer_statement,
)

AT_ZERO = Threshold(
    value=0.0, fpr=0.5, control="c", n_control=9, n_above=4,
    interval=Interval(low=0, high=1, method="x"),
)  # fmt: skip
PROBE = Probe.from_direction(
    [1.0, 0.0], card=ProbeCard(name="t/p", layers=(0,), hidden=2, thresholds=(AT_ZERO,))
)


def scored(
    scores: Sequence[float], labels: Sequence[int], groups: Sequence[object]
) -> ActivationSet:
    """A set on which PROBE gives the scores."""
    return ActivationSet(
        name="far", model="m", layers=(0,), labels=labels, groups=[str(g) for g in groups],
        acts=[np.array([[[s, 0.0]]]) for s in scores], ids=[f"far-{i}" for i in range(len(labels))],
    )  # fmt: skip


def test_noise_of_one_scenario_per_class_does_not_transfer() -> None:
    """It did in two of five simulations, as DeLong's interval over samples stood in."""
    y = np.repeat([0, 1], 60)
    for seed in range(12):
        rng = np.random.default_rng(seed)
        made = evaluate_probe(PROBE, scored(rng.normal(size=120) + 2 * rng.normal(size=2)[y], y, y))
        assert made.auroc is not None
        assert made.n_groups == 2
        said = transfer_statement("x", made)
        assert said.transfers is None
        assert "cannot be told: AUROC" in said.statement
        assert "too few groups (2; 1 with positives, 1 with negatives)" in said.statement
        assert made.auroc_interval is not None
        assert made.auroc_interval.low < 0.5


def test_enough_groups_are_judged_and_single_samples_are() -> None:
    rng, y = np.random.default_rng(0), np.arange(120) % 2
    for groups in (np.arange(120) // 4, np.arange(120)):
        made = evaluate_probe(PROBE, scored(rng.normal(size=120) + 2 * y, y, groups))
        assert made.too_few == ""
        assert made.auroc_interval is not None
        by_group = len(set(groups.tolist())) < 120
        assert made.auroc_interval.method == ("obuchowski, 30 groups" if by_group else "delong")
        assert transfer_statement("x", made).transfers
    # Perfect, it is an interval by groups: 30 groups with each class, not 60 samples.
    made = evaluate_probe(PROBE, scored(9.0 * y, y, np.arange(120) // 4))
    assert made.auroc_interval is not None
    assert made.auroc_interval.low == clopper_pearson(30, 30).low
    assert transfer_statement("x", made).transfers


def test_cards_of_before_stay_readable() -> None:
    old = Evaluation.model_validate(
        {"name": "t", "sha256": "0", "n_positive": 9, "n_negative": 9, "disjoint_by": "group",
         "auroc": 0.9, "auroc_interval": {"low": 0.8, "high": 0.95, "method": "delong"}}
    )  # fmt: skip
    assert (old.n_groups, old.too_few) == (None, "")
    # They have no baseline, and so no verdict.
    assert transfer_statement("x", old).transfers is None
    assert Transfer(set="t", transfers=False, bar=0.7, statement="").transfers is False
    assert AT_ZERO.few_groups == ""


def test_a_baseline_on_few_groups_has_no_p() -> None:
    rng, y = np.random.default_rng(0), np.arange(60) % 2
    ours, theirs = rng.normal(size=60) + 2 * y, rng.normal(size=60)
    made = baseline("length", scored(ours, y, np.arange(60) // 12), theirs, ours, note="tokens")
    assert made.p_value is None
    assert made.test == "too few groups (5; 5 with positives, 5 with negatives)"
    assert made.note == "tokens"
    assert made.auroc_interval is not None
    assert made.auroc_interval.high - made.auroc_interval.low > 0.6
    assert baseline("length", scored(ours, y, [1] * 60), theirs, ours).p_value is None
    assert baseline("length", scored(ours, y, np.arange(60)), theirs, ours).test == "delong"


def test_copies_of_control_samples_are_not_new_ones() -> None:
    copies = np.repeat(np.random.default_rng(1).normal(size=30), 10)
    groups = np.repeat(np.arange(30), 10).tolist()
    with pytest.raises(SpecError, match="300, but 30 independent groups"):
        fit_threshold(copies, 0.01, groups=groups)
    made = fit_threshold(copies, 0.01, groups=groups, allow_few=True)
    assert (made.n_control, made.n_groups) == (300, 30)
    assert made.few_groups == "only 30 independent groups, and it takes 300 to show a rate of 0.01"
    assert made.interval.high > 0.1
    assert made.interval.method == "clopper-pearson, n = 30 groups"
    alone = fit_threshold(np.arange(300.0), 0.01, groups=range(300))
    assert alone == fit_threshold(np.arange(300.0), 0.01).model_copy(update={"n_groups": 300})
    assert alone.few_groups == ""


class TestRates:
    def test_independent_samples_keep_the_exact_interval(self) -> None:
        hits = np.arange(50) < 20
        assert rate_interval(hits, None) == clopper_pearson(20, 50)
        assert rate_interval(hits, range(50)) == clopper_pearson(20, 50)

    def test_copies_are_worth_their_groups(self) -> None:
        """As t and normal agree for many groups, so do copies and what they are copies of."""
        once = np.random.default_rng(0).random(400) < 0.3
        copies = rate_interval(np.repeat(once, 5), np.repeat(np.arange(400), 5).tolist())
        alone = clopper_pearson(int(once.sum()), 400)
        assert (copies.low, copies.high) == pytest.approx((alone.low, alone.high), abs=0.003)
        assert copies.method == "korn-graubard, 400 groups"

    def test_few_groups_and_no_variance_count_groups(self) -> None:
        none = rate_interval(np.zeros(60, dtype=bool), np.repeat(np.arange(6), 10).tolist())
        assert (none.low, none.high) == (0.0, clopper_pearson(0, 6).high)
        few = rate_interval(np.arange(40) % 2 == 0, np.repeat(np.arange(2), 20).tolist())
        assert few.method == "clopper-pearson, n = 2 groups; too few groups (2)"
        even = rate_interval(np.arange(80) % 2 == 0, np.repeat(np.arange(8), 10).tolist())
        assert 0.3 < even.low < 0.5 < even.high < 0.7, "samples at most, however even groups are"

    @pytest.mark.parametrize(("rate", "n_groups"), [(0.1, 10), (0.5, 6), (0.9, 30)])
    def test_it_holds_the_truth(self, rate: float, n_groups: int) -> None:
        rng, size, both, runs = np.random.default_rng(2), 10, np.zeros(2), 150
        groups = np.repeat(np.arange(n_groups), size).tolist()
        for _ in range(runs):
            # Half of the variance is between groups.
            own = rng.beta(rate, 1.0 - rate, size=n_groups)
            hits = (rng.random((n_groups, size)) < own[:, None]).ravel()
            made = (rate_interval(hits, groups), clopper_pearson(int(hits.sum()), hits.size))
            both += [i.low <= rate <= i.high for i in made]
        assert both[0] / runs >= 0.93
        assert both[1] / runs < 0.8, "by samples it would be far too sure"
