"""Small files beside a log that are no activations: written whole, named by their content."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from inspect_lens._intake import absolute, join, parent, write_file
from inspect_lens.errors import ArtifactError
from inspect_lens.model.scores._probe_scores import ProbeScores
from inspect_lens.model.stored._handle import Activations
from inspect_lens.model.stored._places import Place, find, know_root, place_for, place_of

__all__ = ["read_sidecar", "write_sidecar"]

_DIGITS = 16
_MOST = 1 << 30
"""Bytes of a small file."""


def write_sidecar(
    data: bytes, *, kind: str, name: str, beside: Activations | ProbeScores | None = None
) -> dict[str, Any] | None:
    """Write a file next to the log of this eval, and return the reference for the log.

    The name holds the hash of the content, so scoring a log again writes the same file again.
    """
    place = place_for(None)
    if place is None and beside is not None and beside.uri is not None:
        uri = beside.uri
        root = "" if "://" in uri or uri.startswith("/") else place_of(uri, beside.root)
        place = Place(root, parent(uri))
    if place is None:
        return None
    digest = hashlib.sha256(data).hexdigest()[:_DIGITS]
    # Beside activations without a folder, a slash before the name would be the root of the disk.
    uri = join(place.folder, f"{name}-{digest[:12]}.safetensors")
    write_file(join(place.root, uri), [data])
    know_root(place.root or parent(absolute(uri)))  # what this process wrote it may read
    return {"$lens": kind, "uri": uri, "root": place.root, "sha256": digest}


def read_sidecar(reference: Mapping[str, Any], *, kind: str) -> bytes:
    """Read the file that a reference in a log names."""
    uri = reference.get("uri")
    if reference.get("$lens") != kind or not isinstance(uri, str):
        raise ArtifactError(
            f'not a reference to a file beside a log: {dict(reference)!r}; wanted is "$lens": '
            f'"{kind}" with uri and sha256'
        )
    where, data = find(uri, reference.get("root"), most=_MOST)
    digest = hashlib.sha256(data).hexdigest()[:_DIGITS]
    if digest != reference.get("sha256"):
        raise ArtifactError(
            f"{where}: has sha256 {digest}…, the log refers to {reference.get('sha256')}…; restore "
            "the file that was written with this log"
        )
    return data
