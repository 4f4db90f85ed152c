"""One typed request: where it stands in a body, how it is read, and how it is spelled again.

Here is also the one kind of cache on the way of a request: by content, and with one bound for a
process.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import (
    Any,
    ClassVar,
    Final,
    Generic,
    Literal,
    NamedTuple,
    Self,
    TypeVar,
    cast,
)
from weakref import ref

from pydantic import (
    BaseModel,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from inspect_lens.errors import SpecError

from ._capture import QK_NAMES, CaptureSpec, QKSpec, SinkUse, names_heads
from ._config import EngineConfig, EngineEdits, RequestPart
from ._edit import EditBase
from ._edits import Add
from ._engine import TensorLimits, result_name
from ._gate import GateKey
from ._hook import Hook, parse_hooks
from ._latents import EngineAutoencoder
from ._lens import LENS_NAME, EngineLens, LogitLens
from ._positions import Positions
from ._probe import EngineProbe
from ._values import (
    LENS_KEYS,
    NATIVE_KEY,
    PLACES,
    STEER_KEY,
    VLLM_KEYS,
    Flag,
    Name,
    Value,
    check_counts,
    judging,
    listed,
    read_as,
    refuse_misspelled,
    refuse_own_words,
    shown,
)
from ._vllm_lens import from_vllm_lens, is_plain, load_json, to_vllm_lens, vector_form

__all__ = [
    "NO_REQUEST",
    "WEIGHTS",
    "BodyParts",
    "Cache",
    "LensRequest",
    "Registrable",
    "forget_parsed",
    "lens_args",
    "parse_extra_args",
    "split_body",
    "split_options",
    "to_extra_args",
    "to_wire_args",
]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

BYTES_BESIDE = 1 << 10
"""What a value costs that has no tensors."""


class Budget:
    """Bytes of several caches together; what came first goes first, whichever cache has it."""

    def __init__(self, most_bytes: int, most_each: int | None = None) -> None:
        self.most_bytes, self.n_bytes = most_bytes, 0
        self.most_each = most_bytes // 16 if most_each is None else most_each
        self.lock = threading.Lock()
        self.order: dict[tuple[ref[Cache[Any, Any]], Hashable], int] = {}
        """Bytes by cache and key."""

    def drop(self, one: tuple[ref[Cache[Any, Any]], Hashable]) -> None:
        """Let go of a value; call it with the lock."""
        nbytes = self.order.pop(one, None)
        if nbytes is not None:
            self.n_bytes -= nbytes
            if (cache := one[0]()) is not None:
                cache.values.pop(one[1], None)


PROCESS: Final = Budget(1 << 27)
"""Of all caches of a process, but for weights."""
WEIGHTS: Final = Budget(1 << 32, most_each=1 << 62)
"""Of probes, lenses and autoencoders that a server may be told of; the latest always has room."""


class Cache(Generic[K, V]):
    """Values by key; those that came first go when there is no more room. Threads may share it."""

    def __init__(self, most: int, budget: Budget = PROCESS) -> None:
        self._most, self._budget, self._self = most, budget, ref(self)
        self.values: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self.values)

    def get(self, key: K) -> V | None:
        """What is kept under a key; None for nothing."""
        return self.values.get(key)

    def keep(self, key: K, value: V, nbytes: int = 0) -> None:
        """Keep a value in the place of the one that the key has."""
        budget, nbytes = self._budget, nbytes + BYTES_BESIDE
        if nbytes > budget.most_each:
            return
        with budget.lock:
            budget.drop((self._self, key))
            self.values[key] = value
            budget.order[self._self, key] = nbytes
            budget.n_bytes += nbytes
            while len(self.values) > self._most:
                budget.drop((self._self, next(iter(self.values))))
            while budget.n_bytes > budget.most_bytes and len(budget.order) > 1:
                budget.drop(next(iter(budget.order)))

    def forget(self, is_it: Callable[[V], bool]) -> None:
        """Let go of the latest value for which `is_it` is true."""
        with self._budget.lock:
            for key in reversed(self.values):
                if is_it(self.values[key]):
                    return self._budget.drop((self._self, key))


Key = tuple[object, ...]

_BYTES_OF_A_PART, _BYTES_OF_AN_OBJECT, _BYTES_OF_AN_ITEM = 96, 1 << 10, 48
_PLAIN = frozenset({int, bool, str, type(None)})
_FEW_PARTS, _MOST_PARTS = 64, 4096
_MOST_TEXT, _MOST_BITS = 1 << 16, 1 << 10
_MOST_DEPTH = 16


def _held_bytes(kept: Iterable[object], request: LensRequest | None) -> int:
    """Bytes of tensors, functions, texts and lists that a key and its request hold."""
    holders: dict[int, int] = {}
    for item in (part for one in (*kept, request) for part in _parts(one)):
        if isinstance(item, EditBase):
            holders |= {id(tensor): tensor.nbytes for tensor in item.all_tensors}
        elif isinstance(item, Hook):
            holders[id(item.fn)] = len(item.fn.data)
    return sum(holders.values()) + _plain_bytes(request)


def _plain_bytes(value: object) -> int:
    """Bytes of the objects of a request, of their texts and of the items of their lists, about."""
    if isinstance(value, BaseModel):
        return _BYTES_OF_AN_OBJECT + sum(map(_plain_bytes, value.__dict__.values()))
    if isinstance(value, tuple):
        inner = sum(_plain_bytes(item) for item in value if type(item) is not int)
        return _BYTES_OF_AN_ITEM * len(value) + inner
    return len(value) if isinstance(value, str) else 0


def _parts(item: object) -> tuple[object, ...]:
    return (*item.edits, *item.hooks) if isinstance(item, LensRequest) else (item,)


def fingerprint(extra_args: Mapping[str, Any]) -> tuple[Key | None, list[object]]:
    """Names the content of plain requests exactly; None where it is large, deep, or arrays."""
    parts: list[object] = []
    # Objects that are named by their identity: whoever keeps the name keeps them, too.
    kept: list[object] = []
    if not _describe(dict(extra_args), parts, kept, 0):
        return None, []
    if len(parts) <= _FEW_PARTS:
        return tuple(parts), kept
    # A vector as a list is one number after the other, each of them as text.
    text = repr(parts).encode(errors="surrogatepass")
    return (hashlib.sha256(text).digest(),), kept


def _describe(value: Any, parts: list[object], kept: list[object], depth: int) -> bool:
    """Append the content of a value; False where it cannot be named in a few words."""
    kind = type(value)
    if kind in _PLAIN:
        parts += kind, value
        if kind is int:
            return int(value).bit_length() <= _MOST_BITS  # Python writes no longer ones
        return kind is not str or len(value) <= _MOST_TEXT
    if kind in (dict, list, tuple) and (
        len(parts) + 2 * len(value) > _MOST_PARTS or depth > _MOST_DEPTH
    ):
        return False
    if kind is dict:
        parts += kind, len(value)
        for key, item in value.items():
            if not (_describe(key, parts, kept, depth) and _describe(item, parts, kept, depth + 1)):
                return False
        return True
    if kind in (list, tuple):
        parts += kind, len(value)
        return all(_describe(item, parts, kept, depth + 1) for item in value)
    if isinstance(value, EditBase | Hook | LensRequest):
        kept.append(value)
        parts += kind, id(value)  # they never change
        return True
    parts += kind, repr(value) if kind is float else None  # 0.0 is -0.0 to Python
    return kind is float


class LensRequest(RequestPart):
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

    what: ClassVar[str] = "a request"

    configs: tuple[Name, ...] = ()
    """Registered configurations, which act before the request's own edits; one name will do. What
    the request says of a probe takes the place of what they say."""

    server: Flag | None = None
    """False leaves out what the operator has set for all requests, where he allows it."""

    edits_meet: Literal["in_order", "error"] = "in_order"
    """What becomes of edits that meet in the same numbers of a token, those of the server and of
    configurations among them: they act in order, each on what the one before left, or the request
    is refused. Gates count as open, and `Renormalise` belongs to the edits in front of it."""

    capture: CaptureSpec | None = None
    """Activations to return; layers alone will do."""

    hooks: tuple[Hook, ...] = ()
    """Functions of the client to run on rows of this request, where the engine allows it."""

    qk: QKSpec | None = None
    """Queries and keys to return; layers alone will do, or a list of (layer, head)."""

    lens: LogitLens | None = None
    """What the stream of some layers predicts; layers alone will do."""

    sink: SinkUse | None = None
    """Store or function of the server that gets the rows too; its name will do. Without `capture`
    the response has none of them."""

    open_gates: tuple[GateKey, ...] = ()
    """Keys that receipts of earlier requests have given of gates with `conversation`: a gate of
    this request whose key is among them begins open. Other keys do nothing."""

    skip_reading_prefix_cache: Flag | None = None
    """Recompute the whole prompt. None means: where captured prompt tokens need it."""

    stream_results: Flag = False
    """Send rows, lens tables and what gates decided with the tokens they belong to, in an answer
    that is streamed. Scores of `tokens` come so in any case. While a server streams many answers,
    several tokens share an event."""

    @field_validator("configs", "open_gates", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return listed(value)

    @field_validator("configs")
    @classmethod
    def _each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError(f"{shown(list(value))}; name each once")
        return value

    @field_validator("server")
    @classmethod
    def _server(cls, value: bool | None) -> bool | None:
        return None if value else value

    @field_validator("hooks", mode="before")
    @classmethod
    def _hooks(cls, value: Any) -> Any:
        return parse_hooks(value, where="hooks")

    @field_validator("capture", "qk", "lens", mode="before")
    @classmethod
    def _of_layers(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None or isinstance(value, Mapping | Value):
            return value
        is_of_heads = info.field_name == "qk" and names_heads(value)
        return {"heads" if is_of_heads else "layers": value}

    @field_validator("sink", mode="before")
    @classmethod
    def _sink(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_serializer(mode="wrap")
    def _what_is_asked(
        self, whole: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        # It is on the wire and twice in the log of each call, and Inspect asks for it eight times.
        if info.include is None and info.exclude is None:
            return {name: getattr(self, name) for name in self.asked}
        chosen = whole(self)
        return {name: chosen[name] for name in self.asked if name in chosen}

    @property
    def asked(self) -> list[str]:
        """Fields that say something, in their order."""
        said = vars(self).items()
        return [k for k, v in said if v is not _DEFAULTS[k] and v != _DEFAULTS[k]]

    @property
    def brings_tensors(self) -> bool:
        """Whether its answer has tensors."""
        return not (self.capture is None and self.qk is None and self.lens is None)

    @property
    def leaves_transport(self) -> bool:
        """Whether its answer has tensors, and it leaves open how they travel."""
        return any(part.transport == "auto" for part in self._parts.values())

    def over_binary(self) -> LensRequest:
        """The same request, with the binary transport where it leaves that open."""
        binary = {"transport": "binary"}
        open_ = {k: part for k, part in self._parts.items() if part.transport == "auto"}
        return self.model_copy(update={k: v.model_copy(update=binary) for k, v in open_.items()})

    def with_fields(self, **fields: Any) -> LensRequest:
        """The same request with other fields, which are judged together as those of a new one.

        Args:
            **fields: in the place of those that it has.

        Raises:
            SpecError: they do not go together.
        """
        return read_as(LensRequest, vars(self) | fields)

    @property
    def _parts(self) -> dict[str, CaptureSpec | QKSpec | LogitLens]:
        """What says how its tensors travel, by field."""
        found = {"capture": self.capture, "qk": self.qk, "lens": self.lens}
        return {name: part for name, part in found.items() if part is not None}

    @property
    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        """The tensors that its answer has, by the field that asks for them."""
        names: dict[str, tuple[str, ...]] = {}
        if self.capture is not None:
            names["capture"] = tuple(map(result_name, self.capture.sites))
        if self.qk is not None:
            names["qk"] = QK_NAMES
        if self.lens is not None:
            names["lens"] = (LENS_NAME,)
        return names

    @property
    def scores_tokens(self) -> bool:
        """Whether its answer has the score of each token."""
        return any(use.tokens for use in self.probes)

    def _all_positions(self) -> Iterator[Positions]:
        yield from super()._all_positions()
        if self.capture is not None:
            yield self.capture.positions

    @model_validator(mode="after")
    def _one_transport(self) -> Self:
        """Tensors of a request travel alike: `auto` as the others do."""
        said = {part.transport: name for name, part in self._parts.items()}
        if len(ways := said.keys() - {"auto"}) > 1:
            first, other = [f"{said[way]}.transport={shown(way)}" for way in sorted(ways)]
            raise SpecError(
                f"{first} beside {other}: all tensors of a request travel in one way; leave one of "
                "them out, which then travels as the other does"
            )
        for name, part in self._parts.items() if ways else ():
            if part.transport == "auto":
                vars(self)[name] = part.model_copy(update={"transport": min(ways)})
        return self

    @model_validator(mode="after")
    def _check_streamed(self) -> Self:
        if self.stream_results and (why := self.why_not_streamed) is not None:
            raise SpecError(why)
        return self

    @property
    def why_not_streamed(self) -> str | None:
        """Why its results cannot come token by token; None where they can, or may.

        What it names, as `edits_named`, is not known yet.
        """
        if self.capture is not None and (made := self.capture.made_of_all) is not None:
            return (
                f"stream_results beside capture.{made}: that is made of several tokens and ready "
                "only when the last of them is; leave stream_results out, or capture the rows "
                "with reduce='none'"
            )
        has_gates = any(gate.is_lasting for edit in self.edits for gate in edit.gates)
        is_named = bool(self.edits_named or self.configs)
        if not (self.brings_tensors or self.scores_tokens or has_gates or is_named):
            return (
                "stream_results: nothing here comes token by token; add capture, qk, lens, a probe "
                "with tokens=true, or an edit with a gate that lasts, or leave stream_results out"
            )
        return None


_DEFAULTS: Final = {name: field.default for name, field in LensRequest.model_fields.items()}


def parse_extra_args(
    extra_args: Mapping[str, Any] | None, *, limits: TensorLimits | None = None
) -> LensRequest | None:
    """Read a lens request out of vLLM's `extra_args` (or `vllm_xargs`); None for no lens key.

    Understood are the keys of vllm-lens (`output_residual_stream`,
    `apply_steering_vectors`, `apply_hooks`, `output_qk`, `skip_reading_prefix_cache`,
    `activations_transport`), each as Python objects or as JSON text, and `inspect_lens`, a
    `LensRequest` as an object or JSON. `output_residual_stream` and `output_qk` are `true`,
    `false` or a list of layers; a number alone is refused.

    Args:
        extra_args: the mapping, or None.
        limits: of the engine that it is for; tensors that it has no use for are not unpacked.

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
    if len(extra_args) == 1 and isinstance(typed := extra_args.get(NATIVE_KEY), LensRequest):
        return _none_if_empty(typed)
    # A batch gives one mapping to a thousand requests, and each is read three times.
    key, kept = fingerprint(extra_args)
    if key is not None and (known := _PARSED.get(key)) is not None:
        return known[0]
    with judging(NATIVE_KEY):
        request = _parse(extra_args, limits)
    if key is not None:
        nbytes = _BYTES_OF_A_PART * len(key) + sum(len(p) for p in key if isinstance(p, str))
        nbytes += _held_bytes(kept, request)
        _PARSED.keep(key, (request, kept), nbytes)
    return request


