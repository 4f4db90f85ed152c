"""What a probe does on a set that decided nothing about it, beside what is simpler than it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from inspect_lens.probe import (
    AnyProbe,
    ControlShift,
    Evaluation,
    RealisedRate,
    RecallAt,
    Threshold,
    auroc,
    average_precision,
    bootstrap_interval,
    count_groups,
    delong_interval,
    partial_auroc,
    rate_interval,
)
from inspect_lens.train.fitting._thresholds import fit_threshold
from inspect_lens.train.sets._dataset import ActivationSet
from inspect_lens.train.sets._splits import count_seen, refuse_seen

from ._baselines import baselines_within, measure_baselines

_RATES: Final = (0.01, 0.05)
_PARTIAL: Final = 0.05


def evaluate_probe(
    probe: AnyProbe,
    data: ActivationSet,
    *,
    control: ActivationSet | None = None,
    train: ActivationSet | None = None,
    texts: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
    disjoint_by: str = "group",
    allow_seen: bool = False,
    n_resamples: int = 10_000,
    n_random: int = 20,
    seed: int = 0,
) -> Evaluation:
    """Measure a probe and simpler baselines on a held-out set.

    Samples that the probe's card lists as its own (`ProbeCard.seen`) are refused; where the card
    lists none, `Evaluation.n_seen` is None, as nobody can tell.

    Args:
        probe: with a threshold, if recall and false positive rate are wanted.
        data: the set.
        control: harmless samples: recall at 1% and 5% of them, the area of the set's positives
            against them, and whether the set's negatives are like them.
        train: what the probe was fitted on. With it, baselines learn from it and are compared with
            the probe in pairs (`measure_baselines`); without it they are what `baselines_within`
            finds in the set itself.
        texts: as of `measure_baselines`; by default the columns `prompt_text` and `completion`.
        disjoint_by: key that keeps it apart from the training set; written down, not checked.
        allow_seen: measure also on samples that trained the probe, chose its layer or set its
            threshold; `n_seen` counts them.
        n_resamples: of the cluster bootstrap over groups; 0 leaves it out, as do too few groups
            (`count_groups`) and perfect separation, whose draws do not vary.
        n_random: random directions among the baselines; 0 leaves them out.
        seed: of the bootstrap and of the directions.

    Returns:
        AUROC with DeLong's interval (Obuchowski's, where groups hold several samples) and the
        bootstrap's, partial area, average precision, recall, false positive rate and balanced
        accuracy at the first stored threshold with Clopper and Pearson's intervals, or those of
        Korn and Graubard where groups hold several samples; None where a class is missing. Where
        groups are too few, `too_few` says so, and the interval of the AUROC is the careful one of
        `delong_interval`.

    Raises:
        SpecError: layers or width do not fit, or samples took part in making the probe.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, LDAProbe, evaluate_probe, train_probe

        train, control, test = (
            ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "control", "test")
        )
        probe = train_probe(LDAProbe(), train, name="mine/lda", control=control, n_resamples=100)
        found = evaluate_probe(probe, test, control=control, train=train, n_resamples=200)
        assert found.auroc_interval.low < found.auroc < found.auroc_interval.high
        print(found.recall, [(r.fpr, r.recall) for r in found.recalls], found.best_baseline)
        ```
    """
    if not allow_seen:
        refuse_seen(probe, data)
    scores = data.scores(probe)
    area = auroc(data.labels, scores)
    counts = count_groups(data.labels, data.groups)
    facts: dict[str, Any] = {"n_groups": counts.total}
    if not math.isnan(area):
        facts |= {
            "auroc": area,
            "too_few": counts.too_few,
            "auroc_interval": delong_interval(data.labels, scores, groups=data.groups),
            "partial_auroc": partial_auroc(data.labels, scores, max_fpr=_PARTIAL),
            "average_precision": average_precision(data.labels, scores),
        }
        # Of perfect separation every draw is perfect: a point would pass for an interval.
        if n_resamples and not counts.too_few and 0.0 < area < 1.0:
            facts["auroc_bootstrap"] = bootstrap_interval(
                data.labels, scores, groups=data.groups, n_resamples=n_resamples, seed=seed
            )
        if train is not None:
            facts["baselines"] = measure_baselines(
                probe, train, [data], texts=texts, n_random=n_random, seed=seed
            )
        else:
            facts["baselines"] = baselines_within(probe, data, texts=texts)
    facts["rates"] = tuple(_realised(probe, data, threshold) for threshold in probe.card.thresholds)
    for threshold, rate in zip(probe.card.thresholds, facts["rates"], strict=True):
        if threshold is probe.threshold:
            facts |= {"recall": rate.recall, "recall_interval": rate.recall_interval}
            facts |= {"fpr": rate.rate, "fpr_interval": rate.interval}
            if rate.recall is not None and rate.rate is not None:
                facts["balanced_accuracy"] = (rate.recall + 1.0 - rate.rate) / 2.0
    if control is not None:
        facts |= _against(probe, control.negatives(), data, scores)
    return Evaluation.model_validate(
        {
            "name": data.name,
            "sha256": data.sha256,
            "n_positive": data.n_positive,
            "n_negative": data.n_negative,
            "disjoint_by": disjoint_by,
            "n_seen": count_seen(probe, data),
            **facts,
        }
    )


def _realised(probe: AnyProbe, data: ActivationSet, threshold: Threshold) -> RealisedRate:
    """What a threshold of the card does on the answers of a set."""
    statistic = threshold.statistic or probe.card.answer
    values = data.statistic(probe, statistic)
    lengths = [int(mask.sum()) for mask in data.mask]
    facts: dict[str, Any] = {}
    for side, which in (("recall", data.labels), ("", ~data.labels)):
        picks = np.flatnonzero(which)
        if not picks.size:
            continue
        hits = np.concatenate([values[i] for i in picks]) > threshold.value
        groups = [data.groups[i] for i in picks for _ in values[i]]
        share, bounds = ("recall", "recall_interval") if side else ("rate", "interval")
        facts |= {share: float(hits.mean()), bounds: rate_interval(hits, groups)}
        if not side:
            sizes = [lengths[i] for i in picks]
            covers = [statistic.covers(n, threshold.n_tokens) for n in sizes]
            facts |= {"n_tokens": (min(sizes), max(sizes)), "outside": 1.0 - float(np.mean(covers))}
    return RealisedRate(
        statistic=str(statistic),
        threshold=threshold.value,
        nominal=threshold.fpr,
        holds_for=threshold.n_tokens,
        **facts,
    )


def _against(
    probe: AnyProbe, control: ActivationSet, data: ActivationSet, scores: NDArray[np.float64]
) -> dict[str, Any]:
    """The set's positives against a control set, and whether its negatives are alike."""
    harmless = control.scores(probe)
    facts: dict[str, Any] = {}
    for side, ours in (("positive", data.labels), ("negative", ~data.labels)):
        if not ours.any():
            continue
        both = np.concatenate([scores[ours], harmless])
        first = np.arange(both.size) < int(ours.sum())
        # The same group in both sets, such as one scenario, stays one.
        groups = [*_of(data, ours), *control.groups]
        area, interval = auroc(first, both), delong_interval(first, both, groups=groups)
        if side == "positive":
            facts |= {"auroc_control": area, "auroc_control_interval": interval}
        else:
            facts["control_shift"] = ControlShift(
                control=control.name, auroc=area, interval=interval
            )
    if data.n_positive:
        facts["recalls"] = _recalls(control, harmless, data, scores)
    return facts


def _recalls(
    control: ActivationSet,
    harmless: NDArray[np.float64],
    data: ActivationSet,
    scores: NDArray[np.float64],
) -> tuple[RecallAt, ...]:
    lengths = [int(mask.sum()) for mask in control.mask]
    span = (min(lengths), max(lengths))
    made = []
    for fpr in _RATES:
        if harmless.size < round(1.0 / fpr):
            continue  # no threshold of so few holds the rate
        value = fit_threshold(harmless, fpr, groups=control.groups, allow_few=True).value
        hits = scores[data.labels] > value
        made.append(
            RecallAt(
                fpr=fpr, control=control.name, threshold=value, recall=float(hits.mean()),
                interval=rate_interval(hits, _of(data, data.labels)), n_tokens=span,
            )
        )  # fmt: skip
    return tuple(made)


def _of(data: ActivationSet, which: NDArray[np.bool_]) -> list[str]:
    return [data.groups[i] for i in np.flatnonzero(which)]
