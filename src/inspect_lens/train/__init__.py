"""Arrays and labels in, probe file and card out, offline.

Owns estimators, activation sets, the choice of the layer, calibration and evaluation.
May import numpy, torch, sklearn, `probe` and `spec`; keeps out Inspect and vLLM.
"""

from ._calibrate import evaluate_probe, fit_threshold
from ._dataset import ActivationSet
from ._direction import DirectionEstimator, MeanDifferenceProbe
from ._logistic import LogisticProbe
from ._select import LayerChoice, select_layer
from ._splits import require_disjoint, split_by_group
from ._train import train_probe

__all__ = [
    "ActivationSet",
    "DirectionEstimator",
    "LayerChoice",
    "LogisticProbe",
    "MeanDifferenceProbe",
    "evaluate_probe",
    "fit_threshold",
    "require_disjoint",
    "select_layer",
    "split_by_group",
    "train_probe",
]
