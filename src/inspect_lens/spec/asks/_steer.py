"""Steering vectors: what is added to the residual stream, where, and how strongly."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final, Self, cast

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    InstanceOf,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_serializer,
    model_validator,
)

from inspect_lens.errors import SpecError
from inspect_lens.spec.engine._facts import RESID_POST, Site
from inspect_lens.spec.engine._limits import vector_judge
from inspect_lens.spec.values._strict import Flag, Number, check_name, integers, shown
from inspect_lens.spec.values._tensor import (
    TensorData,
    WireModel,
    as_tensor_data,
    encode_tensor,
    freeze_tensor,
    is_wire,
)

from ._positions import Phase

__all__ = ["LARGEST_NORM", "STEERING_REFERENCE", "SteeringVector", "VectorUse", "check_scales"]

STEERING_REFERENCE = "steering/1"
"""`$lens` of the short form in which a vector stands in logs."""

LARGEST_NORM: Final[dict[str, float]] = {
    "float32": 2.0**63,
    "bfloat16": 2.0**63,
    "float16": 2.0**15,
}
"""By dtype of the residual stream: the norm up to which a steered stream is written.

Models sum the squares of a row in float32, which must not overflow. float16 itself ends at 65504,
and later layers add to the row."""


def parse_steered(value: Any) -> Any:
    """Positions to steer: one or several integers."""
    if isinstance(value, list | tuple) and any(isinstance(item, bool) for item in value):
        raise ValueError(
            "holds booleans, and a mask is read in capture.positions only; give the positions "
            "themselves, as in [0, 2]"
        )
    return integers(value)


class SteeringVector(WireModel):
    """A vector added to the residual stream after chosen decoder blocks, or at another site.

    Without `norm_match` the stream `h` becomes `h + scale * v`; with it,
    `h + scale * ||h|| * v / ||v||`, where `||h||` is the norm of the whole residual stream
    (or what the site holds) of that token before any edit of the request there.

    Several vectors of one request at one layer add up; each norm-matched one measures the
    same unedited stream, so their order does not matter.

    `vector.model_dump()` and `model_dump_json()` are the wire form, tensor included. Where a
    vector is dumped as part of something else (Inspect's logs and cache keys), it dumps as
    `reference()`: a few hundred bytes that name the content by its hash.

    Source:
        The fields are those of vllm-lens 1.3.0; norm matching is arXiv:2512.15674.

    Example:
        ```python
        import numpy as np

        from inspect_lens import SteeringVector

        vector = SteeringVector(
            activations=np.random.default_rng(0).standard_normal((2, 256)),  # (layers, hidden)
            layer_indices=[3, 4],
            scale=4.0,
            phase="decode",
        )
        assert vector.layer_indices == (3, 4)
        # extra_args={"apply_steering_vectors": [vector]}
        ```
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    activations: InstanceOf[TensorData]
    """(layers, hidden): one vector per layer, or (layers, positions, hidden): one per layer
    and position. Give a torch tensor, a numpy array, lists, or the JSON tensor form."""

    layer_indices: tuple[int, ...]
    """Layer of each row of `activations`, 0-based."""

    scale: Number = 1.0
    """Factor on the vector."""

    norm_match: Flag = False
    """Scale each vector to the norm of the residual stream of the token it is added to."""

    site: Site = RESID_POST
    """Where in those layers: the stream before (`resid_pre`) or after the block (`resid_post`),
    or what its attention (`attn_out`) or feed-forward (`mlp_out`) module returns."""

    position_indices: tuple[int, ...] | None = None
    """Absolute positions to steer; negative ones count from the end of the prompt. None
    means every token, prompt and completion, for (layers, hidden), and positions 0, 1, … for
    (layers, positions, hidden)."""

    phase: Phase = "both"
    """Steer only those of the positions that are `prefill` (prompt tokens) or `decode` (sampled
    tokens that are fed back)."""

    @field_validator("activations", mode="before")
    @classmethod
    def _activations(cls, value: Any, info: ValidationInfo) -> TensorData:
        return freeze_tensor(as_tensor_data(value, judge=vector_judge(info)))

    @field_validator("layer_indices", mode="before")
    @classmethod
    def _layers(cls, value: Any) -> Any:
        return integers(value)

    @field_validator("position_indices", mode="before")
    @classmethod
    def _positions(cls, value: Any) -> Any:
        return parse_steered(value)

    @field_serializer("activations")
    def _dump_activations(self, value: TensorData) -> dict[str, Any]:
        return encode_tensor(value)

    @model_serializer(mode="wrap")
    def _dump(
        self, handler: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        if not is_wire(info):
            return self.reference()
        form: dict[str, Any] = handler(self)
        if self.site == RESID_POST:
            # The only site of vllm-lens, whose vectors have no such field.
            form.pop("site", None)
        if self.phase == "both":
            form.pop("phase", None)
        return form

    def reference(self) -> dict[str, Any]:
        """The short form for logs: everything but the tensor, which its hash stands for."""
        digest = self.activations.sha256
        elsewhere: dict[str, str] = {} if self.site == RESID_POST else {"site": self.site}
        if self.phase != "both":
            elsewhere["phase"] = self.phase
        return {
            "$lens": STEERING_REFERENCE,
            "sha256": digest,
            "shape": list(self.activations.shape),
            "dtype": self.activations.dtype,
            "layer_indices": list(self.layer_indices),
            **elsewhere,
            "scale": self.scale,
            "norm_match": self.norm_match,
            "position_indices": self.position_indices and list(self.position_indices),
            "uri": f"lens-vectors/{digest[:16]}.safetensors",
        }

    @cached_property
    def added_norms(self) -> list[Any]:
        """Norm of what is added at each layer, or the factor on that of the stream.

        (layers,) or (layers, positions), as lists.
        """
        if self.norm_match:
            shape = self.activations.shape[:-1]
            return cast("list[Any]", np.full(shape, abs(self.scale)).tolist())
        values = self.activations.to_float32()
        squares = np.einsum("...i,...i->...", values, values, dtype=np.float64)
        return cast("list[Any]", (abs(self.scale) * np.sqrt(squares)).tolist())

    @model_validator(mode="after")
    def _check(self) -> Self:
        shape = self.activations.shape
        if len(shape) not in (2, 3) or 0 in shape:
            raise ValueError(
                f"activations has shape {shape}; allowed are (layers, hidden) and "
                "(layers, positions, hidden), none of them 0"
            )
        if shape[0] != len(self.layer_indices):
            raise ValueError(
                f"activations has {shape[0]} layers and layer_indices names "
                f"{len(self.layer_indices)}; give one row per layer"
            )
        if len(set(self.layer_indices)) != len(self.layer_indices):
            raise ValueError(f"layer_indices {shown(self.layer_indices)} names a layer twice")
        if not math.isfinite(self.scale):
            raise ValueError(f"scale is {self.scale}; it has to be finite")
        for values in self.activations.blocks():
            if not np.isfinite(values).all():
                raise ValueError("activations holds NaN or infinity; every value has to be finite")
            with np.errstate(over="ignore", invalid="ignore"):
                scaled = np.float32(self.scale) * values
            if not np.isfinite(scaled).all():
                raise ValueError(f"scale {self.scale} times activations overflows float32")
            if self.norm_match and not values.any(axis=-1).all():
                raise ValueError(
                    "norm_match needs a direction, and a vector of activations is zero"
                )
        self._check_positions(shape)
        return self

    def _check_positions(self, shape: tuple[int, ...]) -> None:
        positions = self.position_indices
        if positions is None:
            return
        if not positions or len(set(positions)) != len(positions):
            raise ValueError(
                f"position_indices {shown(positions)} is empty or names a position twice; "
                "leave it out to steer every token"
            )
        if len(shape) == 3 and len(positions) != shape[1]:
            raise ValueError(
                f"activations has {shape[1]} positions and position_indices names "
                f"{len(positions)}; give one vector per position"
            )


def check_scales(steer: Sequence[SteeringVector], dtype: str) -> None:
    """Judge how far the vectors of one request may move the stream of one token.

    What overflows the dtype of the stream would be NaN in the layers behind, and in key-value
    blocks that others use after it. So at each layer and site the norms of what is added to one
    token may sum up to `LARGEST_NORM`, and the scales with `norm_match` to its square root.
    """
    largest = LARGEST_NORM.get(dtype, LARGEST_NORM["float32"])
    for is_relative, most in ((False, largest), (True, math.sqrt(largest))):
        vectors = [v for v in steer if v.norm_match == is_relative]
        # All at one token: mostly that is little, and nothing more is to be looked at.
        if sum(float(np.max(v.added_norms)) for v in vectors) <= most:
            continue
        for site, layer in sorted({(v.site, n) for v in vectors for n in v.layer_indices}):
            here = [v for v in vectors if v.site == site and layer in v.layer_indices]
            if (found := max(_norm_at_one_token(here, layer, p) for p in _PHASES)) > most:
                what = "norm-matched scales" if is_relative else "norms of scale * activations"
                raise SpecError(
                    f"steer: the {what} that act on one token at {site} of layer {layer} sum up to "
                    f"{found:.4g}; with a stream in {dtype} they may sum up to {most:.4g}; lower "
                    "the scale"
                )


_PHASES: Final[tuple[Phase, ...]] = ("prefill", "decode")


def _norm_at_one_token(vectors: Sequence[SteeringVector], layer: int, phase: Phase) -> float:
    """The most that vectors of one site add up to at a layer, at any token of a phase."""
    every = 0.0
    named: defaultdict[int, float] = defaultdict(float)
    for vector in vectors:
        if vector.phase not in ("both", phase):
            continue
        norms = np.asarray(vector.added_norms[vector.layer_indices.index(layer)])
        positions = vector.position_indices
        if positions is None and norms.ndim:
            positions = tuple(range(len(norms)))
        if positions is None:
            every += float(norms)
        else:
            for p, norm in zip(positions, np.broadcast_to(norms, len(positions)), strict=True):
                named[p] += float(norm)
    # A position that counts from the end may be any of the others.
    front = max((n for p, n in named.items() if p >= 0), default=0.0)
    return every + front + max((n for p, n in named.items() if p < 0), default=0.0)


class VectorUse(BaseModel):
    """How one request uses a registered steering vector."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Name under which the vector was registered."""
    scale: Number | None = Field(default=None, allow_inf_nan=False)
    """Instead of the vector's own."""
    norm_match: Flag | None = None
    """Instead of the vector's own."""
    position_indices: tuple[int, ...] | None = None
    """Instead of the vector's own; negative ones count from the end of the prompt."""
    phase: Phase | None = None
    """Instead of the vector's own."""

    @field_validator("name", mode="before")
    @classmethod
    def _name(cls, value: Any) -> str:
        return check_name(value)

    @field_validator("position_indices", mode="before")
    @classmethod
    def _positions(cls, value: Any) -> Any:
        return parse_steered(value)

    def apply(self, vector: SteeringVector) -> SteeringVector:
        """The registered vector as this request wants it.

        Args:
            vector: what stands under the name.

        Returns:
            The vector; itself where nothing is changed.

        Raises:
            ValueError: the change does not fit the vector.
        """
        changes = {k: v for k, v in self.model_dump(exclude={"name"}).items() if v is not None}
        if not changes:
            return vector
        fields = {name: getattr(vector, name) for name in type(vector).model_fields}
        return SteeringVector(**(fields | changes))
