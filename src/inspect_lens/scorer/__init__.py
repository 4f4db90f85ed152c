"""Scorers and metrics for Inspect tasks."""

from ._cascade import probe_cascade
from ._coherence import coherence
from ._compare import compare
from ._document_rank import document_rank
from ._dose import dose_curves, dose_metric, dose_response, dose_table
from ._dose_table import DoseRow
from ._edit_effects import edit_effects, edit_rates
from ._ensemble import probe_ensemble
from ._feature import lens_rank, sae_feature
from ._frontier import CascadeRecord, read_cascade
from ._leakage import leakage_baseline, length_auroc, words_auroc
from ._metrics import auroc, average_precision, judged_share, recall_at_fpr
from ._monitor import monitor_alarm
from ._operating import at_threshold, calibration_error, threshold_accuracy
from ._oracle import oracle_answer, oracle_contrast
from ._probe import deception_probe, probe_score
from ._projection import trait_projection
from ._refusal import REFUSAL_PHRASES, refusal_rate
from ._tracker import attention_tracker

__all__ = [
    "REFUSAL_PHRASES",
    "CascadeRecord",
    "DoseRow",
    "at_threshold",
    "attention_tracker",
    "auroc",
    "average_precision",
    "calibration_error",
    "coherence",
    "compare",
    "deception_probe",
    "document_rank",
    "dose_curves",
    "dose_metric",
    "dose_response",
    "dose_table",
    "edit_effects",
    "edit_rates",
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
    "recall_at_fpr",
    "refusal_rate",
    "sae_feature",
    "threshold_accuracy",
    "trait_projection",
    "words_auroc",
]
