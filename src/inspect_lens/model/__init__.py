"""The Inspect providers, the configuration of a call, and its results."""

from inspect_lens._base.to_torch import SavedValues, read_results
from inspect_lens._intake import read_vector

from ._handle import Activations, TensorInfo
from ._read import (
    CapturedCall,
    ScoredCall,
    activations,
    activations_df,
    activations_for,
    know_log,
    probe_scores,
    read_activations,
    read_probe_scores,
    receipt,
    resident_activation_bytes,
)
from ._recapture import recapture, token_logprobs
from ._request import lens_config
from ._scope import lens_scope
from ._scores import ProbeScores

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
    "read_activations",
    "read_probe_scores",
    "read_results",
    "read_vector",
    "recapture",
    "receipt",
    "resident_activation_bytes",
    "token_logprobs",
]
