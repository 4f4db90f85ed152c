"""Lenses that are registered with an engine: what is done to a row before the unembedding."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    InstanceOf,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_serializer,
    model_validator,
)

from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec.engine._facts import EngineFacts
from inspect_lens.spec.engine._limits import lens_judge
from inspect_lens.spec.values._arrays import as_tensor_data
from inspect_lens.spec.values._dump import WireModel, is_wire
from inspect_lens.spec.values._strict import Integer, integers, shown
from inspect_lens.spec.values._tensor import TensorData, encode_tensor, freeze_tensor

from ._lens import LogitLens

__all__ = [
    "LENS_REFERENCE",
    "EngineLens",
    "LensEntry",
    "LensKind",
    "ResolvedLens",
    "check_engine_lens",
]

LENS_REFERENCE = "lens/1"
"""`$lens` of the short form of a registered lens."""

LensKind = Literal["tuned", "jacobian"]
"""What a lens does to a row `h`: tuned adds `A h + b`, and Jacobian multiplies with `J`."""

_SHAPES: dict[str, dict[str, str]] = {
    "tuned": {"matrix": "lhh", "bias": "lh"},
    "jacobian": {"matrix": "lhh"},
}


class LensEntry(BaseModel):
    """A registered lens without its tensors, which the workers hold."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: LensKind
    """What it does to a row."""
    n_layers: int
    """Decoder layers of the model that it was fitted to."""
    hidden: int
    """Width of the residual stream of that model."""
    layers: tuple[int, ...]
    """Layers that it translates, ascending, 0-based."""
    sha256: str
    """Of all that decides what it reads."""
    nbytes: int
    """Bytes of its tensors on each device."""

    def reference(self) -> dict[str, Any]:
        """The short form for logs and lists."""
        return {
            "$lens": LENS_REFERENCE,
            "sha256": self.sha256,
            "kind": self.kind,
            "layers": list(self.layers),
        }

    def resolve(self, lens: LogitLens) -> ResolvedLens:
        """What a request reads with this lens.

        Args:
            lens: of the request; it names this one.

        Returns:
            The same with its layers. `all` are those that the lens translates, and the last layer
            of the model, which needs no translation.

        Raises:
            SpecError: the lens does not translate one of the layers.
        """
        readable = (*self.layers, self.n_layers - 1)
        layers = tuple(sorted(set(readable))) if lens.layers == "all" else lens.layers
        if missing := [layer for layer in layers if layer not in readable]:
            raise SpecError(
                f"lens.layers: {missing}; the lens {lens.name!r} reads the layers "
                f"{sorted(set(readable))}; ask for some of these, or leave out its name for the "
                "logit lens"
            )
        values = {name: getattr(lens, name) for name in LogitLens.model_fields}
        return ResolvedLens.model_construct(**values | {"layers": layers}, entry=self)


class ResolvedLens(LogitLens):
    """A lens of a request whose name has been looked up; clients cannot send one."""

    entry: LensEntry
    """What is registered under the name."""


