"""Activation patching and causal tracing: which layer and token a prediction depends on."""

from ._align import Align, Alignment, align_tokens
from ._result import CausalTrace, PatchCell, PatchSweep, RunScore, Source
from ._runs import Prompt
from ._sweep import patch_sweep
from ._trace import causal_trace, embedding_std

__all__ = [
    "Align",
    "Alignment",
    "CausalTrace",
    "PatchCell",
    "PatchSweep",
    "Prompt",
    "RunScore",
    "Source",
    "align_tokens",
    "causal_trace",
    "embedding_std",
    "patch_sweep",
]
