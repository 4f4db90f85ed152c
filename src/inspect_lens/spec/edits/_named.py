"""Edits that a server knows by name, so that they need not travel with each request."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

from inspect_lens.spec.asks._patterns import check_patterns
from inspect_lens.spec.asks._token_match import TokenMatch
from inspect_lens.spec.engine._limits import limits_of
from inspect_lens.spec.values._dump import WireModel
from inspect_lens.spec.values._names import check_name

from ._union import Edit, parse_edits

__all__ = ["EditsUse", "EngineEdits"]


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
