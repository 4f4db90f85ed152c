"""Two ways to dump a model that carries tensors: whole for the wire, short inside other things."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, SerializationInfo

__all__ = ["WireModel", "is_wire"]

_WIRE_KEY = "inspect_lens_wire"


class WireModel(BaseModel):
    """A model whose own `model_dump` is the wire form.

    Inspect dumps whatever it finds in a config into each model event and into cache keys, with
    no context of ours. A dump that we ask for sets the context, so the two can differ.
    """

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """Dump as `BaseModel.model_dump` does, tensors included."""
        return super().model_dump(**_with_wire(options))

    def model_dump_json(self, **options: Any) -> str:
        """Dump as `BaseModel.model_dump_json` does, tensors included."""
        return super().model_dump_json(**_with_wire(options))


def is_wire(info: SerializationInfo) -> bool:
    """Whether this dump was asked for by `WireModel.model_dump`."""
    return isinstance(info.context, dict) and bool(info.context.get(_WIRE_KEY))


def _with_wire(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "context": {_WIRE_KEY: True, **(options.get("context") or {})}}
