"""How the activations of a call travel where the caller left it open.

Base64 inside the response is read, parsed and held by the event loop. Beside the response a
worker thread fetches the bytes, so that other samples need not wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inspect_lens.spec import NATIVE_KEY, CaptureSpec, LensRequest, LogitLens, QKSpec

__all__ = ["over_binary", "wants_transport"]

_KEYS = ("output_residual_stream", "output_qk")


def wants_transport(args: Mapping[str, Any]) -> bool:
    """Whether a call brings tensors and leaves open how they travel.

    Args:
        args: typed `extra_args`, as `to_extra_args` spells them.
    """
    native = args.get(NATIVE_KEY)
    if isinstance(native, LensRequest):
        return any(spec is not None and spec.transport == "auto" for _, spec in _specs(native))
    return any(key in args for key in _KEYS) and "activations_transport" not in args


def over_binary(args: Mapping[str, Any]) -> dict[str, Any]:
    """The same call, with the binary transport where it was left open."""
    native = args.get(NATIVE_KEY)
    if not isinstance(native, LensRequest):
        return {**args, "activations_transport": "binary"}
    chosen = {
        name: spec.model_copy(update={"transport": "binary"})
        for name, spec in _specs(native)
        if spec is not None and spec.transport == "auto"
    }
    return {**args, NATIVE_KEY: native.model_copy(update=chosen)}


def _specs(request: LensRequest) -> list[tuple[str, CaptureSpec | QKSpec | LogitLens | None]]:
    """What a request has that says how it travels, by field."""
    return [("capture", request.capture), ("qk", request.qk), ("lens", request.lens)]
