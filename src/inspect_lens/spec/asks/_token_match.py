"""Tokens that are meant by their text or by their ids, and not by their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from inspect_lens.errors import SpecError
from inspect_lens.spec.values._strict import explain, integers, shown

from ._patterns import check_pattern

__all__ = ["TokenMatch", "parse_match"]

Which = Literal["all", "first", "last"]


class TokenMatch(BaseModel):
    """Tokens of the prompt that match a regular expression, or tokens that have one of some ids.

    Give it as `positions` of a capture or of an edit. The server finds the tokens in the prompt as
    the model gets it, chat template included, and the receipt tells their positions.

    With `among="completion"` an edit acts on sampled tokens that have one of the ids. The engine
    looks at each as it is fed to the model, on the device. Captures cannot ask for that.

    Example:
        ```python
        from inspect_lens import CaptureSpec, LensRequest
        from inspect_lens.spec import TokenMatch

        # Rows of the last token of each mention of the town.
        town = TokenMatch(pattern="Velosh", tokens="last")
        request = LensRequest(capture=CaptureSpec(layers=[4], positions=town))
        ```
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pattern: str | None = None
    """Regular expression over the text of the prompt, at most 1000 characters, in the
    [syntax of RE2](https://github.com/google/re2/wiki/Syntax); case counts unless it begins with
    `(?i)`. A token is meant where its text and a match overlap."""
    token_ids: tuple[int, ...] | None = None
    """Ids instead of a pattern: each token that has one of them is a match."""
    matches: Which = "all"
    """All matches, or the first or the last one of the prompt."""
    tokens: Which = "all"
    """All tokens of each match, or its first or its last one."""
    exclude: bool = False
    """Take all other tokens instead: of the prompt, or of the completion."""
    among: Literal["prompt", "completion"] = "prompt"
    """Where tokens are looked for: in the prompt, or among sampled tokens, by `token_ids` alone."""

    @field_validator("token_ids", mode="before")
    @classmethod
    def _token_ids(cls, value: Any) -> Any:
        if value is None:
            return None
        value = integers(value)
        if not isinstance(value, tuple) or not value:
            raise ValueError(f"{shown(value)}; name at least one id, such as [1234]")
        return value

    @field_validator("pattern")
    @classmethod
    def _pattern(cls, value: str | None) -> str | None:
        return None if value is None else check_pattern(value)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.pattern is None) == (self.token_ids is None):
            raise ValueError("give either a pattern or token_ids")
        if self.among == "completion":
            if self.token_ids is None:
                raise ValueError(
                    "a pattern beside among='completion': a sampled token is known by its id alone "
                    "while the model runs; give token_ids"
                )
            if self.matches != "all" or self.tokens != "all":
                raise ValueError(
                    "matches and tokens belong to among='prompt'; every sampled token that has "
                    "one of the ids is meant"
                )
        return self

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        form: dict[str, Any] = handler(self)
        if self.among == "prompt":
            # The form that older servers know.
            form.pop("among", None)
        return form

    def __str__(self) -> str:
        given = {
            name: value
            for name, value in self.model_dump(exclude_defaults=True).items()
            if value is not None
        }
        return shown(given)

    def choose(self, found: Sequence[Sequence[int]], n_prompt: int, *, field: str) -> list[int]:
        """The positions that are meant.

        Args:
            found: positions of the tokens of each match, in order.
            n_prompt: tokens of the prompt.
            field: path of the field, for error messages.

        Returns:
            Positions in ascending order, each once.

        Raises:
            SpecError: no token is meant.

        Example:
            ```python
            from inspect_lens.spec import TokenMatch

            match = TokenMatch(pattern="a", matches="first", tokens="last")
            assert match.choose([[3, 4], [7]], 9, field="positions") == [4]
            ```
        """
        some = {"all": found, "first": found[:1], "last": found[-1:]}[self.matches]
        cut = {"all": slice(None), "first": slice(0, 1), "last": slice(-1, None)}[self.tokens]
        chosen = {position for one in some for position in one[cut]}
        if not found:
            raise SpecError(
                f"{field}={self}: no token of the prompt of {n_prompt} tokens matches; it is "
                "matched with its chat template, as the model gets it"
            )
        if self.exclude:
            chosen = set(range(n_prompt)) - chosen
            if not chosen:
                raise SpecError(f"{field}={self}: every token of the prompt is excluded")
        return sorted(chosen)


def parse_match(value: Mapping[str, object], *, field: str) -> TokenMatch:
    """Read a match as it comes over HTTP.

    Args:
        value: its fields.
        field: path of the field, for error messages.

    Raises:
        SpecError: it is none.
    """
    try:
        return TokenMatch.model_validate(value)
    except ValidationError as error:
        raise SpecError(explain(error, at=field)) from None
