"""Tokens of a prompt that are named by their text or ids become positions of that prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from inspect_lens._vllm.http.bodies import pattern_budget
from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec import (
    EngineFacts,
    LensRequest,
    PatternBudget,
    Positions,
    TokenMatch,
    check_lens,
    judging,
    sampled_match,
    shown,
)


def needs_prompt(request: LensRequest) -> bool:
    """Whether a request names tokens of its prompt by what they are."""
    capture = request.capture
    return (capture is not None and isinstance(capture.positions, TokenMatch)) or any(
        _in_prompt(edit.positions) is not None for edit in request.edits
    )


def _in_prompt(positions: Positions) -> TokenMatch | None:
    """What is to be found in the prompt; sampled tokens are found in the step that feeds them."""
    if isinstance(positions, TokenMatch) and sampled_match(positions) is None:
        return positions
    return None


def with_positions(request: LensRequest, ids: Sequence[int] | None, processor: Any) -> LensRequest:
    """Put positions in the place of what tokens match."""
    if not needs_prompt(request):
        return request
    if ids is None:
        raise UnsupportedError("prompt embeddings: the lens needs a prompt of tokens")
    budget, key = pattern_budget(), tuple(ids)
    if (prompt := budget.prompts.get(key)) is None:
        prompt = budget.prompts[key] = _Prompt(ids, processor.tokenizer, budget)
    changed: dict[str, Any] = {}
    capture = request.capture
    if capture is not None and isinstance(capture.positions, TokenMatch):
        found = prompt.find(capture.positions, "capture.positions")
        changed["capture"] = capture.model_copy(update={"positions": found})
    changed["edits"] = tuple(
        edit.model_copy(update={"positions": prompt.find(match, f"edits[{i}].positions")})
        if (match := _in_prompt(edit.positions)) is not None
        else edit
        for i, edit in enumerate(request.edits)
    )
    return request.model_copy(update=changed)


class _Prompt:
    """A prompt, read when a pattern needs its text."""

    def __init__(self, ids: Sequence[int], tokenizer: Any, budget: PatternBudget) -> None:
        self._ids, self._tokenizer = list(ids), tokenizer
        self._text = ""
        self._budget = budget
        self._found: dict[str, list[list[int]]] = {}
        self._spans: list[tuple[int, int]] | None = None

    def find(self, match: TokenMatch, field: str) -> tuple[int, ...]:
        """Positions that a match means."""
        if match.token_ids is not None:
            wanted = frozenset(match.token_ids)
            found = [[i] for i, token in enumerate(self._ids) if token in wanted]
        else:
            assert match.pattern is not None
            if match.pattern not in self._found:
                self._found[match.pattern] = self._matching(match.pattern, field)
            found = self._found[match.pattern]
        return tuple(match.choose(found, len(self._ids), field=field))

    def _matching(self, pattern: str, field: str) -> list[list[int]]:
        if self._tokenizer is None:
            raise UnsupportedError(
                f"{field}.pattern: this engine was started without a tokenizer; give token_ids"
            )
        if self._spans is None:
            with judging(field):
                self._text, self._spans = spans_of(self._ids, self._tokenizer)
        found, first = [], 0
        for start, stop in self._budget.spans(pattern, self._text, field=field):
            while first < len(self._spans) and self._spans[first][1] <= start:
                first += 1
            tokens = []
            for i in range(first, len(self._spans)):
                if self._spans[i][0] >= stop:
                    break
                if self._spans[i][1] > start:
                    tokens.append(i)
            if tokens:
                found.append(tokens)
        return found


def spans_of(ids: Sequence[int], tokenizer: Any) -> tuple[str, list[tuple[int, int]]]:
    """The text of some tokens, and where in it each token lies.

    Tokens that are parts of one character lie where the character lies.
    """
    tokens = [int(token) for token in ids]
    if getattr(tokenizer, "is_fast", False):
        text = tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        again = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        if again["input_ids"] == tokens:
            return text, [(start, stop) for start, stop in again["offset_mapping"]]
    if len(tokens) > _MOST_TOKENS:
        raise SpecError(
            f"a pattern for a prompt of {len(tokens)} tokens, which its tokenizer would make in "
            f"another way from its text: {_MOST_TOKENS} at most; give token_ids, or positions"
        )
    return _read_one_by_one(tokens, tokenizer)


def _read_one_by_one(tokens: list[int], tokenizer: Any) -> tuple[str, list[tuple[int, int]]]:
    text = ""
    spans: list[tuple[int, int]] = []
    before: list[int] = []
    group: list[int] = []
    for i, token in enumerate(tokens):
        group.append(token)
        # Some tokenizers leave out a space at the beginning, so each is read behind another one.
        known = tokenizer.decode(before, skip_special_tokens=False) if before else ""
        piece = tokenizer.decode(before + group, skip_special_tokens=False)[len(known) :]
        is_open = piece.endswith("\N{REPLACEMENT CHARACTER}") and len(group) < _MOST_PARTS
        if is_open and i + 1 < len(tokens):
            continue
        spans += [(len(text), len(text) + len(piece))] * len(group)
        text += piece
        before, group = group, []
    return text, spans


_MOST_PARTS: Final = 4
"""Tokens of one character in UTF-8."""
_MOST_TOKENS: Final = 1 << 14
"""Read one by one: some tenths of a second."""


def with_token_ids(request: LensRequest, processor: Any, facts: EngineFacts) -> LensRequest:
    """Put ids in the place of texts."""
    lens = request.lens
    if lens is None or not lens.texts:
        return request
    tokenizer = processor.tokenizer
    if tokenizer is None:
        raise UnsupportedError(
            "lens.tokens: this engine was started without a tokenizer; give ids instead of texts"
        )
    with judging("lens.tokens"):
        ids = [_id_of(t, tokenizer) if isinstance(t, str) else t for t in lens.tokens]
    if len(set(ids)) != len(ids):
        raise SpecError(f"lens.tokens: {shown(lens.tokens)} are the ids {ids}; name each once")
    named = lens.model_copy(update={"tokens": tuple(ids)})
    check_lens(named, facts)
    return request.model_copy(update={"lens": named})


def _id_of(text: str, tokenizer: Any) -> int:
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    if len(ids) != 1:
        raise SpecError(
            f"lens.tokens: {shown(text)} is {len(ids)} tokens of this model, {shown(ids)}; give a "
            "text that is one token (most words need the space in front), or ids"
        )
    return int(ids[0])