_PARSED: Cache[Key, tuple[LensRequest | None, list[object]]] = Cache(1 << 13)
"""Equal requests are one object, and others know what they did for it by its identity."""


def forget_parsed(request: LensRequest) -> None:
    """Forget a parsed request that an engine has refused."""
    _PARSED.forget(lambda known: known[0] is request)


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
    return _none_if_empty(read_as(LensRequest, values, context=context))


def _none_if_empty(request: LensRequest) -> LensRequest | None:
    return request if request != NO_REQUEST else None


NO_REQUEST = LensRequest()
"""Of requests that ask for nothing themselves; one object, by which they are known."""


def _check_keys(extra_args: Mapping[str, Any], *, has_lens: bool) -> None:
    others = [key for key in extra_args if key not in LENS_KEYS and key not in VLLM_KEYS]
    refuse_own_words(others, "extra_args")
    refuse_misspelled(others, "extra_args", known=LENS_KEYS, cutoff=0.75)
    if has_lens and others:
        raise SpecError(
            f"extra_args: unknown key {shown(others[0])} beside lens keys; known are "
            f"{', '.join(LENS_KEYS + VLLM_KEYS)}"
        )


Registrable = EngineProbe | EditBase | EngineEdits | EngineLens | EngineAutoencoder | EngineConfig
"""A probe, a vector or edits, a lens, an autoencoder, or a configuration, as
`inspect_lens.engine.register` takes it."""


