"""What probes and lenses that an engine registers have in common: a kind, and tensors by name."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from pydantic import (
    ConfigDict,
    InstanceOf,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_serializer,
)

from inspect_lens.spec.engine._limits import weights_judge
from inspect_lens.spec.values._strict import integers, shown
from inspect_lens.spec.values._tensor import (
    TensorData,
    WireModel,
    as_tensor_data,
    encode_tensor,
    freeze_tensor,
    is_wire,
)

__all__ = []


class Weights(WireModel):
    """Tensors of a kind, which are encoded on the wire and stand in logs as a reference."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    kind: str
    layers: tuple[int, ...]
    tensors: dict[str, InstanceOf[TensorData]]

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

        def read(name: str) -> TensorData:
            judge = weights_judge(info, axes[name], cls.what)
            return freeze_tensor(as_tensor_data(value[name], field=name, judge=judge))

        return {name: read(name) for name in value}

    @field_serializer("tensors")
    def _dump_tensors(self, value: dict[str, TensorData]) -> dict[str, Any]:
        return {name: encode_tensor(tensor) for name, tensor in value.items()}

    @model_serializer(mode="wrap")
    def _dump(
        self, handler: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        form: dict[str, Any] = handler(self) if is_wire(info) else self.reference()
        return form

    def check_finite(self) -> None:
        """Refuse NaN and infinity.

        Raises:
            ValueError: a tensor holds one.
        """
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
