"""The threshold on a control set, and what a probe does on a held-out one."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from inspect_lens.errors import SpecError
from inspect_lens.probe import (
    AnyProbe,
    Evaluation,
    Threshold,
    auroc,
    bootstrap_interval,
    conformal_threshold,
    count_groups,
    delong_interval,
    required_negatives,
)

from ._dataset import ActivationSet
from ._rates import rate_interval
from ._seen import count_seen, refuse_seen

__all__ = ["evaluate_probe", "fit_threshold"]


def fit_threshold(
    control_scores: ArrayLike,
    fpr: float = 0.01,
    *,
    control: str = "control",
    control_sha256: str | None = None,
    groups: Sequence[Hashable] | None = None,
    allow_few: bool = False,
) -> Threshold:
    """Set a threshold that new control samples exceed with probability at most `fpr`.

    Args:
        control_scores: (samples,) scores of harmless samples, written by the same model.
        fpr: false positive rate to allow.
        control: name of the control set.
        control_sha256: its hash.
        groups: (samples,) what is independent, such as the scenario; None takes samples. Groups
            are what is counted: ten answers to one question are one.
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
        raise SpecError(
            f"control_scores: {size} of {control!r} for a false positive rate of {fpr:g}; allowed "
            f"are {need} or more, as fewer cannot show that rate; score more control samples of "
            "other groups, ask for a larger rate, or pass allow_few=True (--allow-few) and read "
            "the interval"
        )
    value = conformal_threshold(scores, fpr)
    above = scores > value
    return Threshold(
        value=value,
        fpr=fpr,
        control=control,
        control_sha256=control_sha256,
        n_control=scores.size,
        n_groups=None if groups is None else found,
        n_above=int(above.sum()),
        interval=rate_interval(above, groups),
    )


def evaluate_probe(
    probe: AnyProbe,
    data: ActivationSet,
    *,
    disjoint_by: str = "group",
    allow_seen: bool = False,
    n_resamples: int = 10_000,
    seed: int = 0,
) -> Evaluation:
    """Measure a probe on a set that decided nothing about it.

    Samples that the probe's card lists as its own (`ProbeCard.seen`) are refused; where the card
    lists none, `Evaluation.n_seen` is None, as nobody can tell.

    Args:
        probe: with a threshold, if recall and false positive rate are wanted.
        data: the set.
        disjoint_by: key that keeps it apart from the training set; written down, not checked.
        allow_seen: measure also on samples that trained the probe, chose its layer or set its
            threshold; `n_seen` counts them.
        n_resamples: of the cluster bootstrap over groups; 0 leaves it out, as do too few groups
            (`count_groups`) and perfect separation, whose draws do not vary.
        seed: of the bootstrap.

    Returns:
        AUROC with DeLong's interval (Obuchowski's, where groups hold several samples) and the
        bootstrap's, recall and false positive rate at the
        first stored threshold with Clopper and Pearson's intervals, or those of Korn and Graubard
        where groups hold several samples; None where a class is missing. Where groups are too few,
        `too_few` says so, and the interval of the AUROC is the careful one of `delong_interval`.

    Raises:
        SpecError: layers or width do not fit, or samples took part in making the probe.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, LDAProbe, evaluate_probe, train_probe

        train, control, test = (
            ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "control", "test")
        )
        probe = train_probe(LDAProbe(), train, name="mine/lda", control=control, n_resamples=100)
        found = evaluate_probe(probe, test, n_resamples=200)
        assert found.auroc_interval.low < found.auroc < found.auroc_interval.high
        ```
    """
    if not allow_seen:
        refuse_seen(probe, data)
    scores = data.scores(probe)
    area = auroc(data.labels, scores)
    counts = count_groups(data.labels, data.groups)
    facts: dict[str, object] = {"n_groups": counts.total}
    if not math.isnan(area):
        facts["auroc"], facts["too_few"] = area, counts.too_few
        facts["auroc_interval"] = delong_interval(data.labels, scores, groups=data.groups)
        # Of perfect separation every draw is perfect: a point would pass for an interval.
        if n_resamples and not counts.too_few and 0.0 < area < 1.0:
            facts["auroc_bootstrap"] = bootstrap_interval(
                data.labels, scores, groups=data.groups, n_resamples=n_resamples, seed=seed
            )
    if probe.threshold is not None:
        flagged = scores > probe.threshold.value
        for key, of_class in (("recall", data.labels), ("fpr", ~data.labels)):
            if of_class.any():
                own = [data.groups[i] for i in np.flatnonzero(of_class)]
                facts[key] = float(flagged[of_class].mean())
                facts[f"{key}_interval"] = rate_interval(flagged[of_class], own)
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
