"""One typed request, and the one place where other spellings are read into it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeAlias, cast

from pydantic import (
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from inspect_lens.errors import SpecError
from inspect_lens.spec.asks._capture import CaptureSpec, QKSpec
from inspect_lens.spec.asks._hook import Hook, parse_hooks
from inspect_lens.spec.asks._lens import EngineLens, LogitLens
from inspect_lens.spec.asks._patterns import check_patterns
from inspect_lens.spec.asks._positions import TokenMatch
from inspect_lens.spec.asks._probe import EngineProbe, ProbeUse
from inspect_lens.spec.asks._sink import SinkUse
from inspect_lens.spec.asks._steer import SteeringVector, VectorUse
from inspect_lens.spec.edits import Edit, EditsUse, EngineEdits, parse_edits
from inspect_lens.spec.engine._limits import TensorLimits, limits_of
from inspect_lens.spec.values._counts import check_counts
from inspect_lens.spec.values._strict import Flag, explain, judging, shown
from inspect_lens.spec.values._tensor import WireModel
from inspect_lens.spec.values._words import (
    LENS_KEYS,
    NATIVE_KEY,
    VLLM_KEYS,
    refuse_misspelled,
    refuse_own_word,
)

from ._parsed import Parsed, fingerprint

__all__ = [
    "LensRequest",
    "Registrable",
    "forget_parsed",
    "parse_extra_args",
]


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

    edits: tuple[Edit, ...] = ()
    """Other edits of the stream, in this order and behind the vectors of `steer`."""

    edits_named: tuple[EditsUse, ...] = ()
    """Registered edits, which act before those of `edits`; names will do."""

    probes: tuple[ProbeUse, ...] = ()
    """Registered probes to apply to each token inside the engine; names will do."""

    hooks: tuple[Hook, ...] = ()
    """Functions of the client to run on rows of this request, where the engine allows it."""

    qk: QKSpec | None = None
    """Queries and keys to return."""

    lens: LogitLens | None = None
    """What the stream of some layers predicts; layers alone will do."""

    sink: SinkUse | None = None
    """Store or function of the server that gets the rows too; its name will do. Without `capture`
    the response has none of them."""

    skip_reading_prefix_cache: Flag | None = None
    """Recompute the whole prompt. None means: where captured prompt tokens need it."""

    @field_validator("steer_named", "edits_named", "probes", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        if isinstance(value, str | Mapping | ProbeUse | VectorUse | EditsUse):
            value = [value]
        if isinstance(value, list | tuple):
            return tuple({"name": v} if isinstance(v, str) else v for v in value)
        return value

    @field_validator("hooks", mode="before")
    @classmethod
    def _hooks(cls, value: Any) -> Any:
        return parse_hooks(value, where="hooks")

    @field_validator("edits", mode="before")
    @classmethod
    def _edits(cls, value: Any, info: ValidationInfo) -> Any:
        return parse_edits(value, limits=limits_of(info))

    @field_validator("qk", mode="before")
    @classmethod
    def _qk(cls, value: Any) -> Any:
        return value if value is None or isinstance(value, Mapping | QKSpec) else {"layers": value}

    @field_validator("lens", mode="before")
    @classmethod
    def _lens(cls, value: Any) -> Any:
        return (
            value if value is None or isinstance(value, Mapping | LogitLens) else {"layers": value}
        )

    @field_validator("sink", mode="before")
    @classmethod
    def _sink(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def brings_tensors(self) -> bool:
        """Whether its answer has tensors."""
        return not (self.capture is None and self.qk is None and self.lens is None)

    @property
    def scores_tokens(self) -> bool:
        """Whether its answer has the score of each token."""
        return any(use.tokens for use in self.probes)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the tensors that it brings."""
        edited = (tensor.nbytes for edit in self.edits for tensor in edit.all_tensors)
        return sum(vector.activations.nbytes for vector in self.steer) + sum(edited)

    @model_validator(mode="after")
    def _check_probes(self) -> Self:
        names = [use.name for use in self.probes]
        if len(set(names)) != len(names):
            raise ValueError(f"probes: a name stands twice in {shown(names)}")
        return self

    @model_validator(mode="after")
    def _check_patterns(self) -> Self:
        asked = (self.capture, *self.edits)
        found = [part.positions for part in asked if part is not None]
        check_patterns(one.pattern for one in found if isinstance(one, TokenMatch))
        return self


