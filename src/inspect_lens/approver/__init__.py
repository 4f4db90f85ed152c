"""Approve or refuse tool calls by a probe of the turn that makes them.

The approver works in any eval that captures, and gates judge turns by the same code.
"""

from ._probe import probe_approver

__all__ = ["probe_approver"]
