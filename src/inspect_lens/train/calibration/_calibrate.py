"""The threshold on a control set."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from inspect_lens.errors import SpecError
from inspect_lens.probe import (
    Threshold,
    conformal_threshold,
    count_groups,
    required_negatives,
)

from ._rates import rate_interval

__all__ = ["fit_threshold"]


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
        raise SpecError(
            f"control_scores: {size} of {control!r} for a false positive rate of {fpr:g}; allowed "
            f"are {need} or more, as fewer cannot show that rate; score more control samples of "
            "other groups, ask for a larger rate, or pass allow_few=True (--allow-few) and read "
            "the interval"
        )
    by_group = groups is not None and found < scores.size and found + 1 >= 1.0 / fpr - 1e-9
    value = conformal_threshold(scores, fpr, groups=groups if by_group else None)
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
        rule="groups" if by_group else "samples",
    )
