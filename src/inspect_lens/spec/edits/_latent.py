"""Edits of one latent of a sparse autoencoder."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, InstanceOf, model_validator

from inspect_lens.spec.values._strict import Flag, Number
from inspect_lens.spec.values._tensor import TensorData

from ._base import EditBase
from ._instruction import Instruction, Kind

__all__ = ["Latent", "LatentMode"]

LatentMode = Literal["set", "add", "at_least"]
"""What becomes of an activation: a value, the value added, or the value where it is less."""


class Latent(EditBase):
    """Set, raise or add to a sparse autoencoder's latent, and leave the rest of the stream alone.

    The latent's activation is `z = <encoder, h> + bias` where `z > threshold`, else 0: JumpReLU,
    or ReLU with a threshold of 0. With `mode="set"` the stream becomes
    `h + (value - activation) * decoder`, with `mode="add"` `h + value * decoder`. With
    `mode="at_least"` it is set where the activation is below `value`; other tokens stay as they
    are. What the autoencoder does not explain stays as it is.

    A TopK autoencoder has no threshold of its own: whether a latent is among the k largest depends
    on all others. Give the smallest activation that its latents have on your data (BatchTopK
    autoencoders are published with that number).

    Source:
        Clamping of features: "Scaling Monosemanticity" (Anthropic, 2024); JumpReLU:
        arXiv:2407.14435.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import Latent

        rng = np.random.default_rng(0)
        bridge = Latent(
            encoder=rng.standard_normal(256),
            decoder=rng.standard_normal(256),
            threshold=0.4,
            value=10.0,
            layers=[3],
        )
        assert bridge.mode == "set"
        ```
    """

    op: Literal["latent"] = "latent"
    encoder: InstanceOf[TensorData]
    """(width,); the latent's column of the encoder."""
    decoder: InstanceOf[TensorData]
    """(width,); the latent's row of the decoder."""
    bias: Number = Field(default=0.0, allow_inf_nan=False)
    """The latent's bias. Where the autoencoder takes a bias off its input first, that is
    `b_enc - <encoder, b_dec>`."""
    threshold: Number = Field(default=0.0, allow_inf_nan=False, ge=0)
    """The latent is active above it."""
    value: Number = Field(allow_inf_nan=False)
    """The activation afterwards, its minimum, or what is added to it."""
    mode: LatentMode = "set"
    """Whether `value` takes the place of the activation, is its minimum, or is added to it."""
    only_if_active: Flag = False
    """Leave tokens alone on which the latent is not active."""

    tensor_fields: ClassVar[dict[str, int]] = {"encoder": 1, "decoder": 1}

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.check_directions("encoder")
        self.check_directions("decoder")
        return self

    def _program(self, index: int, listed: int | None) -> tuple[Instruction, ...]:
        kind = Kind.LATENT_ADD if self.mode == "add" else Kind.LATENT_SET
        left = float(self.only_if_active) + (2.0 if self.mode == "at_least" else 0.0)
        params = (self.bias, self.threshold, self.value, left)
        read = np.ascontiguousarray(self.at("encoder", index))
        return (Instruction(kind, read, np.ascontiguousarray(self.at("decoder", index)), params),)
