"""Whether what is learned on some domains holds on one that was left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, clone

from inspect_lens.errors import SpecError
from inspect_lens.probe import Interval, ProbeCard, auroc, delong_interval
from inspect_lens.train.families._sklearn import as_family
from inspect_lens.train.families._trainable import Rows, TrainableProbe
from inspect_lens.train.fitting._fit import fit_on
from inspect_lens.train.sets._dataset import ActivationSet

__all__ = ["DomainScore", "leave_one_domain_out"]


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


def leave_one_domain_out(
    estimator: TrainableProbe | BaseEstimator,
    data: ActivationSet,
    domains: str | Sequence[str],
    *,
    layer: int,
    rows: Rows | None = None,
    pool: str = "mean",
    seed: int = 0,
) -> tuple[DomainScore, ...]:
    """Leave each domain out of training in turn, and measure the probe on it.

    A probe trained on a mixture may know every domain by its own marks. What it is worth on a new
    one shows on a domain that it was not trained on. Beside it stand what the domain gives alone,
    and what the mixture gives once the domain is part of it.

    Args:
        estimator: unfitted; it is cloned for each domain.
        data: samples of several domains, with groups that lie within one.
        domains: column with the domain of each sample, or the domains, (samples,).
        layer: to train at; choose it on other data.
        rows: as in `fit_on`.
        pool: how token scores become one.
        seed: of the halves of a domain.

    Returns:
        One score for each domain, in the order of their names.

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
        for half in _halves(data, names == name, seed):
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


def _halves(
    data: ActivationSet, inside: NDArray[np.bool_], seed: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Two masks of whole groups of a domain."""
    groups = np.array(data.groups)
    unique = np.random.default_rng(seed).permutation(np.unique(groups[inside]))
    first = np.isin(groups, unique[: len(unique) // 2])
    return inside & first, inside & ~first
