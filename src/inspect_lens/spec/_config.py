"""Configurations: edits and probes under one name, and those of all requests of a server."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from inspect_lens.errors import did_you_mean

from ._edit_list import Edit, EditsUse, parse_edits
from ._engine import limits_of
from ._positions import TokenMatch, check_patterns
from ._probe import ProbeUse
from ._splice import Splice
from ._tensor import WireModel
from ._values import FIELDS_INSTEAD, Flag, shown

__all__ = ["EngineConfig", "RequestPart", "ServerConfig"]


class RequestPart(WireModel):
    """Edits and probes, as a request and a configuration both have them."""

    what: ClassVar[str] = "a configuration"

    edits: tuple[Edit, ...] = ()
    """Edits of the stream, in this order: `Add`, which is a steering vector, and others."""

    edits_named: tuple[EditsUse, ...] = ()
    """Registered edits and vectors, which act before those of `edits`; names will do."""

    probes: tuple[ProbeUse, ...] = ()
    """Registered probes to apply to each token inside the engine; names will do."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            for key in value:
                if key not in cls.model_fields:
                    instead = FIELDS_INSTEAD.get(key)
                    way = did_you_mean(str(key)[:64], cls.model_fields)
                    if instead in cls.model_fields:
                        way = f"{instead!r} says the same here"
                    raise ValueError(f"{shown(key)} is no field of {cls.what}; {way}")
        return value

    @field_validator("edits_named", "probes", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        if isinstance(value, str | Mapping | ProbeUse | EditsUse):
            value = [value]
        if isinstance(value, list | tuple):
            return tuple({"name": v} if isinstance(v, str) else v for v in value)
        return value

    @field_validator("edits", mode="before")
    @classmethod
    def _edits(cls, value: Any, info: ValidationInfo) -> Any:
        return parse_edits(value, limits=limits_of(info))

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the tensors that it brings."""
        return sum(tensor.nbytes for edit in self.edits for tensor in edit.all_tensors)

    @model_validator(mode="after")
    def _check_probes(self) -> Self:
        names = [use.name for use in self.probes]
        if len(set(names)) != len(names):
            raise ValueError(f"probes: a name stands twice in {shown(names)}")
        return self

    @model_validator(mode="after")
    def _check_patterns(self) -> Self:
        found = list(self._all_positions())
        check_patterns(one.pattern for one in found if isinstance(one, TokenMatch))
        return self

    def _all_positions(self) -> Iterator[object]:
        for edit in self.edits:
            yield edit.positions


class EngineConfig(RequestPart):
    """Edits and probes to register under one name, which requests choose with `configs`.

    A server lists each as a model of its own, `model@name`, so that a client which knows nothing of
    the lens chooses it with `model=`.

    Example:
        ```python
        from inspect_lens.spec import EngineConfig

        config = EngineConfig(edits_named=[{"name": "honesty", "scale": 2.0}], probes=["deception"])
        assert config.names == {"honesty", "deception"}
        ```
    """

    @model_validator(mode="after")
    def _check_any(self) -> Self:
        if not (self.edits or self.edits_named or self.probes):
            raise ValueError("it has no edits and no probes; give one of them")
        return self

    @property
    def names(self) -> set[str]:
        """What it refers to by name."""
        spliced = {edit.sae for edit in self.edits if isinstance(edit, Splice)}
        used = {use.name for use in self.edits_named} | {use.name for use in self.probes}
        return spliced | used

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return self.tensor_bytes

    @cached_property
    def sha256(self) -> str:
        """Of all that it says; what it names is in it by name, and in receipts with its content."""
        form = {
            "edits": [edit.reference() for edit in self.edits],
            "edits_named": [use.model_dump(mode="json") for use in self.edits_named],
            "probes": [use.model_dump(mode="json") for use in self.probes],
        }
        return hashlib.sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()

    def reference(self) -> dict[str, Any]:
        """The short form for logs: what it is, without the tensors."""
        return {
            "kind": "config",
            "sha256": self.sha256,
            "ops": [edit.op for edit in self.edits],
            "edits_named": [use.name for use in self.edits_named],
            "probes": [use.name for use in self.probes],
        }


class ServerConfig(EngineConfig):
    """What acts on every request of a server, before what the request itself asks for.

    Example:
        ```python
        from inspect_lens.spec import ServerConfig

        config = ServerConfig(probes=[{"name": "deception", "alarm": "flag"}], may_opt_out=True)
        assert config.reference()["may_opt_out"]
        ```
    """

    may_opt_out: Flag = Field(default=False)
    """Whether a request may leave it out, with `{"inspect_lens": {"server": false}}`."""

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        if found := [use.name for use in self.probes if use.tokens]:
            raise ValueError(
                f"probes: tokens=true of {shown(found)}: streams carry token scores, and clients "
                "did not ask for those of the server's probes; leave tokens out, and let a request "
                "that wants them ask for the probe itself"
            )
        return self

    def reference(self) -> dict[str, Any]:
        """The short form for logs: what it is, without the tensors."""
        return super().reference() | {"kind": "server", "may_opt_out": self.may_opt_out}
