"""Where in the body of a request lens keys may stand, and that none stands anywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from inspect_lens.errors import SpecError

from ._request import (
    ENVELOPE_KEY,
    LENS_KEYS,
    NATIVE_KEY,
    PLACES,
    LensRequest,
    refuse_misspelled,
)

__all__ = ["BodyParts", "split_body"]

_FIELDS = frozenset(LensRequest.model_fields) - frozenset(LENS_KEYS)


class BodyParts(NamedTuple):
    """A body of a request, taken apart."""

    rest: dict[str, Any]
    """What is the server's own."""
    args: dict[str, Any]
    """What stood in `extra_args` and `vllm_xargs`, and lens keys of the top level."""


def split_body(body: Mapping[str, Any] | None, *, where: str = "extra_body") -> BodyParts:
    """Take the lens keys out of a body, wherever they may stand.

    vLLM passes over fields that it does not know. So a lens key is found at the top level as
    well, and what looks like one in a place that nobody reads is refused.

    Args:
        body: of the request, or None.
        where: what the body is, for error messages.

    Returns:
        The two parts; no argument was changed.

    Raises:
        SpecError: a place is no mapping, a lens key stands twice, is misspelled, or stands where
            nobody reads it.

    Example:
        ```python
        import pytest

        from inspect_lens.errors import SpecError
        from inspect_lens.spec import split_body

        rest, args = split_body({"top_k": 5, "output_residual_stream": [4]})
        assert (rest, args) == ({"top_k": 5}, {"output_residual_stream": [4]})
        with pytest.raises(SpecError, match="nobody reads it there"):
            split_body({"capture": [4]})
        ```
    """
    rest, args = dict(body or {}), dict[str, Any]()
    found: list[tuple[str, Mapping[str, Any]]] = []
    for name in PLACES:
        part = rest.pop(name, None)
        if part is not None and not isinstance(part, Mapping):
            raise SpecError(
                f"{where}.{name}={part!r}; it has to be a mapping such as "
                '{"output_residual_stream": [10]}'
            )
        found.append((f"{where}.{name}", cast("Mapping[str, Any]", part or {})))
    found.append((where, {key: rest.pop(key) for key in LENS_KEYS if key in rest}))
    at: dict[str, str] = {}
    for place, part in found:
        for key in part:
            if key in LENS_KEYS and key in at:
                raise SpecError(f"{key} stands in {at[key]} and in {place}; give it once")
            at[key] = place
        args |= part
    _check_rest(rest, where)
    return BodyParts(rest, args)


def _check_rest(rest: Mapping[str, Any], where: str) -> None:
    """Refuse what is meant for the lens and would be passed over."""
    for key, value in rest.items():
        if key in _FIELDS:
            raise SpecError(
                f"{where}.{key}: nobody reads it there; put it into "
                f'{{"extra_args": {{"{NATIVE_KEY}": {{"{key}": ...}}}}}}'
            )
        if key == ENVELOPE_KEY:
            raise SpecError(f"{where}: {ENVELOPE_KEY!r} is reserved for the engine")
        refuse_misspelled(key, where)
        inside = next((k for k in LENS_KEYS if isinstance(value, Mapping) and k in value), None)
        if inside is not None:
            raise SpecError(
                f"{where}.{key}.{inside}: nobody reads it there; allowed are "
                f"{where}.extra_args.{inside}, {where}.vllm_xargs.{inside} and {where}.{inside}"
            )
