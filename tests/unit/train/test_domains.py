"""A probe that knows each domain by its own marks fails on one that was left out."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from inspect_lens.errors import SpecError
from inspect_lens.train import ActivationSet, LDAProbe, from_arrays, leave_one_domain_out

H, N = 20, 90
NAMES = ("chat", "code", "games")


def planted(*, shared: float, own: float) -> ActivationSet:
    """Three domains; labels move along one common axis, and along one axis of each domain."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3 * N, 1, H))
    labels = np.arange(3 * N) % 2
    x[:, 0, 0] += shared * labels
    for i in range(3):
        part = slice(i * N, (i + 1) * N)
        x[part, 0, 1 + i] += own * labels[part]
    return from_arrays(
        x, labels, layers=[5], groups=[f"g{i // 2}" for i in range(3 * N)],
        columns={"domain": np.repeat(NAMES, N).tolist()},
    )  # fmt: skip


def test_what_is_shared_holds_on_the_domain_that_was_left_out() -> None:
    scores = leave_one_domain_out(LDAProbe(), planted(shared=3.0, own=0.0), "domain", layer=5)
    assert [s.domain for s in scores] == sorted(NAMES)
    for score in scores:
        assert score.auroc > 0.95
        assert score.interval.low < score.auroc < score.interval.high
        assert (score.n_positive, score.n_negative) == (N // 2, N // 2)
        assert score.mixed > 0.95


@pytest.mark.parametrize("family", [LDAProbe(), LogisticRegression(C=0.1)], ids=["ours", "sklearn"])
def test_marks_of_a_domain_do_not(family: LDAProbe) -> None:
    scores = leave_one_domain_out(family, planted(shared=0.0, own=4.0), "domain", layer=5)
    for score in scores:
        assert abs(score.auroc - 0.5) < 0.17
        assert score.within > 0.9, "inside the domain they tell the classes apart"
        assert score.mixed > 0.75, "and so they do in a mixture that holds the domain"


def test_domains_that_cannot_be_left_out_are_refused() -> None:
    data = planted(shared=1.0, own=0.0)
    for domains, match in (
        (["a"] * len(data), "two domains or more"),
        (["a", "b"], "one each"),
        ([str(i % 2) for i in range(len(data))], "groups within one domain"),
    ):
        with pytest.raises(SpecError, match=match):
            leave_one_domain_out(LDAProbe(), data, domains, layer=5)
    alone = data.subset([*range(N), *range(N, 2 * N, 2)])
    with pytest.raises(SpecError, match="allowed are both classes"):
        leave_one_domain_out(LDAProbe(), alone, "domain", layer=5)
