"""Monitors for ControlArena that read a probe of the policy's own activations.

Needs the extra `control`.
"""

from inspect_lens._extras import require as _require

_require("control_arena", room="inspect_lens.control", extra="control")

from ._monitors import (  # noqa: E402 - after the check
    coup_probe_monitor_builder,
    probe_monitor_builder,
)

__all__ = ["coup_probe_monitor_builder", "probe_monitor_builder"]