def split_options(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of a call: what names a field of a `LensRequest` and says something, and the rest.

    Every surface that takes keywords takes all fields by it, under the names that they have here.
    """
    rest = {key: value for key, value in given.items() if key not in LensRequest.model_fields}
    asked = {key: value for key, value in given.items() if key not in rest and value is not None}
    return asked, rest


_NO_MAPPINGS = _PLAIN | {float, list}
_DEPTH = 3
"""Of mappings inside a body that are looked through for lens keys."""


class BodyParts(NamedTuple):
    """HTTP body of a request, split into lens keys and the rest."""

    rest: dict[str, Any]
    """What is the server's own."""
    args: dict[str, Any]
    """What stood in `extra_args` and `vllm_xargs`, and lens keys of the top level."""


def split_body(body: Mapping[str, Any] | None, *, where: str = "extra_body") -> BodyParts:
    """Take the lens keys out of a request body; what looks like one where nobody reads is refused.

    vLLM passes over fields that it does not know, so a lens key is found at the top level as well.
    """
    args = lens_args(body, where=where)
    taken = (*PLACES, *LENS_KEYS)
    rest = {key: value for key, value in (body or {}).items() if key not in taken}
    refuse_own_words(rest, where)
    refuse_misspelled(rest, where)
    for key, value in [one for one in rest.items() if type(one[1]) not in _NO_MAPPINGS]:
        if isinstance(value, Mapping) and (inside := _found(value)) is not None:
            key_inside = inside.rpartition(".")[2]
            raise SpecError(
                f"{where}.{key}.{inside}: nobody reads it there; allowed are "
                f"{where}.extra_args.{key_inside}, {where}.vllm_xargs.{key_inside} and "
                f"{where}.{key_inside}"
            )
    return BodyParts(rest, args)


def lens_args(body: Mapping[str, Any] | None, *, where: str = "the body") -> dict[str, Any]:
    """What `extra_args` and `vllm_xargs` of a body hold, and lens keys of its top level."""
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
    """Spell a request as `extra_args`, by the keys of vllm-lens where they can say it all."""
    if request is None:
        return {}
    args = to_vllm_lens(request)
    return {NATIVE_KEY: request} if args is None else args


def to_wire_args(extra_args: Mapping[str, Any]) -> dict[str, Any]:
    """Turn `extra_args` into vLLM's `vllm_xargs`: all but text and numbers becomes JSON text.

    Args:
        extra_args: what `to_extra_args` returned, and other keys.

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
