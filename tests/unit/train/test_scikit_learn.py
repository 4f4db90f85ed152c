"""scikit-learn's own checks accept the families: one per base class by day, the others at night."""

from __future__ import annotations

from typing import Any

import pytest
from sklearn.utils.estimator_checks import check_estimator

from inspect_lens.train import (
    EnsembleProbe,
    HeadProbe,
    LATProbe,
    LDAProbe,
    LogisticProbe,
    MassMeanProbe,
    MeanDifferenceProbe,
    SAEFeatureProbe,
    TorchLogisticProbe,
    make_estimator,
)

BY_DAY = [
    MeanDifferenceProbe(),  # DirectionEstimator
    make_estimator("mlp", mlp_sizes=(8,), lr=0.1, steps=12, batch=512),  # HeadProbe
    EnsembleProbe(base=MeanDifferenceProbe(), folds=2),  # BinaryEstimator
    SAEFeatureProbe(),  # the same, and rows become sparse
]
AT_NIGHT = [
    LogisticProbe(),
    MassMeanProbe(),
    MassMeanProbe(iid=True),
    LDAProbe(),
    LDAProbe(shrinkage="ridge"),
    LATProbe(),
    make_estimator("lr-pressure"),
    TorchLogisticProbe(lr=0.1, epochs=20, weight_decay=0.01),
    make_estimator("attention-lite", lr=0.2, steps=12, batch=512),
    make_estimator(
        "rolling-attention",
        pool="rolling_attention:2",
        heads=2,
        mlp_sizes=(8,),
        lr=0.1,
        steps=12,
        batch=512,
    ),
    make_estimator("gated-bipolar", heads=4, mlp_sizes=(8,), lr=0.05, steps=12, batch=512),
    make_estimator("bilinear", mlp_sizes=(8,), lr=0.1, steps=12, batch=512),
    make_estimator("segment-coherence", lr=0.2, steps=12, batch=512),
]


# Weights are not repeated rows where folds or batches are drawn, and where liblinear is; families
# that have no meaning for weights refuse them.
REPEATED = {"check_sample_weight_equivalence_on_dense_data": "rows are drawn"}
REFUSED = REPEATED | dict.fromkeys(
    (
        "check_sample_weights_pandas_series", "check_sample_weights_not_an_array",
        "check_sample_weights_list", "check_sample_weights_shape",
        "check_sample_weights_not_overwritten",
    ),
    "weights are refused",
)  # fmt: skip


def expected(estimator: Any) -> dict[str, str]:
    if isinstance(estimator, LATProbe) or getattr(estimator, "shrinkage", "") == "ledoit-wolf":
        return REFUSED
    drawn = isinstance(estimator, HeadProbe | EnsembleProbe | SAEFeatureProbe)
    if getattr(estimator, "activation", "") == "square":
        # Classes on either side of the mean are alike to a quadratic form without a linear part.
        return REPEATED | {"check_classifiers_train": "its classes differ along a direction"}
    return REPEATED if drawn else {}


@pytest.mark.parametrize("estimator", BY_DAY, ids=lambda e: type(e).__name__)
def test_a_base_class_is_accepted(estimator: Any) -> None:
    check_estimator(estimator, expected_failed_checks=expected(estimator))


@pytest.mark.nightly(
    held_by="tests/unit/train/test_scikit_learn.py::test_a_base_class_is_accepted",
    why="some fifty checks for each family",
)
@pytest.mark.parametrize("estimator", AT_NIGHT, ids=str)
def test_a_family_is_accepted(estimator: Any) -> None:
    check_estimator(estimator, expected_failed_checks=expected(estimator))
