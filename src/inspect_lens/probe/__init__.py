"""Apply trained probes to arrays, load and save them, and judge their scores."""

from .card._card import (
    RECALL_FLOOR,
    Calibration,
    LayerScore,
    ModelRef,
    ProbeCard,
    Threshold,
    TrainingFacts,
)
from .card._files import write_atomic
from .card._found import Found, found_above
from .card._points import CardPoint, card_points, choose_point
from .card._seen import SeenSamples
from .kinds._linear import Probe
from .kinds._load import AnyProbe, load_probe, register_probe_dir
from .kinds._model import check_model, fingerprint_model
from .kinds._neural import NeuralProbe
from .pooling._alarm import AlarmDelays, alarm_delays
from .pooling._head import (
    LEARNED_POOLS,
    HeadOutputs,
    HeadSpec,
    StreamingHead,
    head_outputs,
    parse_head_pool,
    pool_head,
    pool_heads,
)
from .pooling._pool import POOLS, SENTENCE_POOL, Pool, parse_pool, pool_scores, sentence_ends
from .pooling._streaming import StreamingPool, first_crossing, running_pool
from .pooling._tokens import SELECTIONS, TokenText, select_tokens
from .statistics._bootstrap import bootstrap_interval
from .statistics._compare import Comparison, compare_auroc, format_p_value
from .statistics._groups import (
    MIN_EFFECTIVE,
    MIN_GROUPS,
    MIN_GROUPS_PER_CLASS,
    GroupCounts,
    count_groups,
)
from .statistics._intervals import clopper_pearson, delong_interval
from .statistics._measured import Baseline, ControlShift, Evaluation, Interval, RecallAt, Transfer
from .statistics._metrics import (
    OperatingPoint,
    auroc,
    conformal_threshold,
    recall_at_fpr,
    required_negatives,
    split_classes,
)
from .statistics._permutations import paired_permutation_test, permutation_test
from .statistics._ranking import (
    ROCCurve,
    average_precision,
    balanced_accuracy,
    partial_auroc,
    precision_at_base_rate,
    roc_band,
    roc_curve,
)
from .statistics._reliability import (
    Reliability,
    brier_score,
    expected_calibration_error,
    reliability_curve,
)
from .statistics._words import cross_validated_words, hash_words

__all__ = [
    "LEARNED_POOLS",
    "MIN_EFFECTIVE",
    "MIN_GROUPS",
    "MIN_GROUPS_PER_CLASS",
    "POOLS",
    "RECALL_FLOOR",
    "SELECTIONS",
    "SENTENCE_POOL",
    "AlarmDelays",
    "AnyProbe",
    "Baseline",
    "Calibration",
    "CardPoint",
    "Comparison",
    "ControlShift",
    "Evaluation",
    "Found",
    "GroupCounts",
    "HeadOutputs",
    "HeadSpec",
    "Interval",
    "LayerScore",
    "ModelRef",
    "NeuralProbe",
    "OperatingPoint",
    "Pool",
    "Probe",
    "ProbeCard",
    "ROCCurve",
    "RecallAt",
    "Reliability",
    "SeenSamples",
    "StreamingHead",
    "StreamingPool",
    "Threshold",
    "TokenText",
    "TrainingFacts",
    "Transfer",
    "alarm_delays",
    "auroc",
    "average_precision",
    "balanced_accuracy",
    "bootstrap_interval",
    "brier_score",
    "card_points",
    "check_model",
    "choose_point",
    "clopper_pearson",
    "compare_auroc",
    "conformal_threshold",
    "count_groups",
    "cross_validated_words",
    "delong_interval",
    "expected_calibration_error",
    "fingerprint_model",
    "first_crossing",
    "format_p_value",
    "found_above",
    "hash_words",
    "head_outputs",
    "load_probe",
    "paired_permutation_test",
    "parse_head_pool",
    "parse_pool",
    "partial_auroc",
    "permutation_test",
    "pool_head",
    "pool_heads",
    "pool_scores",
    "precision_at_base_rate",
    "recall_at_fpr",
    "register_probe_dir",
    "reliability_curve",
    "required_negatives",
    "roc_band",
    "roc_curve",
    "running_pool",
    "select_tokens",
    "sentence_ends",
    "split_classes",
    "write_atomic",
]
