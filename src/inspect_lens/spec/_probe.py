"""Probes that run inside the engine: weights to register, and how a request refers to them."""

from __future__ import annotations

import hashlib
import json
import math
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import (
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.dataclasses import dataclass

from inspect_lens.errors import SpecError

from ._engine import RESID_POST, Numerics, Site, TapPoint, limits_of, tap_points
from ._pool import EnginePool, parse_pool
from ._positions import Positions, parse_positions
from ._tensor import Tensor, TensorData, WireModel, as_tensor_data, freeze_tensor, is_wire
from ._values import Flag, Name, Number, Value, integers, shown

__all__ = [
    "PROBE_REFERENCE",
    "EngineProbe",
    "ProbeReceipt",
    "ProbeUse",
    "WeightsEntry",
]


class Weights(WireModel):
    """Tensors of a kind, which are encoded on the wire and stand in logs as a reference."""

    kind: str
    layers: tuple[int, ...]
    tensors: dict[str, Tensor]

    shapes: ClassVar[dict[str, dict[str, str]]] = {}
    """By kind and name of a tensor its axes: l layers, width h, k units or heads."""
    optional: ClassVar[frozenset[str]] = frozenset()
    """Tensors that may be left out."""
    what: ClassVar[str] = ""
    """What it is, for messages; the limits of `TensorLimits` go by it."""

    @field_validator("layers", mode="before")
    @classmethod
    def _layers(cls, value: Any) -> Any:
        return integers(value)

    @field_validator("tensors", mode="before")
    @classmethod
    def _tensors(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"is {type(value).__name__}; give tensors by name")
        kind = info.data.get("kind")
        if kind is None:
            raise ValueError("cannot be read without a kind")
        axes = cls.shapes[kind]
        unknown = sorted(map(str, set(value) - set(axes)))
        missing = sorted(set(axes) - set(value) - cls.optional)
        if unknown or missing:
            raise ValueError(
                f"a {kind} {cls.what} has the tensors {sorted(axes)}; unknown are "
                f"{shown(unknown)}, missing are {missing}"
            )

        limits = limits_of(info)

        def read(name: str) -> TensorData:
            judge = None
            if limits is not None:
                judge = partial(limits.judge_weights, axes=axes[name], what=cls.what)
            return freeze_tensor(as_tensor_data(value[name], field=name, judge=judge))

        return {name: read(name) for name in value}

    @model_serializer(mode="wrap")
    def _dump(
        self, handler: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        form: dict[str, Any] = handler(self) if is_wire(info) else self.reference()
        return form

    def check_finite(self) -> None:
        """Raise ValueError for NaN and infinity."""
        for name, tensor in self.tensors.items():
            if not all(np.isfinite(values).all() for values in tensor.blocks()):
                raise ValueError(f"tensors.{name} holds NaN or infinity")

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @cached_property
    def sha256(self) -> str:
        """Hash of everything that decides what it reads."""
        parts = [*self._identity(), [[n, self.tensors[n].sha256] for n in sorted(self.tensors)]]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _identity(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def reference(self) -> dict[str, Any]:
        """The short form for logs: what it is, without the tensors."""
        raise NotImplementedError


class WeightsEntry(Value):
    """Registered weights without their tensors, which the workers hold."""

    kind: str
    """As of the weights."""
    hidden: int
    """Width of the rows that they read."""
    layers: tuple[int, ...]
    """Layers that they are for, ascending, 0-based; empty where that is not known."""
    sha256: str
    """Hash of everything that decides what they compute."""
    nbytes: int
    """Bytes of the tensors on each device."""

    what: ClassVar[str] = ""
    """`$lens` of the short form."""

    def reference(self) -> dict[str, Any]:
        """The short form for logs and lists."""
        layers = list(self.layers)
        return {"$lens": self.what, "sha256": self.sha256, "kind": self.kind, "layers": layers}


PROBE_REFERENCE = "probe/1"
"""`$lens` of the short form in which a probe stands in logs."""


class EngineProbe(Weights):
    """A trained probe as the engine applies it to each token; all arithmetic is float32.

    - `linear`: `sum over layers of weight[layer] · x[layer] + bias`.
    - `mlp`: `w2 · relu(sum over layers of w1[layer] x[layer] + b1) + b2`.
    - `attention`: over the tokens so far, `sum over heads of sum_t softmax_t(query · x_t)
      (value · x_t) + bias`; one layer. A token's score is that of the text up to it.

    Standardisation is part of the weights: fold `(x - mean) / scale` into them.

    Source:
        The attention form is that of EleutherAI's attention probes; the linear one that of
        arXiv:2502.03407.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import EngineProbe

        weight = np.random.default_rng(0).standard_normal((2, 256))  # (layers, hidden)
        probe = EngineProbe(layers=(1, 3), tensors={"weight": weight}, threshold=0.5)
        assert probe.hidden == 256
        ```
    """

    shapes: ClassVar[dict[str, dict[str, str]]] = {
        "linear": {"weight": "lh", "bias": ""},
        "mlp": {"w1": "lkh", "b1": "k", "w2": "k", "b2": ""},
        "attention": {"query": "kh", "value": "kh", "bias": ""},
    }
    optional: ClassVar[frozenset[str]] = frozenset({"bias", "b1", "b2"})
    what: ClassVar[str] = "probe"

    kind: Literal["linear", "mlp", "attention"] = "linear"
    """Form of the score."""
    layers: tuple[int, ...]
    """Layers that it reads, ascending, 0-based."""
    site: Site = RESID_POST
    """Place in the block."""
    tensors: dict[str, Tensor]
    """By name, with l layers, width h and k units or heads: linear `weight` (l, h), `bias` ();
    mlp `w1` (l, k, h), `b1` (k), `w2` (k), `b2` (); attention `query` and `value` (k, h),
    `bias` (). Biases are 0 where left out."""
    aggregate: EnginePool = "mean"
    """How token scores become one number, as in `inspect_lens.probe.parse_pool`, but for
    `sentence_mean_max`, which needs the texts of tokens; an attention probe aggregates by itself
    and ignores it."""
    threshold: Number | None = None
    """Raises the alarm of requests that name no threshold. It is compared with the running
    `aggregate` after every token, so it has to be calibrated for that: a threshold for whole
    answers is exceeded on the way by many more of them. `for_engine()` takes it from the alarm
    threshold of the probe's card, where there is one."""
    threshold_tokens: int | None = Field(default=None, ge=1)
    """Tokens up to which the threshold holds its rate; None: not known."""
    threshold_positions: Positions | None = None
    """Tokens that it was calibrated on; None: not known, and then it acts on any."""
    threshold_numerics: Numerics | None = None
    """What computed the scores that it was calibrated on; None: not known."""

    @field_validator("layers")
    @classmethod
    def _ascending(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(value)))

    @field_validator("threshold_positions", mode="before")
    @classmethod
    def _threshold_positions(cls, value: Any) -> Any:
        return value if value is None else parse_positions(value, field="threshold_positions")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.layers or self.layers[0] < 0:
            raise ValueError(f"layers {shown(self.layers)}; name at least one, from 0")
        expected = self.shapes[self.kind]
        if self.kind == "attention" and len(self.layers) != 1:
            raise ValueError(f"an attention probe reads one layer; layers is {shown(self.layers)}")
        sizes = {"l": len(self.layers)}
        for name, tensor in self.tensors.items():
            axes = expected[name]
            shape = () if axes == "" and tensor.storage.size == 1 else tensor.shape
            if len(shape) != len(axes):
                raise ValueError(
                    f"tensors.{name} has shape {tensor.shape}; it needs {len(axes)} axes"
                )
            for axis, size in zip(axes, shape, strict=True):
                if sizes.setdefault(axis, size) != size or size == 0:
                    raise ValueError(
                        f"tensors.{name} has shape {tensor.shape}, which does not fit "
                        f"{len(self.layers)} layers and the other tensors"
                    )
        self.check_finite()
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise ValueError(f"threshold is {self.threshold}; it has to be finite")
        return self

    @property
    def hidden(self) -> int:
        """Width of the rows that it reads."""
        name = {"linear": "weight", "mlp": "w1", "attention": "query"}[self.kind]
        return self.tensors[name].shape[-1]

    @property
    def taps(self) -> tuple[TapPoint, ...]:
        """What serves its site and layers."""
        return tap_points((self.site,), self.layers)

    @property
    def columns(self) -> int:
        """Numbers per token that leave the engine."""
        return 2 * self.tensors["query"].shape[0] if self.kind == "attention" else 1

    def _identity(self) -> tuple[Any, ...]:
        return self.kind, list(self.layers), self.site

    def alarm_threshold(self, use: ProbeUse) -> float:
        """The threshold of a request's alarm: its own number, else the probe's where it holds.

        Raises:
            SpecError: the probe has none, or it was calibrated for another running score or for
                other tokens.
        """
        if use.threshold is not None:
            return use.threshold
        field = f"probes: alarm={use.alarm!r} of {use.name!r}"
        way = (
            "give threshold, a number of your own, or calibrate the probe for this alarm "
            "(inspect-lens probe calibrate --for alarm) and register it again"
        )
        own = "attention" if self.kind == "attention" else str(parse_pool(self.aggregate))
        asked = own if use.aggregate is None or self.kind == "attention" else use.aggregate
        if self.threshold is None:
            raise SpecError(
                f"{field}: the probe has no threshold for the running {asked}, which an alarm "
                f"compares after every token; {way}"
            )
        if own != asked and own != str(parse_pool(asked)):
            raise SpecError(
                f"{field} with aggregate={asked!r}: the probe's threshold was calibrated for the "
                f"running {own}; leave aggregate out, or {way}"
            )
        if self.threshold_positions not in (None, use.positions):
            raise SpecError(
                f"{field} at positions {shown(use.positions)}: the probe's threshold was "
                f"calibrated for {shown(self.threshold_positions)}; ask for these, or {way}"
            )
        return self.threshold

    def alarm_differences(self, use: ProbeUse, here: Numerics) -> tuple[str, ...]:
        """`Numerics.differences` of an engine and the one that an alarm's threshold was set with.

        It is empty without an alarm, for a threshold of the request's own, and where nothing is
        known.

        Args:
            use: the request's use of this probe.
            here: the engine's numerics.
        """
        if use.alarm is None or use.threshold is not None or self.threshold_numerics is None:
            return ()
        return self.threshold_numerics.differences(here)

    def bias(self, name: str) -> float:
        """A scalar tensor, 0 where it was left out."""
        tensor = self.tensors.get(name)
        return 0.0 if tensor is None else float(tensor.to_float32().reshape(-1)[0])

    def reference(self) -> dict[str, Any]:
        """The short form for logs: what it is, without the tensors."""
        form = {name: getattr(self, name) for name in type(self).model_fields if name != "tensors"}
        if self.threshold_numerics is not None:
            form["threshold_numerics"] = self.threshold_numerics.model_dump(mode="json")
        form["layers"] = list(self.layers)
        return {"$lens": PROBE_REFERENCE, "sha256": self.sha256, **form}


class ProbeUse(Value):
    """How one request uses a registered probe."""

    name: Name
    """Name under which the probe was registered."""
    positions: Positions = "completion"
    """Tokens that it reads."""
    aggregate: EnginePool | None = None
    """Instead of the probe's own."""
    tokens: Flag = False
    """Whether the response has the score of every token."""
    alarm: Literal["flag", "stop"] | None = None
    """What happens when the aggregated score of the tokens so far exceeds the threshold: it is
    noted in the receipt, or the generation ends as well."""
    threshold: Number | None = Field(default=None, allow_inf_nan=False)
    """Instead of the probe's own; a number that you answer for. Without it the alarm is refused
    unless the probe has a threshold for the same running score and tokens."""

    @field_validator("positions", mode="before")
    @classmethod
    def _positions(cls, value: Any) -> Any:
        if isinstance(value, str) and value == "last":
            # Scores are wanted as they come, and which token is the last is known at the end.
            raise ValueError("'last'; take the score of the last token with aggregate='last'")
        return parse_positions(value, field="positions")


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class ProbeReceipt:
    """Result of one probe in the engine: score, token scores, alarms."""

    # A batch of requests with sixteen probes each makes thousands of these at once: a model would
    # be three objects to the garbage collector, and this is one.

    name: str
    sha256: str
    """Of the registered probe."""
    aggregate: str
    """How token scores became `score`."""
    score: float | None
    """Aggregated over the tokens read; None when there were none."""
    n_tokens: int
    """Tokens read."""
    first_position: int | None = None
    """Position of the first token read."""
    tokens: tuple[float, ...] | None = None
    """Score of each token read, where asked for."""
    threshold: float | None = None
    """What the alarm compared with."""
    threshold_tokens: int | None = None
    """Tokens up to which the probe's own threshold holds its rate of false alarms; where
    `n_tokens` is larger, none is promised for this answer. None: the threshold was the request's,
    or its length is not known."""
    threshold_differs: tuple[str, ...] | None = None
    """In what this engine differs from the one that the probe's own threshold was calibrated with,
    such as `dtype float16 instead of bfloat16`, so that its rate of false alarms may be another
    one here. None: in nothing, as far as is known."""
    alarm_position: int | None = None
    """Position of the first token at which the aggregate exceeded the threshold."""
    stopped: bool = False
    """Whether the alarm ended the generation."""
