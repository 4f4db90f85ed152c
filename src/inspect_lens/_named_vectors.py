"""A steering vector by name, path, or as it is: what the agents of other packages are given."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from inspect_lens.errors import SpecError
from inspect_lens.spec import Add, SteeringVector

__all__ = ["NamedVector", "as_steering"]

NamedVector = Add | Mapping[str, Any] | str
"""A vector, its JSON form, a name or path to load it from, or such a name with options, as
`{"vector": name, "layer": …, "scale": …}`."""


def as_steering(vector: NamedVector, scale: float) -> tuple[Add, ...]:
    """Make what a request takes."""
    if isinstance(vector, str) or (
        isinstance(vector, Mapping) and "vector" in vector and "op" not in vector
    ):
        # Imported by name: most who import this load no vector.
        vectors = importlib.import_module("inspect_lens.vector")
        found: Add = vectors.steering_vector(vector)
    elif isinstance(vector, Add):
        found = vector
    else:
        try:
            found = SteeringVector.model_validate(vector)
        except ValidationError as error:
            raise SpecError(f"vector: {error.errors()[0]['msg']}") from None
    return (found.model_copy(update={"scale": found.scale * scale}),)
