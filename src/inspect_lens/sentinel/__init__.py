"""Monitors for Inspect Sentinel that read the activations of the step that they watch.

Needs the extra `sentinel`.
"""

from inspect_lens._extras import require as _require

_require("inspect_sentinel", room="inspect_lens.sentinel", extra="sentinel")

from inspect_lens._ask import Ask  # noqa: E402 - after the check

from ._probe import (  # noqa: E402 - after the check
    oracle_monitor,
    probe_call_monitor,
    probe_monitor,
)

__all__ = ["Ask", "oracle_monitor", "probe_call_monitor", "probe_monitor"]
