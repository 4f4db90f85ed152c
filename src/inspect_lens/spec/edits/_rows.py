"""Edits that put stored rows in the place of the stream, and the one that restores its norm."""

from __future__ import annotations

from typing import ClassVar, Literal, Self, cast

import numpy as np
from pydantic import Field, InstanceOf, model_validator

from inspect_lens.spec.values._strict import Number
from inspect_lens.spec.values._tensor import TensorData

from ._base import EditBase
from ._instruction import Instruction, Kind, Row

__all__ = ["Renormalise", "Replace", "Zero"]


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
    rows: InstanceOf[TensorData]
    """(width,) for all tokens alike, (layers, width), or (layers, positions, width) with one row
    for each of the listed `positions`."""
    alpha: Number = Field(default=1.0, allow_inf_nan=False)
    """Share of the stored row."""

    tensor_fields: ClassVar[dict[str, int]] = {"rows": 1}

    @model_validator(mode="after")
    def _check_tensors(self) -> Self:
        shape = self.rows.shape
        if not np.isfinite(self.rows.to_float32()).all():
            raise ValueError("rows holds NaN or infinity; every value has to be finite")
        if len(shape) not in (1, 2, 3) or 0 in shape:
            raise ValueError(
                f"rows has shape {shape}; allowed are (width,), (layers, width) and "
                "(layers, positions, width)"
            )
        if len(shape) > 1 and shape[0] != len(self.layers):
            raise ValueError(f"rows has {shape[0]} layers and layers names {len(self.layers)}")
        listed = self.positions if isinstance(self.positions, tuple) and self.is_listed() else ()
        if len(shape) == 3 and shape[1] != len(listed):
            raise ValueError(
                f"rows has {shape[1]} positions; list as many numbers in positions, one for each"
            )
        if self.when is not None and self.when.layer > min(self.layers):
            raise ValueError(f"when.layer {self.when.layer} comes after layer {min(self.layers)}")
        return self

    @property
    def n_listed(self) -> int | None:
        """See `EditBase.n_listed`."""
        return self.rows.shape[1] if len(self.rows.shape) == 3 else None

    def _program(self, index: int, listed: int | None) -> tuple[Instruction, ...]:
        values = self.rows.to_float32()
        row = values if values.ndim == 1 else values[index]
        row = row if row.ndim == 1 or listed is None else row[listed]
        write = cast("Row", np.ascontiguousarray(row))
        return (Instruction(Kind.BLEND, None, write, (self.alpha, 0.0, 0.0, 0.0)),)


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
