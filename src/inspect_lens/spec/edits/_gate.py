"""Gates: a probe that decides inside the engine on which tokens an edit acts."""

from __future__ import annotations

import math
from typing import Any, Literal, Self

import numpy as np
from pydantic import (
    ConfigDict,
    Field,
    FieldSerializationInfo,
    InstanceOf,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_serializer,
    model_validator,
)

from inspect_lens.spec.engine._facts import RESID_POST, Site
from inspect_lens.spec.engine._limits import limits_of
from inspect_lens.spec.values._strict import Flag, Integer, Number
from inspect_lens.spec.values._tensor import (
    TensorData,
    WireModel,
    as_tensor_data,
    encode_tensor,
    freeze_tensor,
    is_wire,
)

from ._instruction import N_REGISTERS, NEXT_TOKEN, SAME_TOKEN, Instruction, Kind, Row

__all__ = ["TENSOR_REFERENCE", "Gate"]

TENSOR_REFERENCE = "tensor/1"
"""`$lens` of the short form in which a tensor of an edit stands in logs."""


class Gate(WireModel):
    """A probe that an edit is multiplied with.

    The factor is `sigmoid(sharpness * (<s, direction> - threshold))`, or with `sharpness=None` 1
    above the threshold and else 0. With `scope="token"` each token has its own, read at or before
    the edit. With `scope="next"` it is that of the sampled token before, and with `scope="rest"`
    the edit acts on every sampled token behind the first one that was above the threshold; these
    may be read at any layer, also behind the edit.

    `ema` averages the score over sampled tokens, `m = ema*x + (1 - ema)*m`, beginning with the
    score of the first one. `closes_below` is hysteresis: a gate that has opened stays open until
    the score, or its average, falls below it. Prompt tokens never enter: a cached one is not seen.

    Source:
        Conditional activation steering, arXiv:2409.05907 (`cosine=True` is its similarity).

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import Ablate, Gate

        lies = np.random.default_rng(0).standard_normal(256)
        gate = Gate(direction=lies, layer=3, threshold=1.5)
        edit = Ablate(direction=lies, layers=[4, 5], when=gate)
        assert edit.when.layer == 3
        ```
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    direction: InstanceOf[TensorData]
    """(width,); what the stream is multiplied with."""
    layer: Integer
    """Layer at which the stream is read, 0-based."""
    site: Site = RESID_POST
    """Site at which it is read."""
    threshold: Number = Field(default=0.0, allow_inf_nan=False)
    """Above it the edit acts."""
    sharpness: Number | None = Field(default=None, allow_inf_nan=False, gt=0)
    """Steepness of the sigmoid; None is a step."""
    cosine: Flag = False
    """Whether the product is divided by the norm of the stream; the direction is then taken as
    a unit vector."""
    scope: Literal["token", "next", "rest"] = "token"
    """Tokens it decides on: the one it reads, the sampled one behind that, or the rest of the
    request behind that."""
    ema: Number | None = Field(default=None, allow_inf_nan=False, gt=0, le=1)
    """Weight of the newest score in its moving average over sampled tokens; None averages nothing,
    and so does 1."""
    closes_below: Number | None = Field(default=None, allow_inf_nan=False)
    """Score below which a gate that has opened closes again, less than `threshold`; None is
    `threshold` itself."""
    reads: Literal["completion", "last_prompt"] | None = None
    """With `scope="rest"`, the tokens that may open it: each sampled one (the default), or the last
    one of the prompt alone, which makes it a condition on the prompt."""
    shadow: Flag = False
    """Whether the edits of a gate that `is_lasting` are left out: the receipt says when they would
    have begun, and the answer is the plain one."""

    @field_validator("direction", mode="before")
    @classmethod
    def _direction(cls, value: Any, info: ValidationInfo) -> TensorData:
        limits = limits_of(info)
        judge = None if limits is None else limits.judge_edit
        return freeze_tensor(as_tensor_data(value, field="when.direction", judge=judge))

    @model_validator(mode="after")
    def _check(self) -> Self:
        values = self.direction.to_float32()
        if values.ndim != 1 or not values.size:
            raise ValueError(
                f"direction has shape {values.shape}; a gate reads one (width,) vector"
            )
        if not np.isfinite(values).all() or not values.any():
            raise ValueError("direction holds NaN or infinity, or nothing but zeros")
        if self.scope == "rest" and self.sharpness is not None:
            raise ValueError(
                "sharpness beside scope='rest': the gate opens at once and stays open; leave "
                "sharpness out"
            )
        if self.scope != "rest" and self.reads is not None:
            raise ValueError(f"reads beside scope={self.scope!r}: it belongs to scope='rest'")
        if self.shadow and not self.is_lasting:
            raise ValueError(
                "shadow beside scope='token': no receipt tells of such a gate; use scope='next' or "
                "'rest', ema or closes_below"
            )
        self._check_running()
        return self

    def _check_running(self) -> None:
        if self.closes_below is not None:
            if self.scope == "rest":
                raise ValueError("closes_below beside scope='rest', whose gates stay open")
            if self.sharpness is not None:
                raise ValueError("closes_below beside sharpness: one is a step, and one is smooth")
            if self.closes_below >= self.threshold:
                raise ValueError(
                    f"closes_below={self.closes_below:g} is not below threshold={self.threshold:g}"
                )
        if self.ema is not None and self.reads == "last_prompt":
            raise ValueError(
                "ema beside reads='last_prompt': that reads one token, and ema averages sampled "
                "ones"
            )

    @property
    def is_running(self) -> bool:
        """Whether its decision on a token is kept, or depends on the tokens before."""
        return self.scope == "next" or self.ema is not None or self.closes_below is not None

    @property
    def is_lasting(self) -> bool:
        """Whether it is read on sampled tokens as they come, and receipts tell of it."""
        return self.scope != "token" or self.is_running

    @property
    def lasts_by(self) -> str:
        """What makes it lasting, for messages."""
        if self.scope != "token":
            return f"scope={self.scope!r}"
        return "closes_below" if self.ema is None else "ema"

    @property
    def first_register(self) -> int:
        """Of the block of registers that it belongs to; see `N_LATCHES`."""
        if not self.is_running:
            return N_REGISTERS if self.is_lasting else 0
        return SAME_TOKEN if self.scope == "token" else NEXT_TOKEN

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        form: dict[str, Any] = handler(self)
        # What is not asked for is left out: the form that older servers know.
        unused = [name for name in ("ema", "closes_below") if getattr(self, name) is None]
        if not self.is_lasting:
            unused += ["scope", "reads", "shadow"]
        for name in unused:
            form.pop(name, None)
        return form

    @field_serializer("direction")
    def _dump_direction(self, value: TensorData, info: FieldSerializationInfo) -> dict[str, Any]:
        return encode_tensor(value) if is_wire(info) else tensor_reference(value)

    def instruction(self, register: int) -> Instruction:
        """Make the instruction that computes the gate.

        Args:
            register: it goes to.

        Returns:
            The instruction, for the tap at `layer`.
        """
        read: Row = self.direction.to_float32()
        if self.cosine:
            read = (read / np.linalg.norm(read.astype(np.float64))).astype(np.float32)
        steep = math.inf if self.sharpness is None else self.sharpness
        closes, weight = 0.0, 0.0
        if self.is_running:
            kind = Kind.COSINE_RUNNING if self.cosine else Kind.RUNNING
            # One that closes at its threshold is never held open by the rule for closing.
            closes = math.inf if self.closes_below is None else self.closes_below
            closes = -math.inf if self.scope == "rest" else closes
            weight = 1.0 if self.ema is None else self.ema
        elif self.scope == "rest":
            kind = Kind.COSINE_LATCH if self.cosine else Kind.LATCH
        else:
            kind = Kind.COSINE_GATE if self.cosine else Kind.GATE
        params = (steep, self.threshold, closes, weight)
        return Instruction(kind, read, None, params, True, register)

    @property
    def content(self) -> tuple[object, ...]:
        """What makes two gates the same."""
        tensor = self.direction.sha256
        how = self.threshold, self.sharpness, self.cosine, self.scope, self.reads or "completion"
        return tensor, self.layer, self.site, *how, self.ema, self.closes_below


def tensor_reference(tensor: TensorData) -> dict[str, Any]:
    """The short form for logs of a tensor, which its hash stands for."""
    return {
        "$lens": TENSOR_REFERENCE,
        "sha256": tensor.sha256,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "uri": f"lens-vectors/{tensor.sha256[:16]}.safetensors",
    }
