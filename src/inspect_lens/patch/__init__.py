"""Activation patching and causal tracing: which layer and token a prediction depends on."""

from inspect_lens._patching.result import CausalTrace, PatchCell, PatchSweep, RunScore, Source
from inspect_lens._patching.runs import Align, Alignment, Prompt, align_tokens

from ._sweep import Over, causal_trace, embedding_std, patch_sweep

__all__ = [
    "Align",
    "Alignment",
    "CausalTrace",
    "Over",
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
