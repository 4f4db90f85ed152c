"""The one type for any edit, told apart by `op`, and how a user's list is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeAlias

from pydantic import Field, ValidationError

from inspect_lens.errors import SpecError
from inspect_lens.spec.engine._limits import TensorLimits
from inspect_lens.spec.values._strict import explain, shown

from ._base import EditBase
from ._directions import Ablate, Add, Clamp, Scale, Set
from ._latent import Latent
from ._latents import Latents, Reconstruct
from ._rows import Renormalise, Replace, Zero
from ._subspaces import Insert, LowRank, ProjectOut, Rotate, Swap

__all__ = ["EDITS", "Edit", "parse_edits"]

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
