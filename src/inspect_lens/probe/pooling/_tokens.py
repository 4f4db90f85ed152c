"""Which tokens of a text a probe reads: turns, reasoning, answers, tool calls, patterns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import SpecError

__all__ = ["SELECTIONS", "TokenText", "select_tokens"]

Span = tuple[int, int]

_TURNS: Final = (
    re.compile(r"<\|im_start\|>(?P<role>\w+)\n(?P<text>.*?)(?=<\|im_end\|>|\Z)", re.DOTALL),
    re.compile(
        r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\n\n(?P<text>.*?)"
        r"(?=<\|eot_id\|>|<\|eom_id\|>|\Z)",
        re.DOTALL,
    ),
    re.compile(r"<start_of_turn>(?P<role>\w+)\n(?P<text>.*?)(?=<end_of_turn>|\Z)", re.DOTALL),
    # Some of these templates end a turn with the next one only.
    re.compile(
        r"<\|(?P<role>user|assistant)\|>\n?(?P<text>.*?)"
        r"(?=<\|(?:end|endoftext|system|user|assistant|tool|observation)\|>|</s>|\Z)",
        re.DOTALL,
    ),
)
"""ChatML (Qwen and others), Llama 3, Gemma; Phi, Zephyr and the model organism."""
_THINK: Final = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)
_TOOL_CALL: Final = re.compile(
    r"<tool_call>(.*?)(?:</tool_call>|\Z)|<\|python_tag\|>(.*?)(?:<\|eom_id\|>|<\|eot_id\|>|\Z)",
    re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class TokenText:
    """The tokens of one request as text.

    Args:
        pieces: text of each token, prompt and completion; joined they are the whole text.
        n_prompt: how many of them are the prompt.
        special: (tokens,) bool, tokens of the template such as `<|im_end|>` and end-of-text;
            no selection keeps them. None: none is special.
    """

    pieces: tuple[str, ...]
    n_prompt: int
    special: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.n_prompt <= len(self.pieces):
            raise SpecError(
                f"n_prompt={self.n_prompt}; allowed is 0 to the number of tokens, "
                f"{len(self.pieces)}; count the prompt's tokens"
            )
        if self.special is not None and len(self.special) != len(self.pieces):
            raise SpecError(
                f"special: {len(self.special)} values for {len(self.pieces)} tokens; allowed is "
                "one bool each; leave it out when no token is special"
            )

    @property
    def text(self) -> str:
        """All pieces, joined."""
        return "".join(self.pieces)

    def spans(self) -> list[Span]:
        """Start and end of each token in `text`."""
        ends = np.cumsum([len(piece) for piece in self.pieces]).tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True)) if ends else []


def select_tokens(
    tokens: TokenText, selection: str = "completion", *, keep_special: bool = False
) -> NDArray[np.bool_]:
    """Choose tokens (tokens,) by kind, such as answer, reasoning or tool call.

    A token is chosen by a span of text when it overlaps it, and never if it is marked special.

    Args:
        tokens: of one request.
        selection: `completion` (the default of every probe), `prompt`, `all`, `last:K` (the
            last K tokens of the completion), `assistant` (all turns of the assistant, found by
            the markers of ChatML, Llama 3, Gemma, Phi and Zephyr templates, and the completion),
            `user` (all turns of the user, found likewise, without what the template adds),
            `reasoning` (inside `<think>`), `answer` (the completion after it), `tool_calls`
            (inside `<tool_call>` or after `<|python_tag|>`), or `regex:PATTERN` (the first
            group of every match in the completion, or the whole match without a group).
        keep_special: keep special tokens too.

    Raises:
        SpecError: an unknown selection, or a pattern that does not compile.

    Example:
        ```python
        from inspect_lens.probe import TokenText, select_tokens

        tokens = TokenText(pieces=("Who", "?", "It", " is", " Ruvan"), n_prompt=2)
        assert select_tokens(tokens, "completion").tolist() == [False, False, True, True, True]
        ```
    """
    name, colon, argument = selection.partition(":")
    known = {one.partition(":")[0] for one in SELECTIONS}
    if name not in known or bool(colon) != (name in ("last", "regex")):
        raise SpecError(
            f"selection={selection!r}; allowed are {', '.join(SELECTIONS)}; correct the name"
        )
    prompt = np.arange(len(tokens.pieces)) < tokens.n_prompt
    kept = np.ones_like(prompt)
    if tokens.special is not None and not keep_special:
        kept = ~np.asarray(tokens.special, dtype=bool)
    if name in _SPANS:
        start = sum(len(piece) for piece in tokens.pieces[: tokens.n_prompt])
        chosen = _overlap(tokens, _SPANS[name](tokens.text, start, argument)) & ~prompt
    elif name == "last":
        chosen = _last(~prompt & kept, argument)
    elif name == "assistant":
        chosen = _turns(tokens, ("assistant", "model")) | ~prompt
    elif name == "user":
        chosen = _turns(tokens, ("user",)) & prompt
    else:
        chosen = {"completion": ~prompt, "prompt": prompt, "all": prompt | ~prompt}[name]
    return chosen & kept


def _last(where: NDArray[np.bool_], argument: str) -> NDArray[np.bool_]:
    if not argument.isdecimal() or int(argument) < 1:
        raise SpecError(
            f"selection='last:{argument}'; allowed is a positive number of tokens, as in last:5"
        )
    chosen = np.zeros_like(where)
    chosen[np.flatnonzero(where)[-int(argument) :]] = True
    return chosen


def _turns(tokens: TokenText, roles: tuple[str, ...]) -> NDArray[np.bool_]:
    matches = (m for pattern in _TURNS for m in pattern.finditer(tokens.text))
    return _overlap(tokens, [m.span("text") for m in matches if m["role"] in roles])


def _reasoning(text: str, start: int, _: str) -> list[Span]:
    # Some templates open the tag at the end of the prompt, so look from there.
    return [m.span(1) for m in _THINK.finditer(text) if m.end(1) > start]


def _answer(text: str, start: int, _: str) -> list[Span]:
    matches = [m for m in _THINK.finditer(text) if m.end() > start]
    begin = max((m.end() for m in matches), default=start)
    # White space after the tag belongs to neither.
    begin += len(text[begin:]) - len(text[begin:].lstrip()) if matches else 0
    return [(begin, len(text))]


def _tool_calls(text: str, start: int, _: str) -> list[Span]:
    matches = (m for m in _TOOL_CALL.finditer(text) if m.end() > start)
    return [m.span(1 if m[1] is not None else 2) for m in matches]


def _regex(text: str, start: int, argument: str) -> list[Span]:
    try:
        pattern = re.compile(argument, re.DOTALL)
    except re.error as error:
        raise SpecError(
            f"selection='regex:{argument}': {error}; allowed is a regular expression of Python"
        ) from None
    return [m.span(1 if pattern.groups else 0) for m in pattern.finditer(text, start)]


def _overlap(tokens: TokenText, wanted: Iterable[Span]) -> NDArray[np.bool_]:
    spans: Sequence[Span] = tokens.spans()
    chosen = np.zeros(len(spans), dtype=bool)
    if not spans:
        return chosen
    starts, ends = (np.array(side) for side in zip(*spans, strict=True))
    for begin, end in wanted:
        chosen |= (starts < end) & (ends > begin)
    return chosen


_SPANS: Final[dict[str, Callable[[str, int, str], list[Span]]]] = {
    "reasoning": _reasoning,
    "answer": _answer,
    "tool_calls": _tool_calls,
    "regex": _regex,
}
"""Of the text, its completion's first character, and what stands behind a colon: what is read."""
SELECTIONS: Final = (
    "completion", "prompt", "all", "last:K", "assistant", "user", "reasoning", "answer",
    "tool_calls", "regex:PATTERN",
)  # fmt: skip
"""Names of the token selections that `select_tokens` takes."""
