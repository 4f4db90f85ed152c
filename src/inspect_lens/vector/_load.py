"""Finding a vector by name."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Final

from inspect_lens._base.artifact import find_artifact
from inspect_lens.errors import ArtifactError

from ._files import VECTOR
from ._vector import Vector

__all__ = ["load_vector", "register_vector_dir"]

_registered: Final[list[Path]] = []


def register_vector_dir(folder: str | Path) -> None:
    """Add a folder to look for named vectors in, before any other.

    Args:
        folder: has `<model>/<name>/` below it.

    Example:
        ```python
        from inspect_lens.vector import load_vector, register_vector_dir

        load_vector("organism/truth").save("my-vectors/mine/truth")
        register_vector_dir("my-vectors")
        assert load_vector("mine/truth").layers == (0, 1, 2, 3, 4, 5)
        ```
    """
    path = Path(folder).resolve()
    if path in _registered:
        _registered.remove(path)
    _registered.insert(0, path)


def load_vector(vector: str | Path | Vector) -> Vector:
    """Load a vector by name, by path or from the Hugging Face hub.

    Names are found below `vectors/` as those of probes below `probes/`, see
    `inspect_lens.probe.load_probe`.

    Args:
        vector: a folder, its `vector.safetensors`, a name such as `organism/truth`, an `hf://`
            address, or a vector, which is returned.

    Returns:
        The vector.

    Raises:
        ArtifactError: nothing is found, a name is ambiguous, or the files are wrong.

    Example:
        ```python
        from inspect_lens.vector import load_vector

        truth = load_vector("organism/truth")
        assert truth.default_layer() == 4
        steering = truth.to_steering(scale=0.8)  # for a request
        assert steering.layers == (4,)
        ```
    """
    if isinstance(vector, Vector):
        return vector
    if not isinstance(vector, str | Path):
        raise ArtifactError(
            f"vector={reprlib.repr(vector)}: a {type(vector).__name__}; allowed are a name, a path "
            "or a Vector; a log that shows this used a vector that was never saved: save it and "
            "pass its path. lens_config and lens_scope take a SteeringVector"
        )
    return Vector.load(find_artifact(VECTOR, vector, _registered))
