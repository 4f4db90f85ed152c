"""The logit lens: which tokens the residual stream of a layer would predict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from inspect_lens.spec.values._names import check_name
from inspect_lens.spec.values._strict import integer, shown

from ._capture import Layers, Transport, parse_layers
from ._positions import Positions, parse_positions

__all__ = ["LENS_NAME", "MOST_TOKENS", "MOST_TOP_K", "LensReceipt", "LensTable", "LogitLens"]

LENS_NAME: Final = "logit_lens"
"""Name of its tensor among the activations of a result."""

MOST_TOP_K: Final = 100
"""Most likely tokens that a request may ask for at each layer and position."""

MOST_TOKENS: Final = 64
"""Tokens whose log-probability and rank a request may ask for."""


class LogitLens(BaseModel):
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

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str | None = None
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

    @field_validator("name", mode="before")
    @classmethod
    def _name(cls, value: Any) -> str | None:
        return None if value is None else check_name(value)

    @field_validator("layers", mode="before")
    @classmethod
    def _layers(cls, value: Any) -> Any:
        return parse_layers(value)

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


class LensReceipt(BaseModel):
    """What a logit lens read, and how to read its tensor."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
        """Take the tensor of the lens apart.

        Args:
            activations: of the same request, by name: `output.activations`, those of a client, or
                those of an Inspect log; or the tensor itself, (layers, tokens, columns).

        Returns:
            The arrays.

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
            numbers.swapaxes(0, 1),
            np.cumsum([self.top_k, self.top_k, len(self.tokens)]),
            axis=2,
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
