"""The file of an `ActivationSet`: one safetensors, with all that is no array in its metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from inspect_lens._untrusted import parse_json
from inspect_lens.spec import parse_positions

__all__ = ["decode_set", "encode_set"]

_FORMAT: Final = "inspect_lens.activations/1"
_KEY: Final = "inspect_lens"


def encode_set(fields: Mapping[str, Any], *, origin: bool = True) -> bytes:
    """Content of the file.

    Args:
        fields: of the set, by name, as `decode_set` returns them; not empty.
        origin: with the positions and the hash of the weights. Without them, equal values give
            the bytes of releases that did not know these.

    Returns:
        The bytes; equal sets give equal ones.
    """
    facts: dict[str, Any] = {
        "format": _FORMAT,
        "name": fields["name"],
        "model": fields["model"],
        "layers": fields["layers"],
        "groups": fields["groups"],
        "ids": fields["ids"],
        "columns": dict(fields["columns"]),
    }
    tensors = {
        "acts": np.ascontiguousarray(np.concatenate(fields["acts"], axis=1)),
        "lengths": np.array([a.shape[1] for a in fields["acts"]], dtype=np.int64),
        "labels": fields["labels"].astype(np.uint8),
        "mask": np.concatenate(fields["mask"]).astype(np.uint8),
    }
    if fields["contents"]:
        facts["contents"] = fields["contents"]
    if fields["ends"]:
        tensors["ends"] = np.concatenate(fields["ends"]).astype(np.uint8)
    if origin and fields["positions"] is not None:
        facts |= {"positions": fields["positions"], "raw": fields["raw"]}
    if origin and fields["model_sha256"] is not None:
        facts["model_sha256"] = fields["model_sha256"]
    content: bytes = save_tensors(tensors, metadata={_KEY: json.dumps(facts, sort_keys=True)})
    return content


def decode_set(content: bytes) -> dict[str, Any]:
    """Fields of an `ActivationSet`, from the content of its file.

    Args:
        content: what `encode_set` returned.

    Returns:
        The fields.

    Raises:
        SafetensorError, ValueError, KeyError, TypeError: it is something else.
    """
    tensors = load_tensors(content)
    length = int.from_bytes(content[:8], "little")
    facts: dict[str, Any] = parse_json(parse_json(content[8 : 8 + length])["__metadata__"][_KEY])
    if facts["format"] != _FORMAT:
        raise ValueError(f"format {facts['format']!r}")
    stops = np.cumsum(tensors["lengths"])[:-1]
    positions = facts.get("positions")
    return {
        "name": facts["name"],
        "model": facts["model"],
        "layers": tuple(facts["layers"]),
        "acts": tuple(np.split(tensors["acts"], stops, axis=1)),
        "labels": tensors["labels"].astype(bool),
        "groups": tuple(facts["groups"]),
        "mask": tuple(np.split(tensors["mask"].astype(bool), stops)),
        "ids": tuple(facts["ids"]),
        "columns": {k: tuple(v) for k, v in facts["columns"].items()},
        "contents": tuple(facts.get("contents", ())),
        "ends": tuple(np.split(tensors["ends"].astype(bool), stops)) if "ends" in tensors else (),
        "positions": None if positions is None else parse_positions(positions, field="positions"),
        "raw": bool(facts.get("raw", False)),
        "model_sha256": facts.get("model_sha256"),
    }
