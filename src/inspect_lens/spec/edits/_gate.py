"""Gates: a probe that decides in the same forward pass on which tokens an edit acts."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np
from pydantic import (
    ConfigDict,
    Field,
    FieldSerializationInfo,
    InstanceOf,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from inspect_lens.spec.engine._limits import limits_of
from inspect_lens.spec.engine._sites import RESID_POST, Site
from inspect_lens.spec.values._arrays import as_tensor_data
from inspect_lens.spec.values._dump import WireModel, is_wire
from inspect_lens.spec.values._strict import Flag, Integer, Number
from inspect_lens.spec.values._tensor import TensorData, encode_tensor, freeze_tensor

from ._instruction import Instruction, Kind, Row

__all__ = ["TENSOR_REFERENCE", "Gate", "tensor_reference"]

TENSOR_REFERENCE = "tensor/1"
"""`$lens` of the short form in which a tensor of an edit stands in logs."""


class Gate(WireModel):
    """A probe on the same token that an edit is multiplied with.

    The factor is `sigmoid(sharpness * (<s, direction> - threshold))`, or with `sharpness=None` 1
    above the threshold and else 0. It is read where the gate says, at or before the edit.

    Source:
        Conditional activation steering, arXiv:2409.05907 (`cosine=True` is its similarity).

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import Ablate, Gate

        lies = np.random.default_rng(0).standard_normal(256)
        gate = Gate(direction=lies, layer=3, threshold=1.5)
        edit = Ablate(direction=lies, layers=[4, 5], when=gate)
        assert edit.when.layer == 3
        ```
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    direction: InstanceOf[TensorData]
    """(width,); what the stream is multiplied with."""
    layer: Integer
    """Layer at which the stream is read, 0-based."""
    site: Site = RESID_POST
    """Site at which it is read."""
    threshold: Number = Field(default=0.0, allow_inf_nan=False)
    """Above it the edit acts."""
    sharpness: Number | None = Field(default=None, allow_inf_nan=False, gt=0)
    """Steepness of the sigmoid; None is a step."""
    cosine: Flag = False
    """Whether the product is divided by the norm of the stream; the direction is then taken as
    a unit vector."""

    @field_validator("direction", mode="before")
    @classmethod
    def _direction(cls, value: Any, info: ValidationInfo) -> TensorData:
        limits = limits_of(info)
        judge = None if limits is None else limits.judge_edit
        return freeze_tensor(as_tensor_data(value, field="when.direction", judge=judge))

    @model_validator(mode="after")
    def _check(self) -> Self:
        values = self.direction.to_float32()
        if values.ndim != 1 or not values.size:
            raise ValueError(
                f"direction has shape {values.shape}; a gate reads one (width,) vector"
            )
        if not np.isfinite(values).all() or not values.any():
            raise ValueError("direction holds NaN or infinity, or nothing but zeros")
        return self

    @field_serializer("direction")
    def _dump_direction(self, value: TensorData, info: FieldSerializationInfo) -> dict[str, Any]:
        return encode_tensor(value) if is_wire(info) else tensor_reference(value)

    def instruction(self, register: int) -> Instruction:
        """What computes the gate.

        Args:
            register: it goes to.

        Returns:
            The instruction, for the tap at `layer`.
        """
        read: Row = self.direction.to_float32()
        if self.cosine:
            read = (read / np.linalg.norm(read.astype(np.float64))).astype(np.float32)
        steep = math.inf if self.sharpness is None else self.sharpness
        kind = Kind.COSINE_GATE if self.cosine else Kind.GATE
        return Instruction(kind, read, None, (steep, self.threshold, 0.0, 0.0), True, register)

    @property
    def content(self) -> tuple[object, ...]:
        """What makes two gates the same."""
        tensor = self.direction.sha256
        return tensor, self.layer, self.site, self.threshold, self.sharpness, self.cosine


def tensor_reference(tensor: TensorData) -> dict[str, Any]:
    """The short form for logs of a tensor, which its hash stands for.

    Args:
        tensor: the tensor.

    Returns:
        Its hash, shape and dtype, and where its values lie beside the log.
    """
    return {
        "$lens": TENSOR_REFERENCE,
        "sha256": tensor.sha256,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "uri": f"lens-vectors/{tensor.sha256[:16]}.safetensors",
    }
