"""Solvers for Inspect tasks: capture, steer, edit, patch, sweep, read a lens, act on a probe."""

from ._ablate import ablate_direction
from ._capture import with_capture
from ._decisions import GateAttempt, GateDecision, GateDecisions
from ._edit_sweep import EditVariant, edit_sweep
from ._edits import with_edits
from ._explain import self_explain
from ._gate import GateAction, probe_gate
from ._given import read_given
from ._latent_sweep import latent_sweep
from ._lens import logit_lens
from ._oracle import activation_oracle
from ._pairs import contrastive_pairs
from ._patch import causal_trace, patch_sweep
from ._probes import with_probes
from ._resample import probe_resample
from ._steer import with_steering
from ._sweep import Control, steering_sweep

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
