"""One typed request, and the one place where other spellings are read into it."""

from __future__ import annotations

from collections.abc import Mapping
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
from inspect_lens.spec.edits._base import EditBase
from inspect_lens.spec.edits._union import Edit, EditsUse, EngineEdits, parse_edits
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
from ._vllm_lens import from_vllm_lens, load_json

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
            edits=[SteeringVector(activations=np.ones((1, 256)), layer_indices=[3], scale=2.0)],
            probes=[{"name": "deception"}],
        )
        assert request.capture.layers == (4,)
        ```
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    capture: CaptureSpec | None = None
    """Activations to return."""

    edits: tuple[Edit, ...] = ()
    """Edits of the stream, in this order: `Add`, which is a steering vector, and others."""

    edits_named: tuple[EditsUse, ...] = ()
    """Registered edits and vectors, which act before those of `edits`; names will do."""

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

    @field_validator("edits_named", "probes", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        if isinstance(value, str | Mapping | ProbeUse | EditsUse):
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
        return sum(tensor.nbytes for edit in self.edits for tensor in edit.all_tensors)

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
    """Forget a parsed request that an engine has refused."""
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
        loaded = load_json(NATIVE_KEY, native)
        if isinstance(loaded, LensRequest):
            return _none_if_empty(loaded)
        if not isinstance(loaded, Mapping):
            raise SpecError(f"{NATIVE_KEY}={shown(native)}; it has to be an object")
        values = dict(cast("Mapping[str, Any]", loaded))
    else:
        values = from_vllm_lens(extra_args, limits)
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


Registrable: TypeAlias = EngineProbe | EditBase | EngineEdits | EngineLens
"""A probe, a vector or edits, or a lens, as `inspect_lens.engine.register` takes it."""
