"""Edits along one direction: add, ablate, clamp, set, scale."""

from __future__ import annotations

import math
from functools import cached_property
from typing import ClassVar, Final, Literal, Self

import numpy as np
from pydantic import Field, InstanceOf, model_validator

from inspect_lens.errors import SpecError
from inspect_lens.spec.values._strict import Flag, Number
from inspect_lens.spec.values._tensor import TensorData

from ._base import EditBase, unit
from ._instruction import Instruction, Kind

__all__ = ["LARGEST_NORM", "Ablate", "Add", "Clamp", "Scale", "Set"]

LARGEST_NORM: Final[dict[str, float]] = {
    "float32": 2.0**63,
    "bfloat16": 2.0**63,
    "float16": 2.0**15,
}
"""By dtype of the stream: the norm up to which a row is written, as models sum its squares in
float32. float16 itself ends at 65504, and later layers add to the row."""


class Add(EditBase):
    """Add a vector: `h + scale * v`, or norm-matched `h + scale * |h| * v/|v|`.

    This is a steering vector; `SteeringVector` makes one with the names of vllm-lens. Several act
    in their order, and each norm-matched one measures the stream as those before it left it.

    Source:
        Activation addition, arXiv:2308.10248; norm matching arXiv:2512.15674.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import Add

        edit = Add(vector=np.ones(256), layers=[3], scale=4.0, positions="completion")
        assert edit.op == "add"
        ```
    """

    op: Literal["add"] = "add"
    vector: InstanceOf[TensorData]
    """(width,) for all layers alike, (layers, width), or (layers, positions, width) with a vector
    for each of the listed `positions`."""
    scale: Number = Field(default=1.0, allow_inf_nan=False)
    """Factor on the vector."""
    norm_match: Flag = False
    """Whether the vector is scaled to the norm of the stream of the token it is added to."""

    tensor_fields: ClassVar[dict[str, int]] = {"vector": 1}
    listed_fields: ClassVar[frozenset[str]] = frozenset({"vector"})

    @property
    def uses_norm(self) -> bool:
        """See `EditBase.uses_norm`."""
        return self.norm_match

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.norm_match:
            self.check_directions("vector")
        return self

    @cached_property
    def _norm(self) -> float:
        """The largest norm of its vectors."""
        norms = (np.linalg.norm(v.astype(np.float64), axis=-1).max() for v in self.vector.blocks())
        return float(max(norms))

    def check_strength(self, dtype: str, field: str) -> None:
        """Refuse a vector that would overflow the stream.

        Args:
            dtype: of the stream, such as `bfloat16`.
            field: path of the edit in the request, for the message.

        Raises:
            SpecError: the vector is too long.
        """
        most = LARGEST_NORM.get(dtype, LARGEST_NORM["float32"])
        most = math.sqrt(most) if self.norm_match else most
        found = abs(self.scale) * (1.0 if self.norm_match else self._norm)
        if found > most:
            what = "scale with norm_match" if self.norm_match else "norm of scale * vector"
            raise SpecError(
                f"{field}: the {what} is {found:.4g}; with a stream in {dtype} it may be "
                f"{most:.4g}; lower the scale"
            )

    def _program(self, index: int, listed: int | None) -> tuple[Instruction, ...]:
        row = self.at("vector", index, listed)
        if self.norm_match:
            return (Instruction(Kind.NORM, None, unit(row), (self.scale, 0.0, 0.0, 0.0)),)
        return (Instruction(Kind.LINEAR, None, row, (0.0, self.scale, 0.0, 0.0)),)


class Ablate(EditBase):
    """Remove a direction: `h - strength * <h, v> * v` with `v` of norm 1.

    Source:
        Directional ablation, arXiv:2406.11717.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import Ablate

        refusal = np.random.default_rng(0).standard_normal(256)
        edit = Ablate(direction=refusal, layers=range(8))
        assert edit.layers == (0, 1, 2, 3, 4, 5, 6, 7)
        ```
    """

    op: Literal["ablate"] = "ablate"
    direction: InstanceOf[TensorData]
    """(width,); of any norm but 0."""
    strength: Number = Field(default=1.0, allow_inf_nan=False)
    """Share of the projection that is removed; 1 removes it, 2 mirrors it."""

    tensor_fields: ClassVar[dict[str, int]] = {"direction": 1}

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.check_directions("direction")
        return self

    def _program(self, index: int, listed: int | None) -> tuple[Instruction, ...]:
        v = unit(self.at("direction", index))
        return (Instruction(Kind.LINEAR, v, v, (-self.strength, 0.0, 0.0, 0.0)),)


