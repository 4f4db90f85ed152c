"""Edits along directions and in spaces of a few directions."""

from __future__ import annotations

import math
from functools import cached_property
from typing import ClassVar, Final, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, model_validator

from inspect_lens.errors import SpecError

from ._edit import EditBase
from ._instruction import Instruction, Kind, Row, unit
from ._positions import Positions
from ._tensor import Tensor
from ._values import Flag, Number

__all__ = [
    "LARGEST_NORM",
    "Ablate",
    "Add",
    "Clamp",
    "Insert",
    "LowRank",
    "ProjectOut",
    "Renormalise",
    "Replace",
    "Rotate",
    "Scale",
    "Swap",
    "Zero",
]

LARGEST_NORM: Final[dict[str, float]] = {
    "float32": 2.0**63,
    "bfloat16": 2.0**63,
    "float16": 2.0**15,
}
"""By dtype of the stream: the norm up to which a row is written, as models sum its squares in
float32. float16 itself ends at 65504, and later layers add to the row."""


class Add(EditBase):
    """Add a vector: `h + scale * v`, or norm-matched `h + scale * ‖h‖ * v/‖v‖`.

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
    vector: Tensor
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
        norms = (np.linalg.norm(v.astype(np.float64), axis=-1).max() for v in self.vector.blocks())
        return float(max(norms))

    def check_strength(self, dtype: str, field: str) -> None:
        """Refuse a vector that would overflow the stream. Arguments are those of `EditBase`.

        Each vector is judged alone. Where several at one place are too long together, nothing is
        written there, and the request fails when that is found.
        """
        most = LARGEST_NORM.get(dtype, LARGEST_NORM["float32"])
        most = math.sqrt(most) if self.norm_match else most
        found = abs(self.scale) * (1.0 if self.norm_match else self._norm)
        found *= 1.0 if self.schedule is None else self.schedule.largest
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
    direction: Tensor
    """(width,); of any norm but 0."""
    strength: Number = Field(default=1.0, allow_inf_nan=False)
    """Share of the projection that is removed; 1 removes it, 2 mirrors it."""

    tensor_fields: ClassVar[dict[str, int]] = {"direction": 1}

    def _program(self, index: int, listed: int | None) -> tuple[Instruction, ...]:
        v = unit(self.at("direction", index))
        return (Instruction(Kind.LINEAR, v, v, (-self.strength, 0.0, 0.0, 0.0)),)


class Clamp(EditBase):
    """Keep the projection `<h, v>` on a direction within bounds, or set it to `value`.

    It becomes `min(max(<h, v>, min), max)` with `v` of norm 1. `value` is short for equal bounds.

    Source:
        Activation capping, as in arXiv:2601.10387; with `value`, `adjust_rs` of IBM's vLLM-Hook,
        whose `avg_proj` it is.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import Clamp

        edit = Clamp(direction=np.ones(256), layers=[3], max=2.5)
        assert (edit.min, edit.max) == (None, 2.5)
        ```
    """

    op: Literal["clamp"] = "clamp"
    direction: Tensor
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


class Scale(EditBase):
    """Scale the part along a direction: `h + (factor - 1) * <h, v> * v` with `v` of norm 1.

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
    direction: Tensor | None = None
    """(width,); of any norm but 0. None scales all numbers."""
    factor: Number = Field(allow_inf_nan=False)
    """0 removes the part along the direction, 1 changes nothing."""

    tensor_fields: ClassVar[dict[str, int]] = {"direction": 1}

    def _program(self, index: int, listed: int | None) -> tuple[Instruction, ...]:
        if self.direction is None:
            return (Instruction(Kind.BLEND, None, None, (1.0 - self.factor, 0.0, 0.0, 0.0)),)
        v = unit(self.at("direction", index))
        return (Instruction(Kind.LINEAR, v, v, (self.factor - 1.0, 0.0, 0.0, 0.0)),)


_MOST_RANK = 16


class ProjectOut(EditBase):
    """Remove a subspace: `h - B^T B h`, where the rows of `B` are an orthonormal basis.

    Source:
        Nullspace projection, arXiv:2004.07667.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import ProjectOut

        edit = ProjectOut(directions=np.eye(256)[:3], layers=[3, 4])
        assert len(edit.program(0)) == 3
        ```
    """

    op: Literal["project_out"] = "project_out"
    directions: Tensor
    """(directions, width); linearly independent, need not be orthogonal; 16 at most."""

    tensor_fields: ClassVar[dict[str, int]] = {"directions": 2}

    @model_validator(mode="after")
    def _check(self) -> Self:
        for i in range(len(self.layers)):
            _independent(self.at("directions", i), "directions")
        return self

    def _program(self, index: int, listed: int | None) -> tuple[Instruction, ...]:
        basis = _orthonormal(self.at("directions", index))
        return _pairs(basis, basis, -1.0)


class Rotate(EditBase):
    """Rotate the stream within a plane by an angle, from the first direction to the second.

    Source:
        Angular steering, arXiv:2510.26243.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import Rotate

        edit = Rotate(plane=np.eye(256)[:2], layers=[3], degrees=90)
        assert len(edit.program(0)) == 2
        ```
    """

    op: Literal["rotate"] = "rotate"
    plane: Tensor
    """(2, width); made orthonormal, beginning with the first."""
    degrees: Number = Field(allow_inf_nan=False)
    """Angle of the rotation."""

    tensor_fields: ClassVar[dict[str, int]] = {"plane": 2}

    @model_validator(mode="after")
    def _check(self) -> Self:
        for i in range(len(self.layers)):
            plane = self.at("plane", i)
            if len(plane) != 2:
                raise ValueError(f"plane has {len(plane)} directions; a plane has 2")
            _independent(plane, "plane")
        return self

    def _program(self, index: int, listed: int | None) -> tuple[Instruction, ...]:
        e = _orthonormal(self.at("plane", index)).astype(np.float64)
        cos, sin = math.cos(math.radians(self.degrees)), math.sin(math.radians(self.degrees))
        turned = np.stack([(cos - 1) * e[0] + sin * e[1], (cos - 1) * e[1] - sin * e[0]])
        return _pairs(e, turned, 1.0)


class Insert(EditBase):
    """Put one concept in the place of another: `h + strength * c * (concept - instead_of)`.

    `c` is how much of `instead_of` there is: `<h, instead_of> / |instead_of|^2`. To remove a
    concept and put nothing in its place, use `ablate`.

    Source:
        `concept_replace` of EasySteer, whose code takes the first concept for the one to remove.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import Insert

        paris, rome = np.eye(256)[:2]
        assert Insert(concept=rome, instead_of=paris, layers=[3]).strength == 1.0
        ```
    """

    op: Literal["insert"] = "insert"
    concept: Tensor
    """(width,); what comes."""
    instead_of: Tensor
    """(width,); what goes; of any norm but 0."""
    strength: Number = Field(default=1.0, allow_inf_nan=False)
    """Share that is replaced."""

    tensor_fields: ClassVar[dict[str, int]] = {"concept": 1, "instead_of": 1}
    direction_fields: ClassVar[frozenset[str]] = frozenset({"instead_of"})

    def _program(self, index: int, listed: int | None) -> tuple[Instruction, ...]:
        out = self.at("instead_of", index).astype(np.float64)
        read = out / (out @ out)
        write = self.at("concept", index).astype(np.float64) - out
        return _pairs(read[None], write[None], self.strength)


class Swap(EditBase):
    """Exchange the coordinates of two concepts, which are read in the edited run.

    With `h = c1*first + c2*second + rest` (least squares), the stream becomes
    `c2*first + c1*second + rest`. Coordinates are read in the edited run, so a second layer can
    undo what the first has done; `frozen` takes those of a clean run.

    Source:
        Swaps of the Jacobian lens (TransformerLens, 2026), with live coordinates.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import Swap

        edit = Swap(first=np.eye(256)[0], second=np.eye(256)[1], layers=[3])
        assert len(edit.program(0)) == 1
        ```
    """

    op: Literal["swap"] = "swap"
    first: Tensor
    """(width,)."""
    second: Tensor
    """(width,); not a multiple of the first."""
    strength: Number = Field(default=1.0, allow_inf_nan=False)
    """Share of the exchange; 1 exchanges, 0.5 makes both alike."""

    tensor_fields: ClassVar[dict[str, int]] = {"first": 1, "second": 1}

    @model_validator(mode="after")
    def _check(self) -> Self:
        for i in range(len(self.layers)):
            _independent(np.stack([self.at("first", i), self.at("second", i)]), "first and second")
        return self

    def frozen(self, rows: ArrayLike, *, positions: tuple[int, ...] | list[int]) -> Add:
        """An `Add` of the exchange by the coordinates of a clean run, the same in all layers.

        A row `h` of the clean run has the coordinates `c1` and `c2`, and
        `strength * (c2 - c1) * (first - second)` is added at its layer and position, whatever
        the layers before it have done. The engine needs a run before: capture the rows, and send
        the result among the `edits` of the next request. Sampled tokens of that run have no rows
        yet.

        Args:
            rows: (layers, positions, width) of the clean run, at the layers and the site of this
                edit.
            positions: of `rows`, absolute; they take the place of the edit's own.

        Raises:
            SpecError: another shape, NaN or infinity, or an edit that a vector cannot be: with a
                gate, a phase, or chosen heads, neurons or experts.

        Source:
            "Verbalizable Representations Form a Global Workspace in Language Models"
            (Anthropic 2026).
        """
        clean = np.asarray(rows, dtype=np.float64)
        shape = (len(self.layers), len(positions), self.width)
        if clean.shape != shape:
            raise SpecError(
                f"rows: shape {clean.shape}; needed is {shape}, a row of the clean run for each "
                "layer of the edit and each position"
            )
        if not np.isfinite(clean).all():
            raise SpecError("rows: hold NaN or infinity; allowed are finite numbers")
        if self.when is not None or self.schedule or self.choice or self.phase != "both":
            raise SpecError(
                "when, schedule, phase, heads, neurons, experts: a frozen swap is a vector for "
                "each position, which has none of these; leave them out"
            )
        added = np.empty_like(clean)
        for i in range(len(self.layers)):
            read, write = self._directions(i)
            added[i] = self.strength * (clean[i] @ read)[:, None] * write
        return Add(
            vector=added.astype(np.float32),
            layers=self.layers,
            positions=tuple(positions),
            site=self.site,
        )

    def _program(self, index: int, listed: int | None) -> tuple[Instruction, ...]:
        read, write = self._directions(index)
        return _pairs(read[None], write[None], self.strength)

    def _directions(self, index: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What reads `c2 - c1` of a row, and what that is multiplied with."""
        both = np.stack([self.at("first", index), self.at("second", index)]).astype(np.float64)
        coordinates = np.linalg.pinv(both.T)
        return coordinates[1] - coordinates[0], both[0] - both[1]


class LowRank(EditBase):
    """A low-rank edit: `h + scale * W^T (R h + bias)` with `R` read and `W` written.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import LowRank

        R, W = np.eye(256)[:2], np.random.default_rng(0).standard_normal((2, 256))
        edit = LowRank.loreft(R, W, [0.0, 1.0], layers=[3])
        assert edit.op == "low_rank"
        ```
    """

    op: Literal["low_rank"] = "low_rank"
    read: Tensor
    """(rank, width); 16 at most."""
    write: Tensor
    """(rank, width)."""
    bias: Tensor | None = None
    """(rank,); None for zeros."""
    scale: Number = Field(default=1.0, allow_inf_nan=False)
    """Factor on the whole edit."""

    tensor_fields: ClassVar[dict[str, int]] = {"read": 2, "write": 2, "bias": 1}

    @model_validator(mode="after")
    def _check(self) -> Self:
        rank = self.read.shape[-2]
        if self.write.shape[-2] != rank or (self.bias is not None and self.bias.shape[-1] != rank):
            raise ValueError("read, write and bias have to be of one rank")
        if rank > _MOST_RANK:
            raise ValueError(f"rank {rank}; {_MOST_RANK} at most")
        return self

    @classmethod
    def loreft(
        cls,
        rotation: ArrayLike,
        weight: ArrayLike,
        bias: ArrayLike,
        *,
        layers: tuple[int, ...] | list[int],
        positions: Positions = "all",
    ) -> Self:
        """The edit of LoReFT: `h + R^T (W h + b - R h)`.

        Args:
            rotation: (rank, width); `R`, with orthonormal rows.
            weight: (rank, width); `W`.
            bias: (rank,); `b`.
            layers: see `EditBase`.
            positions: see `EditBase`.

        Source:
            arXiv:2404.03592.
        """
        r = np.asarray(rotation, dtype=np.float32)
        read = np.asarray(weight, dtype=np.float32) - r
        return cls(read=read, write=r, bias=bias, layers=layers, positions=positions)

    @classmethod
    def lm_steer(
        cls,
        first: ArrayLike,
        second: ArrayLike,
        *,
        scale: float,
        layers: tuple[int, ...] | list[int],
        positions: Positions = "all",
    ) -> Self:
        """The edit of LM-Steer: `h + scale * (h P1) P2^T`.

        Args:
            first: (width, rank); `P1`.
            second: (width, rank); `P2`.
            scale: strength and sign.
            layers: see `EditBase`.
            positions: see `EditBase`.

        Source:
            arXiv:2305.12798.
        """
        read, write = np.asarray(first).T, np.asarray(second).T
        return cls(read=read, write=write, scale=scale, layers=layers, positions=positions)

    def _program(self, index: int, listed: int | None) -> tuple[Instruction, ...]:
        bias = None if self.bias is None else self.at("bias", index)
        return _pairs(self.at("read", index), self.at("write", index), self.scale, bias)


def _pairs(
    read: NDArray[np.floating], write: NDArray[np.floating], factor: float, bias: Row | None = None
) -> tuple[Instruction, ...]:
    """One instruction per direction, all of which read the same stream."""
    return tuple(
        Instruction(
            Kind.LINEAR,
            np.ascontiguousarray(read[i], dtype=np.float32),
            np.ascontiguousarray(write[i], dtype=np.float32),
            (factor, 0.0 if bias is None else factor * float(bias[i]), 0.0, 0.0),
            sees_edits=i == 0,
        )
        for i in range(len(read))
    )


def _independent(rows: Row, name: str) -> None:
    if len(rows) > _MOST_RANK:
        raise ValueError(f"{name} has {len(rows)} directions; {_MOST_RANK} at most")
    sizes = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    if not sizes.all() or np.linalg.matrix_rank(rows / sizes, tol=1e-5) < len(rows):
        raise ValueError(f"{name}: one of the {len(rows)} directions is zero or a sum of others")


def _orthonormal(rows: Row) -> Row:
    q, r = np.linalg.qr(rows.astype(np.float64).T)
    # The basis begins with the first direction and not with its mirror image.
    return np.asarray((q * np.sign(np.diag(r))).T.astype(np.float32))


class Replace(EditBase):
    """Put stored rows in the place of the stream: `(1 - alpha) * h + alpha * row`.

    With the rows of another run this is activation patching; with the mean over a data set, mean
    ablation. With `heads` at `z`, only the results of these heads are replaced: head patching.

    Source:
        Activation patching, arXiv:2202.05262; mean ablation, arXiv:2211.00593.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import Replace

        clean = np.zeros((2, 3, 256), dtype=np.float32)  # (layers, positions, width)
        edit = Replace(rows=clean, layers=[3, 4], positions=[5, 6, 7])
        assert edit.n_listed == 3
        ```
    """

    op: Literal["replace"] = "replace"
    rows: Tensor
    """(width,) for all tokens alike, (layers, width), or (layers, positions, width) with one row
    for each of the listed `positions`."""
    alpha: Number = Field(default=1.0, allow_inf_nan=False)
    """Share of the stored row."""

    tensor_fields: ClassVar[dict[str, int]] = {"rows": 1}

    listed_fields: ClassVar[frozenset[str]] = frozenset({"rows"})

    def _program(self, index: int, listed: int | None) -> tuple[Instruction, ...]:
        row = self.at("rows", index, listed)
        return (Instruction(Kind.BLEND, None, row, (self.alpha, 0.0, 0.0, 0.0)),)


class Zero(EditBase):
    """Put zeros in the place of the stream, or of what the site holds: zero ablation.

    Example:
        ```python
        from inspect_lens.spec import Zero

        assert Zero(layers=[3], site="mlp_out").op == "zero"
        # Two heads of one layer, and a neuron of another.
        edits = [
            Zero(layers=[3], site="z", heads=[0, 5]),
            Zero(layers=[4], site="mlp_hidden", neurons=[17]),
        ]
        assert edits[0].choice == {"heads": (0, 5)}
        ```
    """

    op: Literal["zero"] = "zero"

    def _program(self, index: int, listed: int | None) -> tuple[Instruction, ...]:
        return (Instruction(Kind.BLEND, None, None, (1.0, 0.0, 0.0, 0.0)),)


class Renormalise(EditBase):
    """Give the stream back the norm that it had before the request's edits at this place.

    It stands behind the edits whose growth it undoes.

    Source:
        repeng's optional renormalisation.

    Example:
        ```python
        from inspect_lens.spec import Renormalise

        assert Renormalise(layers=[3]).op == "renormalise"
        ```
    """

    op: Literal["renormalise"] = "renormalise"

    @property
    def uses_norm(self) -> bool:
        """See `EditBase.uses_norm`."""
        return True

    def _program(self, index: int, listed: int | None) -> tuple[Instruction, ...]:
        return (Instruction(Kind.RENORM),)
