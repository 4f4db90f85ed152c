"""Scorers and metrics for Inspect tasks."""

from ._attention import attention_tracker, document_rank
from ._baselines import leakage_baseline, length_auroc, validity, words_auroc
from ._cascade import CascadeRecord, probe_cascade, probe_ensemble, read_cascade
from ._dose import dose_curves, dose_metric, dose_response, dose_table
from ._feature import lens_rank, sae_feature
from ._judges import (
    REFUSAL_PHRASES,
    coherence,
    refusal_rate,
)
from ._labels import compare
from ._metrics import (
    at_threshold,
    auroc_metric,
    average_precision_metric,
    calibration_error,
    judged_share,
    recall_at_fpr_metric,
    threshold_accuracy,
)
from ._monitor import monitor_alarm
from ._oracle import follow_up_score, oracle_answer, oracle_contrast
from ._probe import deception_probe, probe_score, trait_projection
from ._reconstruction import fraction_explained_metric, reconstruction_score
from ._sweeps import DoseRow

__all__ = [
    "REFUSAL_PHRASES",
    "CascadeRecord",
    "DoseRow",
    "at_threshold",
    "attention_tracker",
    "auroc_metric",
    "average_precision_metric",
    "calibration_error",
    "coherence",
    "compare",
    "deception_probe",
    "document_rank",
    "dose_curves",
    "dose_metric",
    "dose_response",
    "dose_table",
    "follow_up_score",
    "fraction_explained_metric",
    "judged_share",
    "leakage_baseline",
    "length_auroc",
    "lens_rank",
    "monitor_alarm",
    "oracle_answer",
    "oracle_contrast",
    "probe_cascade",
    "probe_ensemble",
    "probe_score",
    "read_cascade",
    "recall_at_fpr_metric",
    "reconstruction_score",
    "refusal_rate",
    "sae_feature",
    "threshold_accuracy",
    "trait_projection",
    "validity",
    "words_auroc",
]
