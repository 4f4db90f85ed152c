"""Applying a trained probe to arrays, and loading its file.

Owns probes, their cards and files, pooling, and the statistics that judge them.
May import numpy, pydantic, safetensors and `spec`; keeps out torch, sklearn and Inspect.
"""

from ._card import (
    Evaluation,
    Interval,
    LayerScore,
    ModelRef,
    ProbeCard,
    Threshold,
    TrainingFacts,
)
from ._files import write_atomic
from ._intervals import bootstrap_interval, clopper_pearson, delong_interval
from ._linear import Probe
from ._load import load_probe, register_probe_dir
from ._metrics import (
    OperatingPoint,
    auroc,
    conformal_threshold,
    recall_at_fpr,
    required_negatives,
    split_classes,
)
from ._model import check_model, fingerprint_model
from ._pool import POOLS, Pool, parse_pool, pool_scores

__all__ = [
    "POOLS",
    "Evaluation",
    "Interval",
    "LayerScore",
    "ModelRef",
    "OperatingPoint",
    "Pool",
    "Probe",
    "ProbeCard",
    "Threshold",
    "TrainingFacts",
    "auroc",
    "bootstrap_interval",
    "check_model",
    "clopper_pearson",
    "conformal_threshold",
    "delong_interval",
    "fingerprint_model",
    "load_probe",
    "parse_pool",
    "pool_scores",
    "recall_at_fpr",
    "register_probe_dir",
    "required_negatives",
    "split_classes",
    "write_atomic",
]
