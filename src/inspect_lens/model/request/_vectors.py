"""Steering vectors beside the log, by content: written once, found again from a reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

from inspect_lens._intake import Payload, encode_file, join, read_vector, write_file
from inspect_lens.errors import ArtifactError
from inspect_lens.model.stored._places import Place, find
from inspect_lens.spec import (
    STEERING_REFERENCE,
    TENSOR_REFERENCE,
    LensRequest,
    SteeringVector,
    TensorData,
)
from inspect_lens.vector import steering_vector

__all__ = ["is_reference", "resolve_references", "resolve_vector", "save_vectors"]

_live: WeakValueDictionary[str, TensorData] = WeakValueDictionary()
_saved: set[tuple[str, str]] = set()


def save_vectors(request: LensRequest, place: Place | None) -> None:
    """Write the tensors that the log will refer to, those that are not written yet.

    Args:
        request: whose vectors and edits have them.
        place: where files of this call go; None writes nothing.

    Raises:
        CaptureError: a file could not be written.
    """
    edited = [tensor for edit in request.edits for tensor in edit.all_tensors]
    for tensor in (*(vector.activations for vector in request.steer), *edited):
        _live[tensor.sha256] = tensor
        if place is not None and (place.root, tensor.sha256) not in _saved:
            payload = Payload(tensors={"activations": tensor}, layers={})
            uri = f"lens-vectors/{tensor.sha256[:16]}.safetensors"
            write_file(join(place.root, uri), encode_file(payload))
            _saved.add((place.root, tensor.sha256))


def is_reference(value: object) -> bool:
    """Whether this is a steering vector as a log holds it."""
    return isinstance(value, Mapping) and value.get("$lens") == STEERING_REFERENCE


def resolve_vector(reference: Mapping[str, Any]) -> SteeringVector:
    """Get the vector behind the reference that stands in a log.

    Args:
        reference: the mapping with `"$lens": "steering/1"`.

    Returns:
        The vector, tensor included.

    Raises:
        ArtifactError: the tensor is neither in this process nor in a file that can be found.
    """
    names = ("layer_indices", "site", "scale", "norm_match", "position_indices", "phase")
    fields = {name: reference[name] for name in names if reference.get(name) is not None}
    return SteeringVector(activations=_tensor(reference), **fields)


def _tensor(reference: Mapping[str, Any]) -> TensorData:
    try:
        digest, uri = str(reference["sha256"]), str(reference["uri"])
    except KeyError as error:
        raise ArtifactError(f"steering reference without {error}; it came from a log?") from None
    tensor = _live.get(digest)
    if tensor is None:
        where, data = find(uri, None)
        tensor = read_vector(data, where=where)
        if tensor.sha256 != digest:
            raise ArtifactError(
                f"{where}: holds another vector (sha256 {tensor.sha256[:12]}…, the log refers to "
                f"{digest[:12]}…); restore the file that was written with this log"
            )
    return tensor


def resolve_references(value: Any) -> Any:
    """Replace every steering reference and named vector inside lists and mappings."""
    if is_reference(value):
        return resolve_vector(value)
    if isinstance(value, Mapping) and value.get("$lens") == TENSOR_REFERENCE:
        return _tensor(value)
    if isinstance(value, Mapping) and "vector" in value and "op" not in value:
        return steering_vector(value)
    if isinstance(value, Mapping):
        return {key: resolve_references(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [resolve_references(item) for item in value]
    return value
