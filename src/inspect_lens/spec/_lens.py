"""The logit lens: which tokens the residual stream of a layer would predict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from inspect_lens.errors import SpecError

from ._capture import Layers, Transport
from ._engine import EngineFacts
from ._positions import Positions, parse_positions
from ._probe import Weights, WeightsEntry
from ._tensor import Tensor
from ._values import Integer, Name, Value, integer, shown

__all__ = [
    "LENS_NAME",
    "LENS_REFERENCE",
    "MOST_TOKENS",
    "MOST_TOP_K",
    "EngineLens",
    "LensEntry",
    "LensKind",
    "LensReceipt",
    "LensTable",
    "LogitLens",
    "ResolvedLens",
    "check_engine_lens",
]

LENS_NAME: Final = "logit_lens"
"""Name of its tensor among the activations of a result."""

MOST_TOP_K: Final = 100
"""Most likely tokens that a request may ask for at each layer and position."""

MOST_TOKENS: Final = 64
"""Tokens whose log-probability and rank a request may ask for."""


class LogitLens(Value):
    """Read the stream of some layers as a prediction of the next token.

    The residual stream behind a layer goes through the model's own final norm and unembedding,
    as that of the last layer does. The row of position `p` predicts the token at `p + 1`. Nothing
    but the asked numbers leaves the device.

    Source:
        nostalgebraist, "interpreting GPT: the logit lens" (2020).

    Example:
        ```python
        from inspect_lens import LensRequest
        from inspect_lens.spec import LogitLens

        lens = LogitLens(layers=[2, 4], top_k=3, tokens=[17, " Paris"], positions="last_prompt")
        request = LensRequest(lens=lens)  # extra_args={"inspect_lens": request}
        assert request.lens.layers == (2, 4)
        ```
    """

    name: Name | None = None
    """Registered tuned or Jacobian lens that translates each row before the final norm; None reads
    rows as they are, which is the logit lens."""

    layers: Layers = "all"
    """`all`, or 0-based layer numbers; results are stacked in ascending order. With a name, `all`
    are the layers that this lens translates, and the last layer."""

    top_k: int = 5
    """Most likely tokens to return for each layer and position: 0 to 100."""

    tokens: tuple[int | str, ...] = ()
    """Tokens of which to return log-probability and rank: ids, or texts that are one token of the
    engine's tokenizer; 64 at most."""

    positions: Positions = "all"
    """Tokens that are read, as for a capture; `last` is not one of the choices."""

    transport: Transport = Field(default="auto")
    """As in `CaptureSpec`."""

    @field_validator("top_k", mode="before")
    @classmethod
    def _top_k(cls, value: Any) -> int:
        k = integer(value)
        if not 0 <= k <= MOST_TOP_K:
            raise ValueError(f"{k}; allowed are 0 to {MOST_TOP_K}")
        return k

    @field_validator("tokens", mode="before")
    @classmethod
    def _tokens(cls, value: Any) -> tuple[int | str, ...]:
        single = isinstance(value, str | int)
        if not single and not isinstance(value, list | tuple):
            raise ValueError(f"{shown(value)}; give token ids or texts, in a list")
        listed = (value,) if single else tuple(value)
        found = tuple(token if isinstance(token, str) else integer(token) for token in listed)
        if len(found) > MOST_TOKENS:
            raise ValueError(f"{len(found)} tokens; {MOST_TOKENS} at most")
        if any(token == "" or (isinstance(token, int) and token < 0) for token in found):
            raise ValueError(f"{shown(found)}; ids begin at 0, and a text is not empty")
        if len(set(found)) != len(found):
            raise ValueError(f"{shown(found)}; name each token once")
        return found

    @field_validator("positions", mode="before")
    @classmethod
    def _positions(cls, value: Any) -> Any:
        if isinstance(value, str) and value == "last":
            raise ValueError(
                "'last': which token that is is known at the end; ask for 'completion' and take "
                "the last row"
            )
        return parse_positions(value, field="positions")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.top_k and not self.tokens:
            raise ValueError("top_k=0 without tokens asks for nothing; give one of them")
        return self

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens that are given as ids."""
        return tuple(token for token in self.tokens if isinstance(token, int))

    @property
    def texts(self) -> tuple[str, ...]:
        """The tokens that are given as texts."""
        return tuple(token for token in self.tokens if isinstance(token, str))


@dataclass(frozen=True)
class LensTable:
    """What a logit lens found, as arrays.

    The first two axes of each are tokens and layers.
    """

    positions: tuple[int, ...]
    """Absolute position of each token read; the row of `p` predicts the token at `p + 1`."""
    layers: tuple[int, ...]
    """Layers, ascending."""
    token_ids: NDArray[np.int64]
    """(tokens, layers, top_k); the most likely first."""
    logprobs: NDArray[np.float32]
    """(tokens, layers, top_k); natural logarithms, over the whole vocabulary."""
    targets: tuple[int, ...]
    """Ids of the chosen tokens."""
    target_logprobs: NDArray[np.float32]
    """(tokens, layers, targets)."""
    target_ranks: NDArray[np.int64]
    """(tokens, layers, targets); tokens with a larger logit, so 0 for the most likely one."""


class LensReceipt(Value):
    """What a logit lens read, and how to read its tensor."""

    kind: Literal["logit", "tuned", "jacobian"] = "logit"
    """Which lens it was."""
    name: str | None = None
    """Name under which a tuned or Jacobian lens is registered."""
    sha256: str | None = None
    """Of that lens."""
    layers: tuple[int, ...]
    """Layers, ascending: the first axis of the tensor."""
    n_positions: int
    """Tokens read: the second axis."""
    first_position: int | None = None
    """Position of the first token when they are consecutive."""
    listed: tuple[int, ...] | None = None
    """Positions of the tokens when they are not consecutive."""
    top_k: int
    """Most likely tokens of each: `top_k` ids, then `top_k` log-probabilities."""
    tokens: tuple[int, ...] = ()
    """Chosen tokens: behind these their log-probabilities, then their ranks."""

    @property
    def columns(self) -> int:
        """Numbers for each layer and token: the last axis of the tensor."""
        return 2 * (self.top_k + len(self.tokens))

    @property
    def positions(self) -> tuple[int, ...]:
        """Absolute position of each token read."""
        if self.listed is not None:
            return self.listed
        first = self.first_position or 0
        return tuple(range(first, first + self.n_positions))

    def result(self, activations: Any) -> LensTable:
        """Take the tensor of the lens apart, (layers, tokens, columns).

        Give it itself, or activations of the same request that have it: `output.activations`, those
        of a client, or those of an Inspect log.

        Raises:
            KeyError: there is no tensor of a lens.
            ValueError: it is of another request.
        """
        if hasattr(activations, "numpy") and hasattr(activations, "keys"):
            numbers = activations.numpy(LENS_NAME)
        else:
            found = activations[LENS_NAME] if isinstance(activations, Mapping) else activations
            numbers = np.asarray(found, dtype=np.float32)
        wanted = len(self.layers), self.n_positions, self.columns
        if numbers.shape != wanted:
            raise ValueError(f"{LENS_NAME} has shape {numbers.shape}; the receipt says {wanted}")
        ids, logprobs, chosen, ranks = np.split(
            numbers.swapaxes(0, 1), np.cumsum([self.top_k, self.top_k, len(self.tokens)]), axis=2
        )
        return LensTable(
            positions=self.positions,
            layers=self.layers,
            token_ids=ids.astype(np.int64),
            logprobs=logprobs,
            targets=self.tokens,
            target_logprobs=chosen,
            target_ranks=ranks.astype(np.int64),
        )


LENS_REFERENCE = "lens/1"
"""`$lens` of the short form of a registered lens."""

LensKind = Literal["tuned", "jacobian"]
"""What a lens does to a row `h`: tuned adds `A h + b`, and Jacobian multiplies with `J`."""


class LensEntry(WeightsEntry):
    """A registered lens without its tensors."""

    what: ClassVar[str] = LENS_REFERENCE

    kind: LensKind
    """What it does to a row."""
    n_layers: int
    """Decoder layers of the model that it was fitted to."""

    def resolve(self, lens: LogitLens) -> ResolvedLens:
        """The lens of a request that names this one, with its layers.

        `all` are those that the lens translates, and the last one, which needs no translation.

        Raises:
            SpecError: the lens does not translate one of the layers.
        """
        readable = sorted({*self.layers, self.n_layers - 1})
        layers = tuple(readable) if lens.layers == "all" else lens.layers
        if missing := [layer for layer in layers if layer not in readable]:
            raise SpecError(
                f"lens.layers: {missing}; the lens {lens.name!r} reads the layers {readable}; ask "
                "for some of these, or leave out its name for the logit lens"
            )
        values = {name: getattr(lens, name) for name in LogitLens.model_fields}
        return ResolvedLens.model_construct(**values | {"layers": layers}, entry=self)


class ResolvedLens(LogitLens):
    """A lens of a request whose name has been looked up; clients cannot send one."""

    entry: LensEntry
    """What is registered under the name."""


class EngineLens(Weights):
    """A tuned lens or a Jacobian lens as the engine applies it to rows of the stream.

    A row `h` of a layer becomes `h + A h + b` (tuned) or `J h` (jacobian), computed in float32.
    The model's final norm and unembedding come behind it. The last layer needs no translation.

    Source:
        Tuned lens: Belrose et al. 2023, arXiv:2303.08112.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import EngineLens

        eye = np.eye(256, dtype=np.float32)
        lens = EngineLens(kind="jacobian", n_layers=6, layers=(2,), tensors={"matrix": eye[None]})
        assert lens.hidden == 256
        ```
    """

    shapes: ClassVar[dict[str, dict[str, str]]] = {
        "tuned": {"matrix": "lhh", "bias": "lh"},
        "jacobian": {"matrix": "lhh"},
    }
    what: ClassVar[str] = "lens"

    kind: LensKind
    """What is done to a row."""
    n_layers: Integer
    """Decoder layers of the model that it was fitted to; an engine of another depth refuses it."""
    layers: tuple[int, ...]
    """Layers that it translates, ascending, 0-based."""
    tensors: dict[str, Tensor]
    """By name, with l layers and width h: `matrix` (l, h, h), whose rows are outputs, and of a
    tuned lens `bias` (l, h). float32, float16 and bfloat16 stay as they are on the device."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        layers, hidden = self.layers, self.hidden
        ascending = list(layers) == sorted(set(layers))
        if not layers or not ascending or layers[0] < 0 or layers[-1] >= self.n_layers:
            raise ValueError(
                f"layers {shown(layers)}; name at least one of 0 to {self.n_layers - 1}, ascending"
            )
        for name, axes in self.shapes[self.kind].items():
            wanted = tuple(len(layers) if axis == "l" else hidden for axis in axes)
            tensor = self.tensors[name]
            if tensor.shape != wanted or not hidden:
                raise ValueError(
                    f"tensors.{name} has shape {tensor.shape}; {len(layers)} layers need {wanted}"
                )
        self.check_finite()
        return self

    @property
    def hidden(self) -> int:
        """Width of the rows that it reads."""
        shape = self.tensors["matrix"].shape
        return shape[-1] if shape else 0

    def _identity(self) -> tuple[Any, ...]:
        return self.kind, self.n_layers, list(self.layers)

    @property
    def entry(self) -> LensEntry:
        """What a front-end keeps of it."""
        return LensEntry.model_validate(self, from_attributes=True)

    def reference(self) -> dict[str, Any]:
        """The short form for logs: what it is, without the tensors."""
        return self.entry.reference()


def check_engine_lens(
    lens: EngineLens | LensEntry, facts: EngineFacts, field: str = "lens"
) -> None:
    """Check a lens against the engine that will apply it."""
    if (lens.hidden, lens.n_layers) != (facts.hidden, facts.n_layers):
        raise SpecError(
            f"{field}: fitted to a model of {lens.n_layers} layers and width {lens.hidden}; "
            f"{facts.model} has {facts.n_layers} layers and a stream of width {facts.hidden}"
        )