class Clamp(EditBase):
    """Keep the projection on a direction within bounds: `x` becomes `min(max(x, min), max)`.

    `x` is `<h, v>` with `v` of norm 1. `value` is short for equal bounds.

    Source:
        Activation capping, as in arXiv:2601.10387.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import Clamp

        edit = Clamp(direction=np.ones(256), layers=[3], max=2.5)
        assert (edit.min, edit.max) == (None, 2.5)
        ```
    """

    op: Literal["clamp"] = "clamp"
    direction: InstanceOf[TensorData]
    """(width,); of any norm but 0."""
    min: Number | None = Field(default=None, allow_inf_nan=False)
    """Smallest projection; None for no bound."""
    max: Number | None = Field(default=None, allow_inf_nan=False)
    """Largest projection; None for no bound."""
    value: Number | None = Field(default=None, allow_inf_nan=False)
    """Both bounds in one."""
    strength: Number = Field(default=1.0, allow_inf_nan=False)
    """Share of the way to the bound."""

    tensor_fields: ClassVar[dict[str, int]] = {"direction": 1}

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.check_directions("direction")
        if (self.value is None) == (self.min is None and self.max is None):
            raise ValueError("give min, max or both; or value alone")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is larger than max {self.max}")
        return self

    def _program(self, index: int, listed: int | None) -> tuple[Instruction, ...]:
        v = unit(self.at("direction", index))
        low = self.min if self.value is None else self.value
        high = self.max if self.value is None else self.value
        bounds = (-math.inf if low is None else low, math.inf if high is None else high)
        return (Instruction(Kind.CLIP, v, v, (self.strength, *bounds, 0.0)),)


class Set(EditBase):
    """Set the projection on a direction: `h + strength * (value - <h, v>) * v`, `v` of norm 1.

    Source:
        `adjust_rs` of IBM's vLLM-Hook, whose `avg_proj` is `value`.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import Set

        assert Set(direction=np.ones(256), layers=[3], value=1.0).strength == 1.0
        ```
    """

    op: Literal["set"] = "set"
    direction: InstanceOf[TensorData]
    """(width,); of any norm but 0."""
    value: Number = Field(allow_inf_nan=False)
    """The projection afterwards."""
    strength: Number = Field(default=1.0, allow_inf_nan=False)
    """Share of the way to it."""

    tensor_fields: ClassVar[dict[str, int]] = {"direction": 1}

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.check_directions("direction")
        return self

    def _program(self, index: int, listed: int | None) -> tuple[Instruction, ...]:
        v = unit(self.at("direction", index))
        params = (-self.strength, self.strength * self.value, 0.0, 0.0)
        return (Instruction(Kind.LINEAR, v, v, params),)


class Scale(EditBase):
    """Scale the part along a direction: `h + (factor - 1) * <h, v> * v`, `v` of norm 1.

    Without a direction the whole row is scaled, or what `heads`, `neurons` or `experts` name of it.

    Source:
        `scale` of TransformerLens' hooks on vLLM.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import Scale

        assert Scale(direction=np.ones(256), layers=[3], factor=0.5).op == "scale"
        weaker = Scale(factor=0.5, layers=[3], site="z", heads=[2])
        assert weaker.direction is None
        ```
    """

    op: Literal["scale"] = "scale"
    direction: InstanceOf[TensorData] | None = None
    """(width,); of any norm but 0. None scales all numbers."""
    factor: Number = Field(allow_inf_nan=False)
    """0 removes the part along the direction, 1 changes nothing."""

    tensor_fields: ClassVar[dict[str, int]] = {"direction": 1}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.direction is not None:
            self.check_directions("direction")
        return self

    def _program(self, index: int, listed: int | None) -> tuple[Instruction, ...]:
        if self.direction is None:
            return (Instruction(Kind.BLEND, None, None, (1.0 - self.factor, 0.0, 0.0, 0.0)),)
        v = unit(self.at("direction", index))
        return (Instruction(Kind.LINEAR, v, v, (self.factor - 1.0, 0.0, 0.0, 0.0)),)
