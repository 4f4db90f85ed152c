"""`extra_body` as a user writes it, read once into a typed request and spelled in one way."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any, NamedTuple

from pydantic import ValidationError

from inspect_lens._settings import Settings, variable
from inspect_lens.errors import SpecError
from inspect_lens.spec import (
    LENS_KEYS,
    CaptureSpec,
    LensRequest,
    ProbeUse,
    parse_extra_args,
    split_body,
    to_extra_args,
)

from ._vectors import resolve_references

__all__ = [
    "Body",
    "Settled",
    "declines_steering",
    "environment_capture",
    "is_lens_call",
    "parse_capture",
    "read_body",
    "respelled",
    "without_refusals",
]

CAPTURE_KEY = "output_residual_stream"
STEER_KEY = "apply_steering_vectors"


class Settled(dict[str, Any]):
    """An `extra_body` that the scopes around its call are in already.

    Inspect hands the config of a call to the hooks and then, as often as it is tried, to the
    provider; vectors must not be added twice. A copy is another call's, and a plain dict.
    """

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return deepcopy(dict(self), memo)


class Body(NamedTuple):
    """An `extra_body` and the request in it."""

    extra_body: dict[str, Any]
    """The same content; lens keys typed and spelled in one way, so equal requests have equal
    cache keys, and no tensor is there that Inspect would hash by its `repr`."""
    request: LensRequest | None


def read_body(
    extra_body: Mapping[str, Any] | None,
    default: CaptureSpec | None = None,
    scope: LensRequest | None = None,
    inherited: Sequence[LensRequest] = (),
    probes: tuple[ProbeUse, ...] = (),
) -> Body:
    """Read the lens request of a call; reading what this returned changes nothing.

    Args:
        extra_body: `GenerateConfig.extra_body`; the request is in `extra_args` (or
            `vllm_xargs`, or at the top level), in any spelling, also with references out of a log.
        default: capture for calls that do not say; `output_residual_stream: false` says no.
        scope: what `lens_scope` asks of calls that do not say, field by field; its capture comes
            before the default, and `apply_steering_vectors: []` says no to its vectors. What is
            `Settled` has it already.
        inherited: what the config of the task or the model asks of every call, which is not what
            this call says: a scope adds its vectors to it, and its probes go first.
        probes: of calls that name no probe so.

    Returns:
        The normalised body and the request, None when the call does not use the lens.

    Raises:
        SpecError: a value is wrong; nothing was sent.
        UnsupportedError: a key that this release does not serve.
        ArtifactError: a referenced steering vector cannot be found.
    """
    settled = isinstance(extra_body, Settled)
    if not extra_body or settled:
        # What nearly all calls of an eval say: nothing, and then what the hook made of that.
        known = _unsaid(default, scope, probes)
        if known is not None and (not extra_body or extra_body == {"extra_args": known[1]}):
            return Body({"extra_args": to_extra_args(known[0])}, known[0])
    body, given = split_body(extra_body)
    args = resolve_references({key: _loads(key, value) for key, value in given.items()})
    # Refusals are for this side of the wire only; beside a native request they would not parse.
    declined = args.get(CAPTURE_KEY) is False and args.pop(CAPTURE_KEY) is False
    plain = args.get(STEER_KEY) == [] and args.pop(STEER_KEY) == []
    request = parse_extra_args(args)
    if scope is not None and not settled:
        default = scope.capture or default
        request = _under(request, scope, inherited, plain=plain)
    if default is not None and not declined and (request is None or request.capture is None):
        request = (request or LensRequest()).model_copy(update={"capture": default})
    named = {use.name for use in request.probes} if request is not None else set()
    if more := tuple(use for use in probes if use.name not in named):
        request = request or LensRequest()
        request = request.model_copy(update={"probes": (*request.probes, *more)})
    typed = {key: value for key, value in args.items() if key not in LENS_KEYS}
    typed |= to_extra_args(request)
    if declined:
        typed[CAPTURE_KEY] = False
    if plain and scope is not None and scope.steer:
        typed[STEER_KEY] = []
    if typed:
        body["extra_args"] = typed
    return Body(body, request)


def respelled(body: Mapping[str, Any], request: LensRequest) -> dict[str, Any]:
    """A body that `read_body` made, with another request in the place of its own."""
    args = {k: v for k, v in body.get("extra_args", {}).items() if k not in LENS_KEYS}
    return {**body, "extra_args": args | to_extra_args(request)}


def _unsaid(
    default: CaptureSpec | None, scope: LensRequest | None, probes: tuple[ProbeUse, ...]
) -> tuple[LensRequest, dict[str, Any]] | None:
    """The request of a call that says nothing itself; None without one, or where it steers."""
    if scope is not None:
        if scope.steer or scope.edits or scope.lens is not None:
            return None
        default = scope.capture or default
        if scope.probes:
            named = {use.name for use in scope.probes}
            probes = (*scope.probes, *(use for use in probes if use.name not in named))
    return _only(default, probes) if default is not None or probes else None


@lru_cache(maxsize=64)
def _only(
    capture: CaptureSpec | None, probes: tuple[ProbeUse, ...]
) -> tuple[LensRequest, dict[str, Any]]:
    """The request of a call that says nothing itself, and its spelling."""
    request = LensRequest(capture=capture, probes=probes)
    return request, to_extra_args(request)


def _under(
    request: LensRequest | None,
    scope: LensRequest,
    inherited: Sequence[LensRequest],
    *,
    plain: bool,
) -> LensRequest | None:
    """A request with what a scope adds to it."""
    made = request or LensRequest()
    changes: dict[str, Any] = {}
    steers = bool(made.steer or made.steer_named)
    if steers:
        steers = _steering(made) not in [_steering(config) for config in inherited]
    if scope.steer and not steers and not plain:
        changes["steer"] = (*made.steer, *scope.steer)
    if scope.lens is not None and made.lens is None:
        changes["lens"] = scope.lens
    edits = bool(made.edits or made.edits_named)
    if scope.edits and (not edits or _edits(made) in map(_edits, inherited)):
        changes["edits"] = (*made.edits, *scope.edits)
    theirs = [use for config in inherited for use in config.probes]
    names = {use.name for use in scope.probes}
    kept = [use for use in made.probes if use.name not in names or use not in theirs]
    own = {use.name for use in kept}
    if more := tuple(use for use in scope.probes if use.name not in own):
        changes["probes"] = (*kept, *more)
    return made.model_copy(update=changes) if changes else request


def _steering(request: LensRequest) -> object:
    """What a request steers with, to be compared: tensors by their hash."""
    return [vector.reference() for vector in request.steer], request.steer_named


def _edits(request: LensRequest) -> object:
    """Edits of a request, to be compared: tensors by their hash."""
    return [edit.reference() for edit in request.edits], request.edits_named


def declines_steering(extra_body: Mapping[str, Any] | None) -> bool:
    """Whether a body says `apply_steering_vectors: []`, and so no to the vectors of scopes."""
    return bool(_loads(STEER_KEY, _lens_args(extra_body).get(STEER_KEY)) == [])


def without_refusals(args: Mapping[str, Any]) -> dict[str, Any]:
    """The `extra_args` for the wire: what is not asked for is not there."""
    no = {CAPTURE_KEY: False, STEER_KEY: []}
    return {key: value for key, value in args.items() if key not in no or value != no[key]}


def is_lens_call(extra_body: Mapping[str, Any] | None) -> bool:
    """Whether a body, raw or normalised, asks the lens for something."""
    args = _lens_args(extra_body)
    return any(args.get(key) not in (None, False, []) for key in LENS_KEYS)


def _lens_args(extra_body: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What is asked of the lens, unread; nothing where it is wrong, which `read_body` says."""
    try:
        return split_body(extra_body).args
    except SpecError:
        return {}


