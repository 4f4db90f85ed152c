"""The one type for any edit, told apart by `op`, and how a user's list is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from inspect_lens.errors import SpecError
from inspect_lens.spec.asks._patterns import check_patterns
from inspect_lens.spec.asks._positions import TokenMatch
from inspect_lens.spec.engine._limits import TensorLimits, limits_of
from inspect_lens.spec.values._strict import check_name, explain, shown
from inspect_lens.spec.values._tensor import WireModel

from ._base import EditBase
from ._directions import Ablate, Add, Clamp, Scale, Set
from ._latents import Latent, Latents, Reconstruct
from ._subspaces import Insert, LowRank, ProjectOut, Renormalise, Replace, Rotate, Swap, Zero

__all__ = [
    "EDITS",
    "Edit",
    "EditsUse",
    "EngineEdits",
    "parse_edits",
]

Edit: TypeAlias = Annotated[
    Add
    | Ablate
    | Clamp
    | Set
    | Scale
    | ProjectOut
    | Rotate
    | Insert
    | Swap
    | LowRank
    | Latent
    | Latents
    | Reconstruct
    | Replace
    | Zero
    | Renormalise,
    Field(discriminator="op"),
]
"""Any of the edits, such as `Ablate` or `Add`."""

EDITS: dict[str, type[EditBase]] = {
    kind.model_fields["op"].default: kind
    for kind in (
        Add, Ablate, Clamp, Set, Scale, ProjectOut, Rotate, Insert, Swap, LowRank, Latent, Latents,
        Reconstruct, Replace, Zero, Renormalise,
    )
}  # fmt: skip
"""Every operation by its name."""


def parse_edits(
    value: object, *, field: str = "edits", limits: TensorLimits | None = None
) -> tuple[EditBase, ...]:
    """Read edits as a user writes them.

    Args:
        value: an edit or a list of edits, each an object or its JSON form with `op`.
        field: path of the field, for error messages.
        limits: of the engine; tensors that it has no use for are not unpacked.

    Returns:
        The edits, in order.

    Raises:
        SpecError: an operation that does not exist, or fields that do not fit it.

    Example:
        ```python
        from inspect_lens.spec import parse_edits

        (edit,) = parse_edits({"op": "ablate", "direction": [0.0, 1.0], "layers": [2]})
        assert edit.layers == (2,)
        ```
    """
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(_parse(item, f"{field}[{i}]", limits) for i, item in enumerate(items))


def _parse(item: object, field: str, limits: TensorLimits | None) -> EditBase:
    if isinstance(item, EditBase):
        return item
    op = item.get("op") if isinstance(item, Mapping) else None
    kind = EDITS.get(op) if isinstance(op, str) else None
    if kind is None:
        raise SpecError(f"{field}.op={shown(op)}; allowed are {', '.join(EDITS)}")
    try:
        return kind.model_validate(item, context=None if limits is None else limits.context)
    except ValidationError as error:
        raise SpecError(explain(error, at=field)) from None


class EngineEdits(WireModel):
    """Edits to register with an engine; requests name them.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import Ablate, EngineEdits

        edits = EngineEdits(edits=[Ablate(direction=np.ones(256), layers=range(4))])
        assert edits.reference()["layers"] == [0, 1, 2, 3]
        ```
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    edits: tuple[Edit, ...]
    """One or more, in the order in which they act."""

    @model_validator(mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        return {"edits": value} if isinstance(value, list | tuple) else value

    @field_validator("edits", mode="before")
    @classmethod
    def _edits(cls, value: Any, info: ValidationInfo) -> Any:
        made = parse_edits(value, limits=limits_of(info))
        if not made:
            raise ValueError("no edit is in it; give one or more")
        found = [edit.positions for edit in made]
        check_patterns(one.pattern for one in found if isinstance(one, TokenMatch))
        return made

    @cached_property
    def sha256(self) -> str:
        """Of all that the edits do, tensors included."""
        forms = [edit.reference() for edit in self.edits]
        return hashlib.sha256(json.dumps(forms, sort_keys=True).encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for edit in self.edits for tensor in edit.all_tensors)

    def reference(self) -> dict[str, Any]:
        """The short form for logs: what it is, without the tensors."""
        return {
            "kind": "edits",
            "sha256": self.sha256,
            "ops": [edit.op for edit in self.edits],
            "layers": sorted({layer for edit in self.edits for layer in edit.layers}),
        }


class EditsUse(BaseModel):
    """How one request uses registered edits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Name under which they were registered."""

    @field_validator("name", mode="before")
    @classmethod
    def _name(cls, value: Any) -> str:
        return check_name(value)
