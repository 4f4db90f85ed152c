"""Any edit, told apart by `op`, and what is registered of edits and probes under one name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeAlias, Union

from pydantic import Field, ValidationInfo, field_validator, model_validator

from inspect_lens.errors import SpecError, did_you_mean

from . import _edits, _latents  # noqa: F401 - each makes its operations known
from ._edit import EDITS, EditBase
from ._edits import Add
from ._engine import TensorLimits, limits_of
from ._gate import Schedule
from ._latents import Splice
from ._positions import Phase, Positions, check_patterns, parse_positions
from ._probe import ProbeUse
from ._tensor import WireModel
from ._values import (
    FIELDS_INSTEAD,
    PEER_NAMES,
    STEER_KEY,
    Flag,
    Name,
    Number,
    Value,
    listed,
    read_as,
    several,
    shown,
)

__all__ = [
    "Edit",
    "EditsUse",
    "EngineConfig",
    "EngineEdits",
    "RequestPart",
    "ServerConfig",
    "parse_edits",
]


if not TYPE_CHECKING:
    Edit = Annotated[Union[tuple(EDITS[op] for op in sorted(EDITS))], Field(discriminator="op")]  # noqa: UP007
    """Any of the edits, such as `Ablate` or `Add`."""
else:
    Edit: TypeAlias = EditBase


def parse_edits(
    value: object, *, field: str = "edits", limits: TensorLimits | None = None
) -> tuple[EditBase, ...]:
    """Read edits as a user writes them.

    Args:
        value: an edit or a list of edits, each an object or its JSON form with `op`.
        field: path of the field, for error messages.
        limits: of the engine; tensors that it has no use for are not unpacked.

    Raises:
        SpecError: an operation that does not exist, or fields that do not fit it.

    Example:
        ```python
        from inspect_lens.spec import parse_edits

        (edit,) = parse_edits({"op": "ablate", "direction": [0.0, 1.0], "layers": [2]})
        assert edit.layers == (2,)
        ```
    """
    return tuple(_parse(item, f"{field}[{i}]", limits) for i, item in enumerate(several(value)))


def _parse(item: object, field: str, limits: TensorLimits | None) -> EditBase:
    if isinstance(item, EditBase):
        return item
    if not isinstance(item, Mapping):
        raise SpecError(f"{field}={shown(item)}; it has to be an edit, or its JSON form with op")
    op = item.get("op")
    kind = EDITS.get(op) if isinstance(op, str) else None
    if kind is None:
        asked = f"{field}.op={shown(op)}"
        if "op" not in item:
            asked = f"{field} has no op, which says what it does"
            if PEER_NAMES & set(item):
                asked = (
                    f"{field} has no op, and is spelled as vllm-lens spells a vector; that belongs "
                    f'under {STEER_KEY!r}, and here it is {{"op": "add", "vector": …, '
                    '"layers": …, "positions": …}'
                )
        raise SpecError(f"{asked}; allowed are {', '.join(sorted(EDITS))}")
    return read_as(kind, item, at=field, context=None if limits is None else limits.context)


def _spliced(edits: Iterable[EditBase]) -> set[str]:
    return {edit.sae for edit in edits if isinstance(edit, Splice)}


def _bytes_of(edits: Iterable[EditBase]) -> int:
    return sum(tensor.nbytes for edit in edits for tensor in edit.all_tensors)


def _hash_of(form: object) -> str:
    return hashlib.sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()


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

    edits: tuple[Edit, ...]
    """One or more, in the order in which they act."""

    @model_validator(mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        is_one = isinstance(value, EditBase) or (isinstance(value, Mapping) and "op" in value)
        return {"edits": value} if is_one or isinstance(value, list | tuple) else value

    @field_validator("edits", mode="before")
    @classmethod
    def _edits(cls, value: Any, info: ValidationInfo) -> Any:
        made = parse_edits(value, limits=limits_of(info))
        if not made:
            raise ValueError("no edit is in it; give one or more")
        check_patterns(edit.positions for edit in made)
        return made

    @cached_property
    def sha256(self) -> str:
        """Of all that the edits do, tensors included."""
        return _hash_of([edit.reference() for edit in self.edits])

    @property
    def names(self) -> set[str]:
        """What it refers to by name."""
        return _spliced(self.edits)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return _bytes_of(self.edits)

    def reference(self) -> dict[str, Any]:
        """The short form for logs: what it is, without the tensors."""
        form: dict[str, Any] = {
            "kind": "edits",
            "sha256": self.sha256,
            "ops": [edit.op for edit in self.edits],
            "layers": sorted({layer for edit in self.edits for layer in edit.layers}),
        }
        if len(self.edits) == 1 and isinstance(self.edits[0], Add):
            form["scale"] = self.edits[0].scale
        return form


class EditsUse(Value):
    """How one request uses registered edits; what it says takes the place of their own."""

    name: Name
    """Name under which they were registered."""
    scale: Number | None = Field(default=None, allow_inf_nan=False)
    """Factor on the vector; for edits that have one, such as `Add`."""
    norm_match: Flag | None = None
    """Whether the vector is scaled to the norm of the stream; for `Add`."""
    positions: Positions | None = None
    """Tokens they act on."""
    phase: Phase | None = None
    """Only those of the positions that are `prefill` or `decode` tokens."""
    schedule: Schedule | None = None
    """Factor for each sampled token."""

    @field_validator("positions", mode="before")
    @classmethod
    def _positions(cls, value: Any) -> Any:
        return None if value is None else parse_positions(value, field="positions", may_match=True)

    def apply(self, edits: Sequence[EditBase]) -> tuple[EditBase, ...]:
        """The edits that stand under the name, as this request wants them.

        Raises:
            SpecError: a change does not fit an edit.
        """
        changes = {
            name: value
            for name in type(self).model_fields
            if name != "name" and (value := getattr(self, name)) is not None
        }
        return tuple(self._changed(edit, changes) for edit in edits) if changes else tuple(edits)

    def _changed(self, edit: EditBase, changes: Mapping[str, Any]) -> EditBase:
        kind = type(edit)
        if unfit := sorted(set(changes) - set(kind.model_fields)):
            raise SpecError(
                f"{self.name!r}: {', '.join(unfit)}: {kind.__name__}, which is registered "
                "under the name, has no such field"
            )
        fields = {name: getattr(edit, name) for name in kind.model_fields}
        return read_as(kind, fields | dict(changes), at=repr(self.name))


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
        parts = listed(value)
        if not isinstance(parts, list):
            return parts
        return tuple({"name": part} if isinstance(part, str) else part for part in parts)

    @field_validator("edits", mode="before")
    @classmethod
    def _edits(cls, value: Any, info: ValidationInfo) -> Any:
        return parse_edits(value, limits=limits_of(info))

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the tensors that it brings."""
        return _bytes_of(self.edits)

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [use.name for use in self.probes]
        if len(set(names)) != len(names):
            raise ValueError(f"probes: a name stands twice in {shown(names)}")
        check_patterns(self._all_positions())
        return self

    def _all_positions(self) -> Iterator[Positions]:
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
        used = {use.name for use in self.edits_named} | {use.name for use in self.probes}
        return _spliced(self.edits) | used

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return self.tensor_bytes

    @cached_property
    def sha256(self) -> str:
        """Of all that it says; what it names is in it by name, and in receipts with its content."""
        uses = {"edits_named": self.edits_named, "probes": self.probes}
        form = {name: [use.model_dump(mode="json") for use in of] for name, of in uses.items()}
        return _hash_of(form | {"edits": [edit.reference() for edit in self.edits]})

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
