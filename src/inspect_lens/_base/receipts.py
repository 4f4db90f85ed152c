"""Whether a server did what a request asks of its engine, as the receipt says.

A vLLM without the plug-in passes over what it does not know and answers all the same. Captures and
results of hooks are then missing; of steering and probes only the receipt tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inspect_lens.spec import NATIVE_KEY, LensRequest, to_extra_args

__all__ = ["gives_no_receipts", "needs_receipt", "not_done"]


def not_done(request: LensRequest | None, receipt: Mapping[str, Any] | None) -> str | None:
    """Say which steering, probes, lens and sink of a request a receipt lacks."""
    if request is None:
        return None
    done = receipt or {}
    parts = []
    if not done.get("steer"):
        keys = ["edits (steering vectors among them)"] if request.edits else []
        if request.edits_named:
            keys.append(f"edits_named {[use.name for use in request.edits_named]}")
        if keys:
            parts.append(f"{', '.join(keys)}: the server answered without steering")
    ran = {probe.get("name") for probe in done.get("probes") or ()}
    if missing := [use.name for use in request.probes if use.name not in ran]:
        parts.append(f"probes {missing}: the server answered without running them")
    if request.lens is not None and not done.get("lens"):
        parts.append("lens: the server answered without reading the stream")
    if request.sink is not None and not done.get("sink"):
        parts.append(f"sink {request.sink.name!r}: the server answered without recording")
    if not parts:
        return None
    return (
        f"{'; '.join(parts)}; it runs without the inspect-lens plug-in (install inspect-lens in "
        "the server's environment, and see that VLLM_PLUGINS and INSPECT_LENS_DISABLE allow it)"
    )


def needs_receipt(request: LensRequest) -> bool:
    """Whether a request says something that vllm-lens, which gives no receipts, does not know."""
    return NATIVE_KEY in to_extra_args(request)


def gives_no_receipts(status: int, openapi: str) -> bool:
    """Tell vllm-lens from plain vLLM, which ignores what it is asked for, by its routes."""
    return status != 200 or "/v1/hooks/" in openapi
