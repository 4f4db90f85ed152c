"""Solvers for Inspect tasks: capture, steer, edit, patch, sweep, read a lens, act on a probe."""

from ._capture import with_capture, with_probes
from ._decisions import GateAttempt, GateDecision, GateDecisions
from ._edits import ablate_direction, with_edits, with_steering
from ._gate import GateAction, probe_gate
from ._latent_sweep import latent_sweep
from ._lens import logit_lens
from ._oracle import activation_oracle, self_explain
from ._pairs import contrastive_pairs, read_given
from ._patch import causal_trace, patch_sweep
from ._resample import probe_resample
from ._sweep import Control, EditVariant, edit_sweep, steering_sweep

__all__ = [
    "Control",
    "EditVariant",
    "GateAction",
    "GateAttempt",
    "GateDecision",
    "GateDecisions",
    "ablate_direction",
    "activation_oracle",
    "causal_trace",
    "contrastive_pairs",
    "edit_sweep",
    "latent_sweep",
    "logit_lens",
    "patch_sweep",
    "probe_gate",
    "probe_resample",
    "read_given",
    "self_explain",
    "steering_sweep",
    "with_capture",
    "with_edits",
    "with_probes",
    "with_steering",
]
