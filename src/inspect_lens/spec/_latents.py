"""Edits by sparse autoencoders: of some latents, as instructions, and of a whole one.

Several latents of one edit all read the same stream. A whole autoencoder is registered with its
weights, and an edit puts it in the place of the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal, Self, get_args

import numpy as np
from pydantic import Field, PrivateAttr, field_validator, model_validator

from inspect_lens.errors import SpecError

from ._edit import EditBase
from ._engine import EngineFacts
from ._instruction import MOST_INSTRUCTIONS, Instruction, Kind, Row
from ._probe import Weights, WeightsEntry
from ._tensor import Tensor
from ._values import MOST_OF, Flag, Integer, Name, Number, integer, shown

__all__ = [
    "MOST_LATENTS",
    "SPLICE_MODES",
    "AutoencoderEntry",
    "AutoencoderKind",
    "EngineAutoencoder",
    "LatentMode",
    "Latents",
    "Reconstruct",
    "Splice",
    "SpliceMode",
    "check_engine_autoencoder",
]

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


AutoencoderKind = Literal["relu", "jumprelu", "topk"]
"""Which latents count: those above 0, above their threshold, or the `top_k` largest above 0, of
equal ones those with lower numbers."""

SpliceMode = Literal["set", "add", "scale", "at_least", "at_most"]
"""What happens to an activation: it is set to the number, the number is added to it, it is
multiplied by the number, or it is raised or lowered to the number."""

_MOST_NUMBERED: Final = 1 << 24
"""Programs are sent in float32, which represents integers exactly up to here."""
_LARGEST: Final = float(np.finfo(np.float32).max)
SPLICE_MODES: Final[tuple[SpliceMode, ...]] = get_args(SpliceMode)
"""Each by the number that its instruction has for it."""


class AutoencoderEntry(WeightsEntry):
    """A registered autoencoder without its tensors."""

    what: ClassVar[str] = "sae/1"

    kind: AutoencoderKind
    """Which latents count."""
    n_latents: int
    """How many latents it has."""

    def reference(self) -> dict[str, Any]:
        """The short form for logs and lists."""
        return super().reference() | {"latents": self.n_latents}


class EngineAutoencoder(Weights):
    """A sparse autoencoder as the engine applies it to whole rows.

    Latents of a row `x` are `encoder @ x + bias` where they count, else 0, and the reconstruction
    is `latents @ decoder + decoder_bias`. Products are computed in the dtype of the weights, and
    the rest in float32.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import EngineAutoencoder

        eye, zeros = np.eye(256, dtype=np.float32), np.zeros(256, dtype=np.float32)
        sae = EngineAutoencoder(
            kind="relu",
            tensors={"encoder": eye, "bias": zeros, "decoder": eye, "decoder_bias": zeros},
        )
        assert (sae.hidden, sae.entry.n_latents) == (256, 256)
        ```
    """

    shapes: ClassVar[dict[str, dict[str, str]]] = {
        kind: {"encoder": "nw", "bias": "n", "decoder": "nw", "decoder_bias": "w"} | more
        for kind, more in (("relu", {}), ("jumprelu", {"threshold": "n"}), ("topk", {}))
    }
    what: ClassVar[str] = "autoencoder"

    kind: AutoencoderKind
    """Which latents count."""
    layers: tuple[int, ...] = ()
    """Layers that it was trained on, 0-based, for lists; an edit says where it acts."""
    top_k: Integer = 0
    """Latents that count on each row, of kind `topk`."""
    tensors: dict[str, Tensor]
    """By name, with n latents and width w: `encoder` (n, w), `bias` (n,), what is subtracted from
    the input folded in, `decoder` (n, w), `decoder_bias` (w,), and of kind `jumprelu` `threshold`
    (n,). float32, float16 and bfloat16 stay as they are on the device."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        shape = self.tensors["encoder"].shape
        if len(shape) != 2 or 0 in shape:
            raise ValueError(f"tensors.encoder has shape {shape}; it needs (latents, width)")
        sizes = dict(zip("nw", shape, strict=True))
        for name, axes in self.shapes[self.kind].items():
            wanted = tuple(sizes[axis] for axis in axes)
            if self.tensors[name].shape != wanted:
                raise ValueError(
                    f"tensors.{name} has shape {self.tensors[name].shape}; an encoder {shape} "
                    f"needs {wanted}"
                )
        if (self.kind == "topk") != (0 < self.top_k <= shape[0]) or self.top_k < 0:
            raise ValueError(
                f"top_k={self.top_k} of kind {self.kind!r}; kind 'topk' needs 1 to {shape[0]}, and "
                "the others 0"
            )
        dtypes = {self.tensors[name].dtype for name in ("encoder", "decoder")}
        if len(dtypes) != 1:
            raise ValueError(f"encoder and decoder have the dtypes {sorted(dtypes)}; give them one")
        if not all(0 <= layer < 1 << 31 for layer in self.layers):
            raise ValueError(f"layers {shown(self.layers)}; name layers from 0 on")
        self.check_finite()
        return self

    @property
    def hidden(self) -> int:
        """Width of the rows that it reads and writes."""
        return self.tensors["encoder"].shape[1]

    @property
    def n_latents(self) -> int:
        """How many latents it has."""
        return self.tensors["encoder"].shape[0]

    def _identity(self) -> tuple[Any, ...]:
        return "sae", self.kind, self.top_k

    @property
    def entry(self) -> AutoencoderEntry:
        """What a front-end keeps of it."""
        return AutoencoderEntry.model_validate(self, from_attributes=True)

    def reference(self) -> dict[str, Any]:
        """The short form for logs: what it is, without the tensors."""
        return self.entry.reference()


class Splice(EditBase):
    """Put the reconstruction of a registered autoencoder in the place of the stream.

    The row `x` becomes `D(a)`, where `a` are its latents and `D` decodes them. With `error_term`
    what the autoencoder does not explain is added back: `D(a) + (x - D(a))`, which is `x`. Latents
    that you change are changed before they are decoded, and the error term stays that of the
    unchanged ones. So `error_term=True` with one latent set to 0 takes away what that latent
    writes, and nothing else.

    All latents are computed, however many there are, by dense products. They run beside the graphs
    that vLLM replays: steps in which such a request takes part replay none, and call the compiled
    model instead. `Latents` changes up to 63 latents within graphs, and `Reconstruct` keeps up to
    63. A row can have one autoencoder at a site.

    Edits in front of this one act before it, on the stream that it then reads, and those behind it
    act on what it has written; so a `Renormalise` behind it gives back the norm that it left.

    Source:
        Splicing an autoencoder into the forward pass: arXiv:2309.08600; error terms:
        arXiv:2403.19647. `HookedSAETransformer` of SAELens calls the second `use_error_term`.

    Example:
        ```python
        from inspect_lens.spec import Splice

        whole = Splice(sae="layer-4", layers=[4])
        without_17 = Splice(sae="layer-4", layers=[4], error_term=True, latents={17: 0.0})
        assert without_17.latents == ((17, 0.0),)
        ```
    """

    op: Literal["splice"] = "splice"
    sae: Name
    """Name under which the autoencoder is registered."""
    error_term: Flag = False
    """Add back what the autoencoder does not explain."""
    latents: tuple[tuple[int, float], ...] = ()
    """Latents that are changed, by number, such as `{17: 0.0}`; 4096 at most."""
    mode: SpliceMode = Field(default="set")
    """What is done with the numbers of `latents`: an activation is set to its number (`set`), the
    number is added to it (`add`), it is multiplied by the number (`scale`), or the number is its
    lower (`at_least`) or upper bound (`at_most`)."""
    only_if_active: Flag = False
    """Change a latent only on tokens on which it is active."""

    _entry: AutoencoderEntry | None = PrivateAttr(default=None)

    @field_validator("latents", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            value = list(value.items())
        if not isinstance(value, list | tuple):
            raise ValueError(f"{shown(value)}; give numbers by latent, such as {{17: 0.0}}")
        if len(value) > MOST_OF["latents"]:
            raise ValueError(f"{len(value)} latents; {MOST_OF['latents']} at most")
        return tuple(map(_pair, value))

    @model_validator(mode="after")
    def _check_latents(self) -> Self:
        numbers = [number for number, _ in self.latents]
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"latents: {shown(numbers)}; name each once")
        if not numbers and (self.mode != "set" or self.only_if_active):
            raise ValueError(
                "mode and only_if_active say how latents are changed, and without latents nothing "
                "is; name latents, or leave both out"
            )
        if self.choice:
            raise ValueError(f"an autoencoder reads whole rows; leave {', '.join(self.choice)} out")
        return self

    def resolved(self, entry: AutoencoderEntry) -> Splice:
        """The same edit with what its name stands for, so that it can be judged and sealed.

        Raises:
            SpecError: it changes a latent that the autoencoder does not have.
        """
        if wrong := [number for number, _ in self.latents if number >= entry.n_latents]:
            raise SpecError(
                f"latents: {wrong[0]}; the autoencoder {self.sae!r} has 0 to {entry.n_latents - 1}"
            )
        copy = self.model_copy()
        copy._entry = entry  # noqa: SLF001 - it is of this class
        return copy

    @property
    def content(self) -> str:
        """sha256 of the autoencoder; empty before it is looked up."""
        return "" if self._entry is None else self._entry.sha256

    @property
    def width(self) -> int | None:
        """Width of the rows; None before the autoencoder is looked up."""
        return None if self._entry is None else self._entry.hidden

    def _program(self, index: int, listed: int | None) -> tuple[Instruction, ...]:
        how = float(SPLICE_MODES.index(self.mode))
        params = how, float(self.error_term), float(self.only_if_active), 0.0
        numbers = values = None
        if self.latents:
            numbers, values = np.asarray(self.latents, dtype=np.float32).T.copy()
        return (Instruction(Kind.SPLICE, numbers, values, params, content=self.content),)


def check_engine_autoencoder(
    sae: EngineAutoencoder, facts: EngineFacts, field: str = "sae"
) -> None:
    """Check an autoencoder against the engine that will run it."""
    widths = {site: facts.width_of(site).width for site in facts.sites}
    if sae.hidden not in widths.values():
        served = ", ".join(f"{site} {width}" for site, width in widths.items())
        raise SpecError(
            f"{field}: reads rows of width {sae.hidden}; {facts.model} has rows of these widths: "
            f"{served} (INSPECT_LENS_SITES says which sites are served)"
        )
    if wrong := [layer for layer in sae.layers if layer >= facts.n_layers]:
        raise SpecError(
            f"{field}: trained on layer {wrong[0]}; {facts.model} has layers 0 to "
            f"{facts.n_layers - 1}; leave layers out if its layers do not matter"
        )


def _pair(item: Any) -> tuple[int, float]:
    """One entry of `latents`; JSON has texts for keys."""
    if not isinstance(item, list | tuple) or len(item) != 2:
        raise ValueError(f"{shown(item)}; give pairs of a latent and a number")
    number, value = item
    if isinstance(number, str) and number.isascii() and number.isdigit() and len(number) < 12:
        number = int(number)
    number = integer(number)
    if not 0 <= number < _MOST_NUMBERED:
        raise ValueError(f"latent {shown(number)}; numbers are from 0 to {_MOST_NUMBERED - 1}")
    if isinstance(value, np.number):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"latent {number}: {shown(value)}; give a number")
    if not abs(value) <= _LARGEST:
        raise ValueError(f"latent {number}: {shown(value)}; give a finite float32 number")
    return number, float(value)
