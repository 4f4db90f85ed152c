"""Let the auditor of a Petri audit read a probe of the target, and steer the target.

`lens_audit_solver` has all of it in one solver.

Needs the extra `petri`.
"""

from inspect_lens.agents._extras import require as _require

_require("inspect_petri", module="inspect_lens.agents.petri", extra="petri")

from inspect_lens.agents._ask import Ask  # noqa: E402 - after the check

from ._approver import eval_awareness_approver  # noqa: E402 - after the check
from ._target import lens_audit_solver, lens_target_agent  # noqa: E402 - after the check
from ._tools import (  # noqa: E402 - after the check
    STEER,
    Steering,
    ask_activation_oracle,
    read_probe,
    steer_target,
    takes_steering,
)

__all__ = [
    "STEER",
    "Ask",
    "Steering",
    "ask_activation_oracle",
    "eval_awareness_approver",
    "lens_audit_solver",
    "lens_target_agent",
    "read_probe",
    "steer_target",
    "takes_steering",
]
