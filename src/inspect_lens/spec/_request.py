"""One typed request, and the one place where other spellings are read into it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

from pydantic import ConfigDict, ValidationError, field_validator, model_validator

from inspect_lens.errors import SpecError

from ._capture import CaptureSpec
from ._dump import WireModel
from ._hook import Hook, parse_hooks
from ._probe import ProbeUse
from ._qk import QKSpec
from ._steer import SteeringVector, VectorUse

__all__ = [
    "ENVELOPE_KEY",
    "LENS_KEYS",
    "PLACES",
    "LensRequest",
    "parse_extra_args",
    "refuse_misspelled",
]

NATIVE_KEY = "inspect_lens"
ENVELOPE_KEY = "_inspect_lens"
"""Where the front-end puts what the worker reads; users may not set it."""
LENS_KEYS = (
    NATIVE_KEY,
    "output_residual_stream",
    "apply_steering_vectors",
    "skip_reading_prefix_cache",
    "activations_transport",
    "apply_hooks",
    "output_qk",
)
PLACES = ("vllm_xargs", "extra_args")
"""Fields of a body under which they may stand, beside its top level."""
_VLLM_KEYS = ("kv_transfer_params", "ec_transfer_params")


class LensRequest(WireModel):
    """Everything a request can ask of the lens.

    Example:
        ```python
        import numpy as np

        from inspect_lens import LensRequest, SteeringVector

        request = LensRequest(
            capture={"layers": [4], "positions": "last"},
            steer=[SteeringVector(activations=np.ones((1, 256)), layer_indices=[3], scale=2.0)],
            probes=[{"name": "deception"}],
        )
        assert request.capture.layers == (4,)
        ```
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    capture: CaptureSpec | None = None
    """Activations to return."""

    steer: tuple[SteeringVector, ...] = ()
    """Vectors to add to the residual stream."""

    steer_named: tuple[VectorUse, ...] = ()
    """Registered vectors to add; the engine puts their content in the place of their names."""

    probes: tuple[ProbeUse, ...] = ()
    """Registered probes to apply to each token inside the engine; names will do."""

    hooks: tuple[Hook, ...] = ()
    """Functions of the client to run on rows of this request, where the engine allows it."""

    qk: QKSpec | None = None
    """Queries and keys to return."""

    skip_reading_prefix_cache: bool | None = None
    """Recompute the whole prompt. None means: where captured prompt tokens need it."""

    @field_validator("steer_named", "probes", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        if isinstance(value, str | Mapping | ProbeUse | VectorUse):
            value = [value]
        if isinstance(value, list | tuple):
            return tuple({"name": v} if isinstance(v, str) else v for v in value)
        return value

    @field_validator("hooks", mode="before")
    @classmethod
    def _hooks(cls, value: Any) -> Any:
        return parse_hooks(value, where="hooks")

    @field_validator("qk", mode="before")
    @classmethod
    def _qk(cls, value: Any) -> Any:
        return value if value is None or isinstance(value, Mapping | QKSpec) else {"layers": value}

    @property
    def runs_eagerly(self) -> bool:
        """Whether its steps need Python in the forward pass, which compiled graphs have not."""
        return bool(self.hooks) or self.qk is not None

    @model_validator(mode="after")
    def _check_probes(self) -> Self:
        names = [use.name for use in self.probes]
        if len(set(names)) != len(names):
            raise ValueError(f"probes: a name stands twice in {names}")
        return self


def parse_extra_args(extra_args: Mapping[str, Any] | None) -> LensRequest | None:
    """Read a lens request out of vLLM's `SamplingParams.extra_args` (or `vllm_xargs`).

    Understood are the keys of vllm-lens (`output_residual_stream`,
    `apply_steering_vectors`, `apply_hooks`, `output_qk`, `skip_reading_prefix_cache`,
    `activations_transport`), each as Python objects or as JSON text, and `inspect_lens`, a
    `LensRequest` as an object or JSON.

    Args:
        extra_args: the mapping, or None.

    Returns:
        The request, or None when no key of the lens is there.

    Raises:
        SpecError: a value is wrong, a key is unknown next to lens keys, or a key looks like
            a misspelled lens key.

    Example:
        ```python
        from inspect_lens.spec import parse_extra_args

        request = parse_extra_args({"output_residual_stream": [4]})
        assert request.capture.layers == (4,)
        assert parse_extra_args({"top_k": 5}) is None
        ```
    """
    if not extra_args:
        return None
    # A batch gives one mapping to a thousand requests, and each is read three times.
    key, kept = _fingerprint(extra_args)
    if key is not None and (known := _PARSED.known.get(key)) is not None:
        return known[1]
    request = _parse(extra_args)
    if key is not None:
        _PARSED.keep(key, kept, request)
    return request


class _Parsed:
    """Requests that were parsed before, by content: as many as have room."""

    def __init__(self, most_bytes: int) -> None:
        self.known: dict[tuple[object, ...], tuple[list[Any], LensRequest | None]] = {}
        self._left = self._most = most_bytes

    def keep(self, key: tuple[object, ...], kept: list[Any], request: LensRequest | None) -> None:
        """Keep a request, and in its favour perhaps none of those before."""
        size = _BYTES_BESIDE + sum(map(_text_bytes, key))
        for item in kept:
            # What a request or a function holds is not looked at.
            is_vector = isinstance(item, SteeringVector)
            size += item.activations.nbytes if is_vector else _UNKNOWN_BYTES
        if size > self._most:
            return
        if size > self._left:
            self.known.clear()
            self._left = self._most
        self._left -= size
        self.known[key] = kept, request


def _text_bytes(part: object) -> int:
    if isinstance(part, tuple):
        return sum(map(_text_bytes, cast("tuple[object, ...]", part)))
    return len(part) if isinstance(part, str) else 8


_BYTES_BESIDE = 4096
_UNKNOWN_BYTES = 1 << 16
_PARSED = _Parsed(1 << 25)


_PLAIN = frozenset({int, bool, str, type(None)})
_MOST_PARTS = 1024
_MOST_TEXT = 1 << 16


def _fingerprint(extra_args: Mapping[str, Any]) -> tuple[tuple[object, ...] | None, list[object]]:
    """Names the content of plain requests exactly; None where it is large, or arrays.

    With it come the objects that are named by their identity: whoever keeps the name has to
    keep them, so that no other object can get it.
    """
    parts: list[object] = []
    kept: list[object] = []
    return (tuple(parts), kept) if _describe(dict(extra_args), parts, kept) else (None, [])


def _describe(value: object, parts: list[object], kept: list[object]) -> bool:
    """Append the content of a value; False where it cannot be named in a few words."""
    kind = type(value)
    if len(parts) > _MOST_PARTS:
        return False
    if kind is str:
        parts += kind, value
        return len(cast("str", value)) <= _MOST_TEXT
    if kind in _PLAIN:
        parts += kind, value
        return True
    if kind is float:
        parts += kind, repr(value)  # 0.0 is -0.0 to Python
        return True
    if kind in (list, tuple):
        items = cast("Sequence[object]", value)
        kinds = tuple(map(type, items))
        if _PLAIN.issuperset(kinds):
            parts += kind, kinds, tuple(items)
            return (
                len(items) <= _MOST_PARTS
                and sum(len(item) for item in items if isinstance(item, str)) <= _MOST_TEXT
            )
        parts += kind, len(items)
        return all(_describe(item, parts, kept) for item in items)
    if kind is dict:
        pairs = cast("dict[object, object]", value)
        parts += kind, len(pairs)
        return all(
            _describe(key, parts, kept) and _describe(item, parts, kept)
            for key, item in pairs.items()
        )
    if isinstance(value, SteeringVector | LensRequest | Hook):
        parts += kind, id(value)  # they never change
        kept.append(value)
        return True
    return False


def _parse(extra_args: Mapping[str, Any]) -> LensRequest | None:
    keys = [key for key in extra_args if key in LENS_KEYS]
    _check_keys(extra_args, has_lens=bool(keys))
    if not keys:
        return None
    values: dict[str, Any] = {}
    if (native := extra_args.get(NATIVE_KEY)) is not None:
        if len(keys) > 1:
            raise SpecError(f"extra_args: give {NATIVE_KEY!r} or the keys of vllm-lens, not both")
        loaded = _load(NATIVE_KEY, native)
        if isinstance(loaded, LensRequest):
            return _none_if_empty(loaded)
        if not isinstance(loaded, Mapping):
            raise SpecError(f"{NATIVE_KEY}={native!r}; it has to be an object")
        values = dict(cast("Mapping[str, Any]", loaded))
        if isinstance(values.get("steer"), Mapping | SteeringVector):
            values["steer"] = [values["steer"]]
    else:
        values = _from_vllm_lens(extra_args)
    try:
        return _none_if_empty(LensRequest.model_validate(values))
    except ValidationError as error:
        raise SpecError(_explain(error)) from None


def _none_if_empty(request: LensRequest) -> LensRequest | None:
    return request if request != LensRequest() else None


def refuse_misspelled(
    key: str, where: str, *, known: Sequence[str] = (*LENS_KEYS, *PLACES), cutoff: float = 0.8
) -> None:
    """Refuse a key that almost is one of the lens, or a place for some.

    Args:
        key: that nobody reads.
        where: it stands.
        known: keys that are read there.
        cutoff: how much alike two keys have to be, as `difflib` counts it.

    Raises:
        SpecError: with the key that may have been meant.

    Example:
        ```python
        import pytest

        from inspect_lens.errors import SpecError
        from inspect_lens.spec import refuse_misspelled

        refuse_misspelled("top_k", "the body")
        with pytest.raises(SpecError, match="did you mean 'output_residual_stream'"):
            refuse_misspelled("output_residual_streams", "the body")
        ```
    """
    near = difflib.get_close_matches(str(key), known, n=1, cutoff=cutoff)
    if near:
        raise SpecError(f"{where}: unknown key {key!r}; did you mean {near[0]!r}?")


def _check_keys(extra_args: Mapping[str, Any], *, has_lens: bool) -> None:
    if ENVELOPE_KEY in extra_args:
        raise SpecError(f"extra_args: {ENVELOPE_KEY!r} is reserved for the engine")
    for key in extra_args:
        if key in LENS_KEYS or key in _VLLM_KEYS:
            continue
        refuse_misspelled(key, "extra_args", known=LENS_KEYS, cutoff=0.75)
        if has_lens:
            raise SpecError(
                f"extra_args: unknown key {key!r} beside lens keys; known are "
                f"{', '.join(LENS_KEYS + _VLLM_KEYS)}"
            )


def _from_vllm_lens(extra_args: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, name in (("output_residual_stream", "capture"), ("output_qk", "qk")):
        layers = _load(key, extra_args.get(key))
        if layers is None or layers is False:
            continue
        if layers is not True and not isinstance(layers, list | tuple | int):
            raise SpecError(f"{key}={layers!r}; allowed are true or a list of layers")
        transport = extra_args.get("activations_transport") or "auto"
        values[name] = {
            "layers": "all" if layers is True else layers,
            "transport": "inline" if transport == "base64" else transport,
        }
    hooks = _load("apply_hooks", extra_args.get("apply_hooks"))
    if hooks is not None:
        values["hooks"] = parse_hooks(hooks)
    steer = _load("apply_steering_vectors", extra_args.get("apply_steering_vectors"))
    if steer is not None:
        if isinstance(steer, Mapping | SteeringVector):
            steer = [steer]
        if not isinstance(steer, Sequence):
            raise SpecError(
                f"apply_steering_vectors={type(steer).__name__}; it has to be a list of "
                "SteeringVector or of their JSON form"
            )
        values["steer"] = [_load(f"apply_steering_vectors[{i}]", v) for i, v in enumerate(steer)]
    skip = _load("skip_reading_prefix_cache", extra_args.get("skip_reading_prefix_cache"))
    if skip is not None:
        if skip not in (True, False):
            raise SpecError(f"skip_reading_prefix_cache={skip!r}; allowed are true and false")
        values["skip_reading_prefix_cache"] = bool(skip)
    return values


def _load(field: str, value: Any) -> Any:
    """Parse text as JSON: HTTP's `vllm_xargs` cannot nest, so objects come as strings."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise SpecError(f"{field}: {value[:80]!r} is not JSON") from None


def _explain(error: ValidationError) -> str:
    lines = [
        f"{'.'.join(str(part) for part in item['loc']) or 'inspect_lens'}: "
        f"{item['msg'].removeprefix('Value error, ')}"
        for item in error.errors(include_url=False, include_input=False)
    ]
    return "; ".join(lines)