def parse_capture(value: Any, *, field: str = "capture") -> CaptureSpec | None:
    """Read a capture as Python, JSON or the command line spells it.

    Args:
        value: None, `all`, a layer, layers as a list or as `3,5`, a `CaptureSpec`, or its fields
            as a mapping or JSON.
        field: name of the argument, for error messages.

    Returns:
        The capture, or None.

    Raises:
        SpecError: anything else.
    """
    if isinstance(value, str):
        text = value.strip()
        if text in ("", "none"):
            return None
        try:
            value = "all" if text == "all" else json.loads(text if text[0] in "[{" else f"[{text}]")
        except ValueError:
            raise SpecError(f"{field}={text!r}; {_ALLOWED}") from None
    if value is None or isinstance(value, CaptureSpec):
        return value
    if isinstance(value, list | tuple):
        # `-M capture=3,5` reaches us as ["3", "5"].
        value = [int(v) if isinstance(v, str) and v.strip().isdigit() else v for v in value]
    fields = value if isinstance(value, Mapping) else {"layers": value}
    try:
        return CaptureSpec.model_validate(fields)
    except (SpecError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise SpecError(f"{field}={value!r}: {reason}; {_ALLOWED}") from None


def environment_capture() -> CaptureSpec | None:
    """What INSPECT_LENS_CAPTURE asks every call to capture.

    Returns:
        The capture, or None when the variable is not set.

    Raises:
        SpecError: it does not parse.
    """
    return parse_capture(Settings.load().capture, field=variable("capture"))


_ALLOWED = (
    'allowed are all, layers such as 3,5 or [3, 5], and an object such as {"layers": [3], '
    '"positions": "completion"}'
)


def _loads(key: str, value: Any) -> Any:
    """Text under a lens key is JSON, and a reference may be inside it."""
    if key in LENS_KEYS and isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value  # parse_extra_args says what is wrong with it
    return {"false": False}.get(value, value) if key == CAPTURE_KEY and value == "false" else value
