"""An approver of tool calls that reads a probe of the turn that makes them.

Owns `probe_approver`; gates judge turns by the same code. May import inspect_ai, `reading`,
`model`, `probe` and `spec`; keeps out torch, scorers and solvers.
"""

from ._probe import OnMissing, probe_approver

__all__ = ["OnMissing", "probe_approver"]
