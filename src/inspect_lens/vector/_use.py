"""The spellings of one steering vector in a config: name, path, object or mapping."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from inspect_lens.errors import SpecError
from inspect_lens.spec import Add

from ._load import load_vector
from ._vector import Vector

__all__ = ["VectorLike", "steering_vector"]

VectorLike: TypeAlias = str | Path | Vector
"""Name below `vectors/`, path, `hf://` address, or the vector itself."""

_OPTIONS = ("layer", "scale", "norm_match", "positions")


def steering_vector(value: VectorLike | Add | Mapping[str, Any]) -> Add:
    """Read a steering vector as Python, JSON or the command line spells it.

    Args:
        value: a vector or its name, which steers with scale 1 at the layer of its card; a
            mapping `{"vector": name, "layer": …, "scale": …, "norm_match": …, "positions": …}`,
            all but the first optional; or a `SteeringVector`, which is returned.

    Returns:
        The steering vector.

    Raises:
        ArtifactError: no such vector.
        SpecError: an unknown key or a wrong value.

    Example:
        ```python
        from inspect_lens.vector import steering_vector

        vector = steering_vector({"vector": "organism/truth", "layer": 3, "scale": -0.4})
        assert vector.layers == (3,)
        assert vector.scale < 0
        ```
    """
    if isinstance(value, Add):
        return value
    if not isinstance(value, Mapping):
        return load_vector(value).to_steering()
    unknown = sorted(set(value) - {"vector", *_OPTIONS})
    if unknown or "vector" not in value:
        raise SpecError(
            f"steer={dict(value)!r}: unknown keys {unknown}; allowed are vector (needed) and "
            f"{', '.join(_OPTIONS)}"
        )
    options = {key: value[key] for key in _OPTIONS if value.get(key) is not None}
    return load_vector(value["vector"]).to_steering(**options)
