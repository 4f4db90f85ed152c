"""Edits of several latents of a sparse autoencoder, all of which read the same stream."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from ._edit import EditBase
from ._instruction import MOST_INSTRUCTIONS, Instruction, Kind, Row
from ._tensor import Tensor
from ._values import Flag, Number

__all__ = ["MOST_LATENTS", "LatentMode", "Latents", "Reconstruct"]


LatentMode = Literal["set", "add", "at_least"]
"""What becomes of an activation: a value, the value added, or the value where it is less."""


MOST_LATENTS = MOST_INSTRUCTIONS - 1
"""Latents of one edit: one instruction is left for its gate, or for the bias of the decoder."""


class _Several(EditBase):
    """What both have: the latents, and when each is active."""

    encoder: Tensor
    """(latents, width); the latents' columns of the encoder; 63 at most."""
    decoder: Tensor
    """(latents, width); the latents' rows of the decoder."""
    bias: Tensor | None = None
    """(latents,); the latents' biases; None for zeros. Where the autoencoder takes a bias off its
    input first, a latent's is `b_enc - <encoder, b_dec>`."""
    threshold: Tensor | None = None
    """(latents,); a latent is active above it; None for zeros, which is ReLU."""

    number_fields: ClassVar[frozenset[str]] = frozenset({"bias", "threshold", "value"})
    direction_fields: ClassVar[frozenset[str]] = frozenset({"encoder", "decoder"})

    @model_validator(mode="after")
    def _check(self) -> Self:
        n = self.encoder.shape[-2]
        if n > MOST_LATENTS:
            raise ValueError(f"encoder has {n} latents; {MOST_LATENTS} at most")
        for name in {"decoder", *self.number_fields} & set(self.tensors):
            found = self.tensors[name].shape[-1 if name in self.number_fields else -2]
            if found != n:
                raise ValueError(f"{name} has {found} latents and encoder {n}; give {n}")
        if self.threshold is not None and (self.threshold.to_float32() < 0).any():
            raise ValueError("threshold: one is below 0; an active latent is above 0")
        return self

    def _instructions(
        self, kind: Kind, index: int, decoder: Row, values: Row, left: float, *, is_first: bool
    ) -> tuple[Instruction, ...]:
        """One for each latent, all of which read the same stream."""
        encoder, none = self.at("encoder", index), np.zeros(len(decoder))
        bias = none if self.bias is None else self.at("bias", index)
        least = none if self.threshold is None else self.at("threshold", index)
        return tuple(
            Instruction(
                kind,
                np.ascontiguousarray(encoder[i]),
                np.ascontiguousarray(decoder[i]),
                (float(bias[i]), float(least[i]), float(values[i]), left),
                sees_edits=is_first and i == 0,
            )
            for i in range(len(decoder))
        )


class Latents(_Several):
    """Set, raise or add to latents of a sparse autoencoder, and leave the rest of the stream alone.

    A latent's activation is `z = <encoder, h> + bias` where `z > threshold`, else 0: JumpReLU, or
    ReLU with a threshold of 0. With `mode="set"` the stream becomes
    `h + (value - activation) * decoder`, with `mode="add"` `h + value * decoder`. With
    `mode="at_least"` it is set where the activation is below `value`; other tokens stay as they
    are. What the autoencoder does not explain stays as it is.

    The activations of several latents are those of one stream, the one in front of this edit:
    `h - D^T a(h) + D^T value`, where `D` has the rows of the decoder. A list of edits of one latent
    each is something else: each reads what the one before has left, and the encoder of one latent
    reads some of what the decoder of another writes.

    A TopK autoencoder has no threshold of its own: whether a latent is among the k largest depends
    on all others. Give the smallest activation that its latents have on your data (BatchTopK
    autoencoders are published with that number).

    Source:
        Clamping of features: "Scaling Monosemanticity" (Anthropic, 2024); JumpReLU:
        arXiv:2407.14435.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import Latents

        rng = np.random.default_rng(0)
        some = Latents(
            encoder=rng.standard_normal((3, 256)),
            decoder=rng.standard_normal((3, 256)),
            value=[0.0, 0.0, 4.0],
            layers=[3],
        )
        assert len(some.program(0)) == 3
        ```
    """

    op: Literal["latents"] = "latents"
    value: Tensor
    """(latents,); each activation afterwards, its minimum, or what is added to it."""
    mode: LatentMode = "set"
    """Whether a `value` takes the place of the activation, is its minimum, or is added to it."""
    only_if_active: Flag = False
    """Leave each latent alone on tokens on which it is not active."""

    tensor_fields: ClassVar[dict[str, int]] = {
        "encoder": 2, "decoder": 2, "bias": 1, "threshold": 1, "value": 1,
    }  # fmt: skip

    def _program(self, index: int, listed: int | None) -> tuple[Instruction, ...]:
        kind = Kind.LATENT_ADD if self.mode == "add" else Kind.LATENT_SET
        left = float(self.only_if_active) + (2.0 if self.mode == "at_least" else 0.0)
        decoder, values = self.at("decoder", index), self.at("value", index)
        return self._instructions(kind, index, decoder, values, left, is_first=True)


class Reconstruct(_Several):
    """Put what some latents make of the stream in its place: `D^T a(h) + decoder_bias`.

    What the other latents would have written goes, and so does what the autoencoder does not
    explain. With `strength` below 1 it is mixed with the stream: `(1 - strength)*h + strength*r`.

    Source:
        Splicing an autoencoder into the forward pass, arXiv:2309.08600.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import Reconstruct

        rng = np.random.default_rng(0)
        circuit = Reconstruct(
            encoder=rng.standard_normal((40, 256)),
            decoder=rng.standard_normal((40, 256)),
            decoder_bias=np.zeros(256),
            layers=[3],
        )
        assert len(circuit.program(0)) == 41
        ```
    """

    op: Literal["reconstruct"] = "reconstruct"
    decoder_bias: Tensor | None = None
    """(width,); bias of the decoder; None for zeros."""
    strength: Number = Field(default=1.0, allow_inf_nan=False)
    """Share of the stream that the reconstruction takes the place of."""

    tensor_fields: ClassVar[dict[str, int]] = {
        "encoder": 2, "decoder": 2, "bias": 1, "threshold": 1, "decoder_bias": 1,
    }  # fmt: skip

    def _program(self, index: int, listed: int | None) -> tuple[Instruction, ...]:
        base = None
        if self.decoder_bias is not None:
            base = np.ascontiguousarray(self.at("decoder_bias", index))
        # An instruction that sets a latent to 0 writes its activation, negated.
        decoder = self.at("decoder", index) * np.float32(-self.strength)
        zeros = np.zeros(len(decoder), np.float32)
        return (
            Instruction(Kind.BLEND, None, base, (self.strength, 0.0, 0.0, 0.0)),
            *self._instructions(Kind.LATENT_SET, index, decoder, zeros, 0.0, is_first=False),
        )
