"""Which tokens of a request are meant. Positions are absolute over prompt and completion."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, Self, TypeAlias, cast, get_args

from pydantic import (
    SerializerFunctionWrapHandler,
    StrictBool,
    field_validator,
    model_serializer,
    model_validator,
)

from inspect_lens.errors import SpecError

from ._values import Value, integer, integers, judge_patterns, plain_number, read_as, shown

__all__ = [
    "PatternBudget",
    "Phase",
    "PositionName",
    "Positions",
    "TokenMatch",
    "in_phase",
    "is_mask",
    "parse_positions",
    "phase_range",
    "resolve_positions",
]

MOST_PATTERN: Final = 1000
"""Characters of a pattern."""
MOST_SECONDS: Final = 0.25
"""For all patterns on all prompts of one body."""
MOST_WORK: Final = 1 << 26
"""Instructions of a compiled pattern times bytes of a prompt: a search takes that many steps where
its automaton does not fit into memory, and cannot be interrupted."""
_MEMORY: Final = 1 << 19
"""Bytes of one compiled pattern; `re2.compile` keeps 128 of them."""

SYNTAX: Final = (
    "patterns have the syntax of RE2, which has no look-around, no back-references and repeats at "
    "most 1000 times"
)


def _compiled(pattern: str) -> Any:
    import re2

    options = re2.Options()
    options.max_mem = _MEMORY
    options.log_errors = False
    options.never_capture = True  # only whole matches are asked for
    return re2.compile(pattern, options)


def check_pattern(pattern: str) -> str:
    """The pattern, if it can be run."""
    import re2

    if not 0 < len(pattern) <= MOST_PATTERN:
        raise ValueError(f"has {len(pattern)} characters; give 1 to {MOST_PATTERN}")
    try:
        _compiled(pattern)
    except UnicodeEncodeError:
        raise ValueError(f"{shown(pattern)} holds half of a surrogate pair") from None
    except re2.error as error:
        why = error.args[0].decode(errors="replace") if error.args else "cannot be compiled"
        if "too large" in why:
            why = "it is too large once its classes and repetitions are written out"
        raise ValueError(
            f"{shown(pattern)} is no regular expression that can be run here: {shown(why)}; "
            f"{SYNTAX}. Use a simpler pattern, or give token_ids or positions"
        ) from None
    return pattern


def check_patterns(positions: Iterable[Positions]) -> None:
    """Judge all patterns of a request together; each alone was judged by `check_pattern`."""
    judge_patterns({p.pattern for p in positions if isinstance(p, TokenMatch) and p.pattern})


class PatternBudget:
    """The time that patterns of one body may take, however many prompts it has."""

    def __init__(self) -> None:
        self._left_s = MOST_SECONDS
        self.prompts: dict[tuple[int, ...], Any] = {}
        """What is known of prompts of the body: a server asks for each before its answer begins,
        and where it is sealed."""

    def spans(self, pattern: str, text: str, *, field: str) -> Iterator[tuple[int, int]]:
        """Where a pattern matches: begin and end in characters, matches of no text left out."""
        compiled = _compiled(pattern)
        work = int(compiled.programsize) * len(text.encode())
        if work > MOST_WORK:
            raise SpecError(
                f"{field}.pattern: {compiled.programsize} instructions of {shown(pattern)} on a "
                f"prompt of {len(text)} characters are {work} steps, and {MOST_WORK} is the most; "
                "narrower classes and fewer repetitions make fewer (\\pL has 1200, [A-Za-z] one); "
                "or give token_ids or positions"
            )
        # Each search is linear, but one behind each match may read the rest of the prompt.
        until = time.monotonic() + self._left_s
        try:
            for one in compiled.finditer(text):
                if time.monotonic() > until:
                    break
                start, stop = one.span()
                if stop > start:
                    yield start, stop
        finally:
            self._left_s = until - time.monotonic()
        if self._left_s <= 0:
            raise SpecError(
                f"{field}.pattern: the patterns of this request take more than {MOST_SECONDS} s "
                "on its prompts; give a simpler pattern, fewer prompts, token_ids or positions"
            )


Which = Literal["all", "first", "last"]


class TokenMatch(Value):
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
                    f"{'none' if self.exclude else 'one'} of the ids is meant"
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
        return shown(self.model_dump(exclude_defaults=True))

    def choose(self, found: Sequence[Sequence[int]], n_prompt: int, *, field: str) -> list[int]:
        """The positions that are meant, ascending, each once.

        Args:
            found: positions of the tokens of each match, in order.
            n_prompt: tokens of the prompt.
            field: path of the field, for error messages.

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
                f"{field}={self}: no token of the prompt of {n_prompt} tokens matches"
                + (", so none would be excluded; " if self.exclude else "; ")
                + "it is matched with its chat template, as the model gets it"
            )
        if self.exclude:
            chosen = set(range(n_prompt)) - chosen
            if not chosen:
                raise SpecError(
                    f"{field}={self}: all {n_prompt} tokens of the prompt are excluded, so none is "
                    "left; match fewer, or leave exclude out"
                )
        return sorted(chosen)


