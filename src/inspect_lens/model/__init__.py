"""The Inspect providers, the configuration of a call, and its results."""

from inspect_lens._hook_results import SavedValues, read_results
from inspect_lens._intake import read_vector

from .from_logs._read import (
    CapturedCall,
    ScoredCall,
    activations,
    activations_df,
    activations_for,
    know_log,
    probe_scores,
    probe_scores_for,
    read_activations,
    read_probe_scores,
    receipt,
    resident_activation_bytes,
)
from .from_logs._sidecar import read_sidecar, write_sidecar
from .provider._scope import lens_scope
from .replay._recapture import recapture, recaptures, reread, token_logprobs
from .request._config import lens_config
from .scores._probe_scores import ProbeScores
from .stored._handle import Activations, TensorInfo

__all__ = [
    "Activations",
    "CapturedCall",
    "ProbeScores",
    "SavedValues",
    "ScoredCall",
    "TensorInfo",
    "activations",
    "activations_df",
    "activations_for",
    "know_log",
    "lens_config",
    "lens_scope",
    "probe_scores",
    "probe_scores_for",
    "read_activations",
    "read_probe_scores",
    "read_results",
    "read_sidecar",
    "read_vector",
    "recapture",
    "recaptures",
    "receipt",
    "reread",
    "resident_activation_bytes",
    "token_logprobs",
    "write_sidecar",
]
