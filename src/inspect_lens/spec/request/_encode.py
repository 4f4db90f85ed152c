"""The way back from a request to the keys that carry it: in Python, and over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from inspect_lens.spec.asks._capture import Transport
from inspect_lens.spec.asks._hook import Hook
from inspect_lens.spec.asks._steer import SteeringVector
from inspect_lens.spec.engine._sites import RESID_POST
from inspect_lens.spec.values._words import NATIVE_KEY

from ._request import LensRequest

__all__ = ["to_extra_args", "to_wire_args"]


def to_extra_args(request: LensRequest | None) -> dict[str, Any]:
    """Spell a request as `extra_args`; `parse_extra_args` reads it back.

    The keys of vllm-lens are used for all that they can say, so that either server
    understands; the rest needs the native key.

    Args:
        request: the request, or None.

    Returns:
        The keys with typed values; empty without a request.

    Example:
        ```python
        from inspect_lens import LensRequest
        from inspect_lens.spec import to_extra_args

        request = LensRequest(capture={"layers": [4]})
        assert to_extra_args(request) == {"output_residual_stream": [4]}
        ```
    """
    if request is None:
        return {}
    capture = request.capture
    chosen = capture is not None and not capture.is_plain
    chosen = chosen or any(v.site != RESID_POST or v.phase != "both" for v in request.steer)
    named = request.steer_named or request.edits_named or request.probes
    chosen = chosen or bool(named or request.edits)
    chosen = chosen or request.lens is not None or request.sink is not None
    if capture is not None and request.qk is not None:
        # The keys have one transport for both.
        chosen = chosen or capture.transport != request.qk.transport
    if chosen or request.skip_reading_prefix_cache is False:
        return {NATIVE_KEY: request}
    args: dict[str, Any] = {}
    if capture is not None:
        layers = capture.layers
        args["output_residual_stream"] = True if layers == "all" else list(layers)
        args |= _transport(capture.transport)
    if request.steer:
        args["apply_steering_vectors"] = list(request.steer)
    if request.hooks:
        args["apply_hooks"] = list(request.hooks)
    if (qk := request.qk) is not None:
        args["output_qk"] = True if qk.layers == "all" else list(qk.layers)
        args |= _transport(qk.transport)
    if request.skip_reading_prefix_cache:
        args["skip_reading_prefix_cache"] = True
    return args


def _transport(transport: Transport) -> dict[str, str]:
    """The key of vllm-lens; without it the response has the tensors."""
    names = {"binary": "binary", "inline": "base64"}
    return {"activations_transport": names[transport]} if transport in names else {}


def to_wire_args(extra_args: Mapping[str, Any]) -> dict[str, Any]:
    """Turn `extra_args` into vLLM's `vllm_xargs`, whose values are text or numbers.

    Args:
        extra_args: what `to_extra_args` returned, and other keys.

    Returns:
        The same keys; everything but text and numbers as JSON text.

    Example:
        ```python
        from inspect_lens.spec import to_wire_args

        assert to_wire_args({"output_residual_stream": [4]}) == {"output_residual_stream": "[4]"}
        ```
    """
    return {
        key: value
        if isinstance(value, str | int | float) and not isinstance(value, bool)
        else json.dumps(_plain(value))
        for key, value in extra_args.items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Hook | LensRequest | SteeringVector):
        return value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
