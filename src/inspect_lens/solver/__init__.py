"""Solvers for Inspect tasks: capture, steer, edit, patch, sweep, read a lens, act on a probe."""

from ._gate import GateAction, GateAttempt, GateDecision, GateDecisions, probe_gate
from ._lens import ablate_direction, with_capture, with_lens, with_steering
from ._oracle import activation_oracle, follow_up, self_explain
from ._pairs import contrastive_pairs, read_given
from ._patch import causal_trace, patch_sweep
from ._sweep import Control, EditVariant, SaeLatents, steering_sweep

__all__ = [
    "Control",
    "EditVariant",
    "GateAction",
    "GateAttempt",
    "GateDecision",
    "GateDecisions",
    "SaeLatents",
    "ablate_direction",
    "activation_oracle",
    "causal_trace",
    "contrastive_pairs",
    "follow_up",
    "patch_sweep",
    "probe_gate",
    "read_given",
    "self_explain",
    "steering_sweep",
    "with_capture",
    "with_lens",
    "with_steering",
]
