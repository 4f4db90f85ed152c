"""Where in the body of a request lens keys may stand, and that none stands anywhere else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from pydantic import BaseModel

from inspect_lens.errors import SpecError
from inspect_lens.spec.asks._hook import Hook
from inspect_lens.spec.edits._base import EditBase
from inspect_lens.spec.edits._directions import Add
from inspect_lens.spec.values._strict import shown
from inspect_lens.spec.values._words import (
    LENS_KEYS,
    NATIVE_KEY,
    PLACES,
    refuse_misspelled,
    refuse_own_word,
)

from ._request import LensRequest
from ._vllm_lens import STEER_KEY, is_plain, to_vllm_lens, vector_form

__all__ = [
    "BodyParts",
    "lens_args",
    "split_body",
    "to_extra_args",
    "to_wire_args",
]

_DEPTH = 3
"""Of mappings inside a body that are looked through for lens keys."""


class BodyParts(NamedTuple):
    """HTTP body of a request, split into lens keys and the rest."""

    rest: dict[str, Any]
    """What is the server's own."""
    args: dict[str, Any]
    """What stood in `extra_args` and `vllm_xargs`, and lens keys of the top level."""


def split_body(body: Mapping[str, Any] | None, *, where: str = "extra_body") -> BodyParts:
    """Take the lens keys out of a request body, from every place that may hold them.

    vLLM passes over fields that it does not know. So a lens key is found at the top level as
    well, and what looks like one, or is a word of ours, in a place that nobody reads is refused.
    """
    args = lens_args(body, where=where)
    taken = (*PLACES, *LENS_KEYS)
    rest = {key: value for key, value in (body or {}).items() if key not in taken}
    for key, value in rest.items():
        refuse_own_word(key, where)
        refuse_misspelled(key, where)
        if isinstance(value, Mapping) and (inside := _found(value)) is not None:
            key_inside = inside.rpartition(".")[2]
            raise SpecError(
                f"{where}.{key}.{inside}: nobody reads it there; allowed are "
                f"{where}.extra_args.{key_inside}, {where}.vllm_xargs.{key_inside} and "
                f"{where}.{key_inside}"
            )
    return BodyParts(rest, args)


def lens_args(body: Mapping[str, Any] | None, *, where: str = "the body") -> dict[str, Any]:
    """Split a request body into lens options and the rest of `extra_args`."""
    if not body:
        return {}
    found: list[tuple[str, Mapping[str, Any]]] = []
    for name in PLACES:
        part = body.get(name)
        if part is not None and not isinstance(part, Mapping):
            raise SpecError(
                f"{where}.{name}={shown(part)}; it has to be a mapping such as "
                '{"output_residual_stream": [10]}'
            )
        found.append((f"{where}.{name}", cast("Mapping[str, Any]", part or {})))
    found.append((where, {key: body[key] for key in LENS_KEYS if key in body}))
    args: dict[str, Any] = {}
    at: dict[str, str] = {}
    for place, part in found:
        for key in part:
            if key in LENS_KEYS and key in at:
                raise SpecError(f"{key} stands in {at[key]} and in {place}; give it once")
            at[key] = place
        args |= part
    return args


def _found(value: Mapping[str, Any], depth: int = 1) -> str | None:
    """Path of a lens key inside a mapping."""
    for key in LENS_KEYS:
        if key in value:
            return key
    if depth < _DEPTH:
        for key, inner in value.items():
            if isinstance(inner, Mapping) and (path := _found(inner, depth + 1)) is not None:
                return f"{key}.{path}"
    return None


def to_extra_args(request: LensRequest | None) -> dict[str, Any]:
    """Spell a request as `extra_args`; `parse_extra_args` reads it back.

    The keys of vllm-lens are used for all that they can say, so that either server
    understands; the rest needs the native key.
    """
    if request is None:
        return {}
    args = to_vllm_lens(request)
    return {NATIVE_KEY: request} if args is None else args


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
        else json.dumps(_plain(value, key))
        for key, value in extra_args.items()
    }


def _plain(value: Any, key: str) -> Any:
    if key == STEER_KEY and isinstance(value, Add) and is_plain(value):
        return vector_form(value)
    if isinstance(value, Hook | LensRequest | EditBase):
        return value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple):
        return [_plain(item, key) for item in value]
    return value
