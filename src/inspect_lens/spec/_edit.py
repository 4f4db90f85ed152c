"""What all edits have in common: where they act, on which tokens, when, and how strongly."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import numpy as np
from pydantic import (
    BaseModel,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from ._engine import RESID_POST, SITE_TABLE, Site, limits_of
from ._gate import Gate, Schedule, When, placed
from ._instruction import (
    CHOICES,
    MOST_INSTRUCTIONS,
    Choice,
    Chosen,
    Instruction,
    Row,
    sampled_match,
)
from ._positions import Phase, Positions, is_mask, parse_positions
from ._tensor import JudgeShape, TensorData, WireModel, as_tensor_data, freeze_tensor, is_wire
from ._values import TENSORS, integers, shown

__all__ = ["EDITS", "EDIT_REFERENCE", "EditBase"]

EDIT_REFERENCE = "edit/1"
"""`$lens` of the short form in which an edit stands in logs."""

EDITS: dict[str, type[EditBase]] = {}
"""Every operation by its name."""


class EditBase(WireModel):
    """Where and on which tokens an edit acts; the classes below it say what it does.

    Tensors may be given as torch tensors, numpy arrays, lists, or the JSON tensor form. A tensor
    with one dimension more than its field names has one entry per layer of `layers`.
    """

    if TYPE_CHECKING:
        op: str

    layers: tuple[int, ...]
    """Decoder layers at which it acts, 0-based."""
    site: Site = RESID_POST
    """Where in those layers: see `Site`."""
    positions: Positions = "all"
    """Tokens it acts on: `all`, `prompt`, `completion`, `last_prompt`, a mask over the prompt,
    absolute positions, negative ones counted from the end of the prompt, or a `TokenMatch`, also
    of sampled tokens."""
    phase: Phase = "both"
    """Only those of the positions that are `prefill` or `decode` tokens."""
    heads: tuple[int, ...] | None = None
    """Heads that it acts on, 0-based, at `q`, `k`, `v` or `z`; None for the whole row. Its tensors
    are then as wide as these heads together, in the order in which they are named."""
    neurons: tuple[int, ...] | None = None
    """The same of neurons, at `mlp_hidden`."""
    experts: tuple[int, ...] | None = None
    """The same of experts, at `router_logits`."""
    when: When | None = None
    """A gate that decides token by token, or a rule that joins several; None always acts."""
    schedule: Schedule | None = None
    """Factor of the edit for each sampled token; None is 1 for all of them."""

    tensor_fields: ClassVar[dict[str, int]] = {}
    """Fields that hold tensors, and the number of dimensions that each has for one layer."""
    number_fields: ClassVar[frozenset[str]] = frozenset({"bias"})
    """Those of them that hold a number for each direction, and are not as wide as the stream."""
    direction_fields: ClassVar[frozenset[str]] = frozenset({"direction"})
    """Those of them of which no vector may be zero."""
    listed_fields: ClassVar[frozenset[str]] = frozenset()
    """Those of them that may be (layers, positions, width), a row for each listed position."""

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Make an operation known by its name."""
        super().__pydantic_init_subclass__(**options)
        if "op" in cls.model_fields:
            op = cls.model_fields["op"].default
            if EDITS.setdefault(op, cls).__qualname__ != cls.__qualname__:
                raise TypeError(f"{cls.__qualname__}: another edit is called op={op!r}")
            TENSORS.update(cls.tensor_fields)

    @field_validator("layers", *CHOICES, mode="before")
    @classmethod
    def _listed(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.field_name in CHOICES:
            return None
        value = integers(value)
        is_list = isinstance(value, tuple) and value
        if not is_list or len(set(value)) != len(value) or min(value) < 0:
            raise ValueError(
                f"{shown(value)}; name at least one, such as [3], each once and none below 0"
            )
        return value

    @model_validator(mode="after")
    def _check_choice(self) -> Self:
        if len(self.choice) > 1:
            raise ValueError(f"give one of {', '.join(self.choice)}")
        for name in self.choice:
            sites = [site for site, info in SITE_TABLE.items() if info.choice == name]
            if self.site not in sites:
                raise ValueError(
                    f"{name} are parts of rows at {', '.join(sites)}, and site is {self.site}"
                )
            if self.uses_norm:
                raise ValueError(
                    f"the norm of a row is that of all its numbers; leave {name} out, or give "
                    "a vector of the length that you want"
                )
        return self

    @field_validator("positions", mode="before")
    @classmethod
    def _positions(cls, value: Any) -> Any:
        found = parse_positions(value, field="positions", may_match=True)
        if found == "last":
            raise ValueError(
                "positions='last' is the last token that is fed, which is known only afterwards; "
                "use 'last_prompt', 'completion', or a number"
            )
        return found

    @model_validator(mode="after")
    def _check_sampled(self) -> Self:
        if sampled_match(self.positions) is not None and self.phase == "prefill":
            raise ValueError(
                "phase='prefill' beside positions among='completion' selects no token; leave "
                "one of them out"
            )
        if self.schedule is not None and not self.is_sampled:
            raise ValueError(
                "schedule counts sampled tokens; set positions='completion', or phase='decode' "
                "beside numbers"
            )
        return self

    @property
    def is_sampled(self) -> bool:
        """Whether it acts on sampled tokens alone."""
        sampled = self.positions == "completion" or sampled_match(self.positions) is not None
        return sampled or self.phase == "decode"

    @property
    def gates(self) -> tuple[Gate, ...]:
        """The gates that decide on it; none where it always acts."""
        return () if self.when is None else self.when.gates

    @model_validator(mode="before")
    @classmethod
    def _tensors(cls, values: Any, info: ValidationInfo) -> Any:
        if not isinstance(values, dict):
            return values
        values = {key: value for key, value in values.items() if key != "$lens"}
        found = {name for name in cls.tensor_fields if values.get(name) is not None}
        is_part = any(values.get(name) is not None for name in CHOICES)
        limits = limits_of(info)

        def read(name: str) -> TensorData:
            judge: JudgeShape | None = None
            if limits is not None and name in cls.number_fields:
                judge = partial(limits.judge_numbers, most=MOST_INSTRUCTIONS)
            elif limits is not None:
                judge = limits.edit_judge(values.get("site"), is_part=is_part)
            return freeze_tensor(as_tensor_data(values[name], field=name, judge=judge))

        return values | {name: read(name) for name in found}

    @model_validator(mode="after")
    def _check_tensors(self) -> Self:
        width = None
        for name, tensor in self.tensors.items():
            n, shape = self.tensor_fields[name], tensor.shape
            self._check_shape(name, shape)
            if not all(np.isfinite(values).all() for values in tensor.blocks()):
                raise ValueError(f"{name} holds NaN or infinity; every value has to be finite")
            if name in self.direction_fields:
                self.check_directions(name)
            if n and name not in self.number_fields:
                if width not in (None, shape[-1]):
                    raise ValueError(f"{name} is {shape[-1]} wide and another tensor {width}")
                width = shape[-1]
        is_wide = SITE_TABLE[self.site].is_wide
        for at, gate in placed(self.when, "when"):
            if is_wide and width not in (None, gate.direction.shape[0]):
                raise ValueError(f"{at}.direction is not as wide as the edit's tensors")
            self._check_gate(gate, at)
        return self

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        n, may_list = self.tensor_fields[name], name in self.listed_fields
        if not n <= len(shape) <= n + 1 + may_list or 0 in shape:
            more = ", or two more for a row at each of the listed positions" if may_list else ""
            raise ValueError(
                f"{name} has shape {shape}; allowed are {n} dimensions for all layers alike, "
                f"or one more for {len(self.layers)} layers{more}"
            )
        if len(shape) > n and shape[0] != len(self.layers):
            raise ValueError(
                f"{name} has {shape[0]} entries and layers names {len(self.layers)}; give "
                "one entry per layer"
            )
        listed = len(self.positions) if isinstance(self.positions, tuple) else 0
        if len(shape) == n + 2 and (is_mask(self.positions) or shape[1] != listed):
            raise ValueError(
                f"{name} has {shape[1]} positions and positions lists {listed}; list as many "
                "numbers in positions, one for each row"
            )

    def _check_gate(self, gate: Gate, at: str) -> None:
        if gate.is_lasting and not self.is_sampled:
            raise ValueError(
                f"{at}.{gate.lasts_by} decides on sampled tokens; set positions='completion', or "
                "phase='decode' beside numbers"
            )
        if gate.scope == "token" and gate.layer > min(self.layers):
            raise ValueError(
                f"{at}.layer {gate.layer} comes after layer {min(self.layers)}, where the "
                "edit acts first; a gate is read at or before its edit"
            )

    @model_serializer(mode="wrap")
    def _dump(
        self, handler: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        form: dict[str, Any] = handler(self)
        for name in ("when", "schedule", *CHOICES):
            if getattr(self, name) is None:
                form.pop(name, None)
        return form if is_wire(info) else {"$lens": EDIT_REFERENCE, **form}

    def reference(self) -> dict[str, Any]:
        """The short form for logs: everything but the tensors, which their hashes stand for."""
        return BaseModel.model_dump(self, mode="json")

    @property
    def tensors(self) -> dict[str, TensorData]:
        """Tensors by field; those that are left out are not in it."""
        found = {name: getattr(self, name) for name in self.tensor_fields}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @property
    def all_tensors(self) -> tuple[TensorData, ...]:
        """Its tensors, those of its gates among them."""
        return (*self.tensors.values(), *[gate.direction for gate in self.gates])

    @property
    def sha256(self) -> str | None:
        """Hash of its tensor, by which receipts name it; None where it has none or several."""
        found = tuple(self.tensors.values())
        return found[0].sha256 if len(found) == 1 else None

    @property
    def content(self) -> str:
        """sha256 of what it names, once that is looked up; empty where it names nothing."""
        return ""

    @property
    def width(self) -> int | None:
        """Width of its tensors; None where it has none."""
        for name, tensor in self.tensors.items():
            if self.tensor_fields[name] and name not in self.number_fields:
                return tensor.shape[-1]
        return None

    @property
    def choice(self) -> dict[Choice, tuple[int, ...]]:
        """What it names of the row, by field: heads, neurons or experts; empty for all of it."""
        found = {name: getattr(self, name) for name in CHOICES}
        return {name: parts for name, parts in found.items() if parts is not None}

    @property
    def uses_norm(self) -> bool:
        """Whether what it does depends on the norm of the row."""
        return False

    @property
    def n_listed(self) -> int | None:
        """Positions of which each has rows of its own; None where all tokens are edited alike."""
        for name, tensor in self.tensors.items():
            if len(tensor.shape) == self.tensor_fields[name] + 2:
                return tensor.shape[1]
        return None

    def program(
        self, index: int, listed: int | None = None, chosen: Chosen | None = None
    ) -> tuple[Instruction, ...]:
        """What the edit does at one of its layers, gates aside: its instructions, in order.

        Args:
            index: of the layer in `layers`.
            listed: index of the token in `positions`, where each has rows of its own.
            chosen: the numbers of the row that it acts on; None for all of them.
        """
        program = self._program(index, listed)
        return program if chosen is None else chosen.widen(program)

    def _program(self, index: int, listed: int | None) -> tuple[Instruction, ...]:
        raise NotImplementedError

    def check_strength(self, dtype: str, field: str) -> None:
        """Refuse what is too large for a stream of some dtype whatever the model computes.

        Args:
            dtype: of the stream, such as `bfloat16`.
            field: path of the edit in the request, for the message.

        Raises:
            SpecError: the edit is too strong.
        """

    def at(self, name: str, index: int, listed: int | None = None) -> Row:
        """A tensor at one of the layers, float32 of as many dimensions as `tensor_fields` says.

        Args:
            name: of the field.
            index: of the layer in `layers`.
            listed: index of the token in `positions`, where each has rows of its own.
        """
        tensor = cast("TensorData", getattr(self, name))
        storage, n = tensor.storage, self.tensor_fields[name]
        if storage.ndim > n:
            storage = storage[index]
        if storage.ndim > n and listed is not None:
            storage = storage[listed]
        return TensorData(storage, tensor.dtype).to_float32()

    def check_directions(self, name: str) -> None:
        """Raise ValueError for a zero vector where a direction is needed."""
        values = cast("TensorData", getattr(self, name)).to_float32()
        if not np.linalg.norm(values.astype(np.float64), axis=-1).all():
            raise ValueError(f"{name} needs a direction, and one of its vectors is zero")