PositionName = Literal["all", "prompt", "completion", "last", "last_prompt"]
"""Names for ranges of tokens."""
Positions: TypeAlias = PositionName | tuple[StrictBool, ...] | tuple[int, ...] | TokenMatch
"""Which tokens of a request are meant: a named range, a mask, numbers or a match.

A mask has one boolean per prompt token. Negative numbers count from the end of the prompt. A
`TokenMatch` means the tokens that match it. `last` is the last token that is fed to the model,
`last_prompt` the last one of the prompt."""

Phase = Literal["prefill", "decode", "both"]
"""`prefill`: tokens of the prompt; `decode`: sampled tokens that are fed back.

A token's position decides, not the step that computes it."""


def parse_positions(value: object, *, field: str, may_match: bool = False) -> Positions:
    """Read positions as a user writes them."""
    value = plain_number(value)
    if isinstance(value, str):
        if value in get_args(PositionName):
            return cast("PositionName", value)
        raise SpecError(
            f"{field}={shown(value)}; allowed are {', '.join(get_args(PositionName))}, "
            "a list of integers, or a list of booleans over the prompt"
        )
    if isinstance(value, int) and not isinstance(value, bool):
        return (integer(value),)
    if isinstance(value, TokenMatch | Mapping):
        if not may_match:
            raise SpecError(
                f"{field}={shown(value)}: tokens are matched for captures and edits, by the server "
                "that has the prompt; give a name, a list of integers, or one of booleans"
            )
        return read_as(TokenMatch, value, at=field) if isinstance(value, Mapping) else value
    if isinstance(value, Iterable):
        items = tuple(plain_number(item) for item in cast("Iterable[object]", value))
        kinds = set(map(type, items))
        if kinds == {bool}:
            if not any(items):
                raise SpecError(f"{field}: the mask of {len(items)} tokens selects none of them")
            return items
        if kinds and all(issubclass(kind, int) and kind is not bool for kind in kinds):
            numbers = items if kinds == {int} else tuple(map(integer, items))
            if len(set(numbers)) != len(numbers):
                raise SpecError(f"{field}: a position is named twice in {shown(numbers)}")
            return numbers
    raise SpecError(
        f"{field}={shown(value)}; allowed are {', '.join(get_args(PositionName))}, "
        "a non-empty list of integers, or one of booleans over the prompt"
    )


def is_mask(positions: Positions) -> bool:
    """Tell whether positions are a mask, one boolean per prompt token."""
    return isinstance(positions, tuple) and isinstance(positions[0], bool)


def phase_range(phase: Phase, n_prompt: int, n_max: int) -> range:
    """Positions of a phase."""
    start = n_prompt if phase == "decode" else 0
    return range(start, n_prompt if phase == "prefill" else max(n_prompt, n_max))


def in_phase(
    where: range | tuple[int, ...], phase: Phase, *, n_prompt: int, n_max: int
) -> range | tuple[int, ...]:
    """Keep the positions that belong to a phase."""
    span = phase_range(phase, n_prompt, n_max)
    if isinstance(where, range):
        start = max(where.start, span.start)
        return range(start, max(start, min(where.stop, span.stop)))
    return tuple(p for p in where if p in span)


def resolve_positions(
    positions: Positions, *, n_prompt: int, n_max: int, field: str
) -> range | tuple[int, ...]:
    """Turn positions into a range or explicit positions of one request."""
    if isinstance(positions, str):
        return {
            "all": range(n_max),
            "prompt": range(n_prompt),
            "completion": range(n_prompt, n_max),
            "last": range(n_max - 1, n_max),
            "last_prompt": range(n_prompt - 1, n_prompt),
        }[positions]
    if isinstance(positions, TokenMatch):
        raise SpecError(
            f"{field}={positions}: which tokens match is known to the server alone; read the "
            "positions in its receipt"
        )
    if is_mask(positions):
        if len(positions) != n_prompt:
            raise SpecError(
                f"{field}: the mask has {len(positions)} booleans and the prompt has {n_prompt} "
                "tokens; give one boolean per token of the prompt, those of its template included"
            )
        return tuple(i for i, is_on in enumerate(positions) if is_on)
    resolved = tuple(p + n_prompt if p < 0 else p for p in positions)
    for asked, position in zip(positions, resolved, strict=True):
        if not 0 <= position < n_max:
            raise SpecError(
                f"{field}: position {asked} is outside this request, which has {n_prompt} "
                f"prompt tokens and feeds at most {n_max} tokens to the model "
                "(the last sampled token is never fed); negative positions count from the "
                "end of the prompt"
            )
    if len(set(resolved)) != len(resolved):
        raise SpecError(f"{field}: two of {shown(positions)} are the same position of this prompt")
    return resolved
