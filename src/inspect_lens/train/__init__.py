"""Train probes and steering vectors on activations, and lenses on texts, offline.

Activations and labels go in, and a probe with its card comes out. A model and texts go in, and a
lens comes out.
"""

from inspect_lens.sae import SparseEncoder, read_sae

from ._lenses import evaluate_lens, fit_jacobian_lens, fit_tuned_lens
from ._train import train_probe
from .families._binary import BinaryEstimator
from .families._direction import (
    DirectionEstimator,
    LATProbe,
    LDAProbe,
    MassMeanProbe,
    MeanDifferenceProbe,
)
from .families._ensemble import EnsembleProbe, StackWeights, stack_weights
from .families._families import FAMILIES, make_estimator
from .families._head import HeadProbe
from .families._logistic import LogisticProbe, SklearnProbe, TorchLogisticProbe
from .families._sae import SAEFeatureProbe
from .fitting._across import CarriedProbe, transfer_probe
from .fitting._fit import fit_layers, fit_on
from .fitting._thresholds import calibrate, calibrate_threshold, fit_threshold
from .judging._cross_validate import CrossValidated, FoldScore, cross_validate_probe
from .judging._domains import (
    CascadePoint,
    DomainScore,
    StyleShift,
    cascade_frontier,
    leave_one_domain_out,
    style_shift,
    transfer_statement,
)
from .judging._evaluate import (
    bag_of_words_scores,
    baseline,
    evaluate_probe,
    length_scores,
    measure_baselines,
)
from .judging._select import LayerChoice, select_layer
from .judging._shift import RateShift, ScoreShift, score_shift
from .sets._dataset import ActivationSet
from .sets._from_arrays import from_arrays, from_hf, from_nnsight, from_transformer_lens
from .sets._splits import refuse_seen, require_disjoint, split_by_group
from .sets._store_set import StoreSet
from .vectors._condition import Condition, fit_condition, similarity
from .vectors._refusal import (
    RefusalCandidate,
    RefusalChoice,
    RefusalMeter,
    RefusalScores,
    refusal_candidates,
    select_refusal,
)
from .vectors._vectors import (
    VectorMethod,
    VectorRows,
    VectorScore,
    erase,
    evaluate_vector,
    extract_vector,
    pair_set,
    persona_vector,
)

__all__ = [
    "FAMILIES",
    "ActivationSet",
    "BinaryEstimator",
    "CarriedProbe",
    "CascadePoint",
    "Condition",
    "CrossValidated",
    "DirectionEstimator",
    "DomainScore",
    "EnsembleProbe",
    "FoldScore",
    "HeadProbe",
    "LATProbe",
    "LDAProbe",
    "LayerChoice",
    "LogisticProbe",
    "MassMeanProbe",
    "MeanDifferenceProbe",
    "RateShift",
    "RefusalCandidate",
    "RefusalChoice",
    "RefusalMeter",
    "RefusalScores",
    "SAEFeatureProbe",
    "ScoreShift",
    "SklearnProbe",
    "SparseEncoder",
    "StackWeights",
    "StoreSet",
    "StyleShift",
    "TorchLogisticProbe",
    "VectorMethod",
    "VectorRows",
    "VectorScore",
    "bag_of_words_scores",
    "baseline",
    "calibrate",
    "calibrate_threshold",
    "cascade_frontier",
    "cross_validate_probe",
    "erase",
    "evaluate_lens",
    "evaluate_probe",
    "evaluate_vector",
    "extract_vector",
    "fit_condition",
    "fit_jacobian_lens",
    "fit_layers",
    "fit_on",
    "fit_threshold",
    "fit_tuned_lens",
    "from_arrays",
    "from_hf",
    "from_nnsight",
    "from_transformer_lens",
    "leave_one_domain_out",
    "length_scores",
    "make_estimator",
    "measure_baselines",
    "pair_set",
    "persona_vector",
    "read_sae",
    "refusal_candidates",
    "refuse_seen",
    "require_disjoint",
    "score_shift",
    "select_layer",
    "select_refusal",
    "similarity",
    "split_by_group",
    "stack_weights",
    "style_shift",
    "train_probe",
    "transfer_probe",
    "transfer_statement",
]
