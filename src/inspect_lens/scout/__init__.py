"""Scanners for Inspect Scout that apply a probe to logged conversations.

Needs the extra `scout`.
"""

from inspect_lens._extras import require as _require

_require("inspect_scout", room="inspect_lens.scout", extra="scout")

from ._scanners import audit_probe_scanner, probe_scanner  # noqa: E402 - after the check

__all__ = ["audit_probe_scanner", "probe_scanner"]