class EngineLens(WireModel):
    """A tuned lens or a Jacobian lens as the engine applies it to rows of the stream.

    A row `h` of a layer becomes `h + A h + b` (tuned) or `J h` (jacobian), computed in float32.
    The model's final norm and unembedding come behind it. The last layer needs no translation.

    Source:
        Tuned lens: Belrose et al. 2023, arXiv:2303.08112.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import EngineLens

        eye = np.eye(256, dtype=np.float32)
        lens = EngineLens(kind="jacobian", n_layers=6, layers=(2,), tensors={"matrix": eye[None]})
        assert lens.hidden == 256
        ```
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    kind: LensKind
    """What is done to a row."""
    n_layers: Integer
    """Decoder layers of the model that it was fitted to; an engine of another depth refuses it."""
    layers: tuple[int, ...]
    """Layers that it translates, ascending, 0-based."""
    tensors: dict[str, InstanceOf[TensorData]]
    """By name, with l layers and width h: `matrix` (l, h, h), whose rows are outputs, and of a
    tuned lens `bias` (l, h). float32, float16 and bfloat16 stay as they are on the device."""

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
        expected = _SHAPES[kind]
        if set(value) != set(expected):
            raise ValueError(
                f"a {kind} lens has the tensors {sorted(expected)}; given are "
                f"{shown(sorted(map(str, value)))}"
            )
        return {
            name: freeze_tensor(
                as_tensor_data(tensor, field=name, judge=lens_judge(info, expected[name]))
            )
            for name, tensor in value.items()
        }

    @field_serializer("tensors")
    def _dump_tensors(self, value: dict[str, TensorData]) -> dict[str, Any]:
        return {name: encode_tensor(tensor) for name, tensor in value.items()}

    @model_serializer(mode="wrap")
    def _dump(
        self, handler: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        form: dict[str, Any] = handler(self) if is_wire(info) else self.reference()
        return form

    @model_validator(mode="after")
    def _check(self) -> Self:
        layers = self.layers
        ascending = list(layers) == sorted(set(layers))
        if not layers or not ascending or layers[0] < 0 or layers[-1] >= self.n_layers:
            raise ValueError(
                f"layers {shown(layers)}; name at least one of 0 to {self.n_layers - 1}, ascending"
            )
        hidden = self.hidden
        for name, axes in _SHAPES[self.kind].items():
            wanted = tuple(len(layers) if axis == "l" else hidden for axis in axes)
            tensor = self.tensors[name]
            if tensor.shape != wanted or not hidden:
                raise ValueError(
                    f"tensors.{name} has shape {tensor.shape}; {len(layers)} layers need {wanted}"
                )
            if not all(np.isfinite(values).all() for values in tensor.blocks()):
                raise ValueError(f"tensors.{name} holds NaN or infinity")
        return self

    @property
    def hidden(self) -> int:
        """Width of the rows that it reads."""
        shape = self.tensors["matrix"].shape
        return shape[-1] if shape else 0

    @cached_property
    def sha256(self) -> str:
        """Hash of everything that decides what it reads."""
        parts: list[Any] = [self.kind, self.n_layers, list(self.layers)]
        parts.append([[name, self.tensors[name].sha256] for name in sorted(self.tensors)])
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def entry(self) -> LensEntry:
        """What a front-end keeps of it."""
        return LensEntry(
            kind=self.kind,
            n_layers=self.n_layers,
            hidden=self.hidden,
            layers=self.layers,
            sha256=self.sha256,
            nbytes=sum(tensor.nbytes for tensor in self.tensors.values()),
        )

    def reference(self) -> dict[str, Any]:
        """The short form for logs: what it is, without the tensors."""
        return self.entry.reference()


def check_engine_lens(
    lens: EngineLens | LensEntry, facts: EngineFacts, field: str = "lens"
) -> None:
    """Check a lens against the engine that will apply it.

    Args:
        lens: the lens.
        facts: of the engine.
        field: path of the field, for error messages.

    Raises:
        SpecError: the model has another width or depth.
        UnsupportedError: the engine cannot apply its unembedding to other rows.

    Example:
        ```python
        import numpy as np
        import pytest

        from inspect_lens.errors import SpecError
        from inspect_lens.spec import EngineFacts, EngineLens, check_engine_lens, tap_points

        places = {"layers": (0, 1), "sites": ("resid_post",)}
        taps = tap_points(["resid_post"], (0, 1))
        sizes = {"hidden": 256, "max_step_tokens": 64, "ring_rows": 128, "bank_rows": 8}
        engine = {"model": "m", "n_layers": 2, "dtype": "float32", "vllm_version": "0"}
        facts = EngineFacts(**engine, **places, taps=taps, **sizes)
        matrix = np.zeros((1, 64, 64), dtype=np.float32)
        lens = EngineLens(kind="jacobian", n_layers=2, layers=(0,), tensors={"matrix": matrix})
        with pytest.raises(SpecError, match="width 64"):
            check_engine_lens(lens, facts)
        ```
    """
    if facts.no_lens:
        raise UnsupportedError(f"{field}: {facts.no_lens}")
    if (lens.hidden, lens.n_layers) != (facts.hidden, facts.n_layers):
        raise SpecError(
            f"{field}: fitted to a model of {lens.n_layers} layers and width {lens.hidden}; "
            f"{facts.model} has {facts.n_layers} layers and a stream of width {facts.hidden}"
        )
