"""Watch agents by probes: approvers for any eval, and tools and monitors for other packages.

`probe_approver` works in any eval that captures. `agents.petri`, `agents.control` (ControlArena),
`agents.sentinel` and `agents.scout` each need the extra of their name.
"""

from ._approver import probe_approver

__all__ = ["probe_approver"]