def parse_extra_args(
    extra_args: Mapping[str, Any] | None, *, limits: TensorLimits | None = None
) -> LensRequest | None:
    """Read a lens request out of vLLM's `SamplingParams.extra_args` (or `vllm_xargs`).

    Understood are the keys of vllm-lens (`output_residual_stream`,
    `apply_steering_vectors`, `apply_hooks`, `output_qk`, `skip_reading_prefix_cache`,
    `activations_transport`), each as Python objects or as JSON text, and `inspect_lens`, a
    `LensRequest` as an object or JSON. `output_residual_stream` and `output_qk` are `true`,
    `false` or a list of layers; a number alone is refused.

    Args:
        extra_args: the mapping, or None.
        limits: of the engine that it is for; tensors that it has no use for are not unpacked.

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
    key, kept = fingerprint(extra_args, LensRequest)
    if key is not None and (known := _PARSED.get(key)) is not None:
        return known[0]
    with judging(NATIVE_KEY):
        request = _parse(extra_args, limits)
    if key is not None:
        _PARSED.keep(key, kept, request)
    return request


_PARSED = Parsed(1 << 25)


def forget_parsed(request: LensRequest) -> None:
    """Forget a parsed request that an engine has refused.

    Args:
        request: of `parse_extra_args`, which otherwise remembers it for requests like it.

    Example:
        ```python
        from inspect_lens.spec import forget_parsed, parse_extra_args

        asked = {"output_residual_stream": [99]}
        request = parse_extra_args(asked)
        forget_parsed(request)
        assert parse_extra_args(asked) is not request
        ```
    """
    _PARSED.forget(request)


def _parse(extra_args: Mapping[str, Any], limits: TensorLimits | None) -> LensRequest | None:
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
            raise SpecError(f"{NATIVE_KEY}={shown(native)}; it has to be an object")
        values = dict(cast("Mapping[str, Any]", loaded))
        if isinstance(values.get("steer"), Mapping | SteeringVector):
            values["steer"] = [values["steer"]]
    else:
        values = _from_vllm_lens(extra_args)
    check_counts(values)
    context = None if limits is None else limits.context
    try:
        return _none_if_empty(LensRequest.model_validate(values, context=context))
    except ValidationError as error:
        raise SpecError(explain(error)) from None


def _none_if_empty(request: LensRequest) -> LensRequest | None:
    return request if request != LensRequest() else None


def _check_keys(extra_args: Mapping[str, Any], *, has_lens: bool) -> None:
    for key in extra_args:
        if key in LENS_KEYS or key in VLLM_KEYS:
            continue
        refuse_own_word(key, "extra_args")
        refuse_misspelled(key, "extra_args", known=LENS_KEYS, cutoff=0.75)
        if has_lens:
            raise SpecError(
                f"extra_args: unknown key {shown(key)} beside lens keys; known are "
                f"{', '.join(LENS_KEYS + VLLM_KEYS)}"
            )


def _from_vllm_lens(extra_args: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    check_counts({key: extra_args[key] for key in LENS_KEYS if key in extra_args})
    transport = _transport(extra_args.get("activations_transport"))
    for key, name in (("output_residual_stream", "capture"), ("output_qk", "qk")):
        layers = _asked_layers(key, _load(key, extra_args.get(key)))
        if layers is not None:
            values[name] = {"layers": layers, "transport": transport}
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
        # vLLM makes 1 and 0 of true and false in `vllm_xargs`.
        if type(skip) not in (bool, int) or skip not in (0, 1):
            raise SpecError(f"skip_reading_prefix_cache={shown(skip)}; allowed are true and false")
        values["skip_reading_prefix_cache"] = bool(skip)
    return values


def _asked_layers(key: str, value: Any) -> Any:
    """Layers as the keys of vllm-lens spell them; None where nothing is asked for."""
    if value is None or value is False:
        return None
    if value is True:
        return "all"
    if isinstance(value, list | tuple):
        return value
    raise SpecError(
        f"{key}={shown(value)}; allowed are true (all layers), false, and a list of layers such as "
        '[2]; inside vllm_xargs as text, "true" or "[2]", since vLLM makes 1 of a true there'
    )


def _transport(value: Any) -> Any:
    """The key of vllm-lens as `Transport` says it."""
    allowed = ("base64", "binary", "inline", "auto")
    if value is None:
        return "auto"
    if not isinstance(value, str) or value not in allowed:
        raise SpecError(f"activations_transport={shown(value)}; allowed are {', '.join(allowed)}")
    return "inline" if value == "base64" else value


def _load(field: str, value: Any) -> Any:
    """Parse text as JSON: HTTP's `vllm_xargs` cannot nest, so objects come as strings."""
    if not isinstance(value, str):
        return value
    try:
        loaded = json.loads(value)
    except (ValueError, RecursionError):
        raise SpecError(f"{field}: {shown(value)} is not JSON, or nested too deep") from None
    check_counts(loaded, field=field)
    return loaded


Registrable: TypeAlias = EngineProbe | SteeringVector | EngineEdits | EngineLens
"""A probe, a vector, edits or a lens, as `inspect_lens.engine.register` takes it."""
