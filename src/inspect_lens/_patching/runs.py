"""Prompts that a sweep compares: which of their tokens belong together, and runs of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from inspect_lens._base.arguments import warn_caller
from inspect_lens._base.token_texts import tokens_at
from inspect_lens.errors import SpecError
from inspect_lens.spec import (
    CaptureSpec,
    EditBase,
    Site,
    check_word,
    parse_positions,
    resolve_positions,
    shown,
)

__all__ = ["Align", "Alignment", "Prompt", "align_tokens"]

_ID = re.compile(r"⟨\d+⟩")
"""A token whose text nobody here knows."""

Align = Literal["equal", "ends"]
"""How the tokens of two prompts are paired.

`equal` refuses prompts of unequal token length; `ends` aligns their common beginning from the
left and all other tokens from the right, so that the last token of one name meets the last of the
other."""


@dataclass(frozen=True)
class Alignment:
    """Which tokens of the clean prompt belong to which of the corrupted one."""

    pairs: tuple[int | None, ...]
    """By position in the corrupted prompt, the position in the clean one; None has no partner."""
    first: int
    """Tokens at the beginning that both have."""


def align_tokens(
    clean: Sequence[int],
    corrupted: Sequence[int],
    *,
    mode: Align = "equal",
    texts: tuple[Sequence[str], Sequence[str]] | None = None,
) -> Alignment:
    """Pair the tokens of two prompts by their common beginning and end.

    Args:
        clean: token ids of the prompt that rows come from.
        corrupted: token ids of the prompt that is patched.
        mode: see `Align`.
        texts: of the tokens of both, for the error message; ids stand for them by default.

    Returns:
        The pairs. Between the common beginning and end, `ends` leaves the first tokens of the
        longer side without a partner.

    Raises:
        SpecError: another mode, or prompts of unequal length under `equal`; the message names the
            tokens that differ.

    Example:
        ```python
        from inspect_lens.patch import align_tokens

        assert align_tokens([5, 1, 2, 9], [5, 3, 4, 9]).pairs == (0, 1, 2, 3)
        longer = align_tokens([5, 1, 2, 9], [5, 6, 7, 8, 9], mode="ends")
        assert longer.pairs == (0, None, 1, 2, 3)
        ```
    """
    check_word("align", mode, Align)
    both = min(len(clean), len(corrupted))
    first = next((i for i in range(both) if clean[i] != corrupted[i]), both)
    shift = len(clean) - len(corrupted)
    if shift and mode == "equal":
        raise SpecError(_unequal(clean, corrupted, first, texts))
    from_right = [p + shift for p in range(first, len(corrupted))]
    pairs = [*range(first), *(q if q >= first else None for q in from_right)]
    return Alignment(tuple(pairs), first)


def _unequal(
    clean: Sequence[int],
    corrupted: Sequence[int],
    first: int,
    texts: tuple[Sequence[str], Sequence[str]] | None,
) -> str:
    rest = min(len(clean), len(corrupted)) - first
    tail = next((i for i in range(rest) if clean[-1 - i] != corrupted[-1 - i]), rest)
    pair = texts or ([f"{i}" for i in clean], [f"{i}" for i in corrupted])
    parts = []
    for name, ids, pieces in (("clean", clean, pair[0]), ("corrupted", corrupted, pair[1])):
        differ = list(pieces[first : len(ids) - tail])
        listed = differ if len(differ) <= _MOST_LISTED else [*differ[:_MOST_LISTED], "…"]
        parts.append(f"{name}[{first}:{len(ids) - tail}] = {listed}")
    return (
        f"corrupted: has {len(corrupted)} tokens and the clean prompt {len(clean)}; they differ at "
        f"{' and '.join(parts)}. Choose words of as many tokens, or pass align='ends', which "
        "pairs these tokens from the right"
    )


_MOST_LISTED = 20
"""Tokens in an error."""


def choose_positions(
    asked: Sequence[int] | Sequence[bool] | None, alignment: Alignment, *, skip_equal: bool
) -> tuple[int, ...]:
    """Positions of the corrupted prompt to patch, ascending."""
    n = len(alignment.pairs)
    if asked is None:
        start = alignment.first if skip_equal and alignment.first < n else 0
        return tuple(p for p in range(start, n) if alignment.pairs[p] is not None)
    parsed = parse_positions(list(asked), field="positions")
    chosen = tuple(sorted(resolve_positions(parsed, n_prompt=n, n_max=n, field="positions")))
    alone = [p for p in chosen if alignment.pairs[p] is None]
    if alone:
        raise SpecError(
            f"positions: {alone} of the corrupted prompt have no partner in the clean one; leave "
            "them out, or use prompts of equal token length"
        )
    return chosen


def find_subject(
    subject: str | Sequence[int], texts: Sequence[str], *, where: str = ""
) -> tuple[int, ...]:
    n = len(texts)
    if not isinstance(subject, str):
        parsed = parse_positions(list(subject), field="subject")
        return tuple(sorted(resolve_positions(parsed, n_prompt=n, n_max=n, field="subject")))
    if texts and all(_ID.fullmatch(text) for text in texts):
        raise SpecError(
            f"subject={subject!r}: is found by the texts of tokens, and no tokenizer of "
            f"{where or 'the model'} is on this machine; give the positions of its tokens, or run "
            "where the model's name is the folder of its checkpoint"
        )
    whole = "".join(texts)
    times = whole.count(subject) if subject else 0
    if times != 1:
        raise SpecError(
            f"subject={shown(subject)} stands {times} times in the prompt {shown(whole)}; allowed "
            "is a text that stands there once, or the positions of its tokens"
        )
    start = whole.index(subject)
    return tuple(range(*tokens_at(texts, start, start + len(subject))))


Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A prompt as raw text, token ids or chat messages.

Messages that end with one of the assistant are continued
there; after any other the assistant begins to speak."""


class Run(NamedTuple):
    """One prompt to run once."""

    ids: Sequence[int]
    edits: tuple[EditBase, ...] = ()


class Rows(NamedTuple):
    """What a prompt's tokens have at some layers."""

    layers: tuple[int, ...]
    values: NDArray[np.float32]
    """(layers, tokens, width)."""


class Runs(Protocol):
    """An engine as patching uses it."""

    def tokens(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt."""

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Text of each token."""

    def capture(self, ids: Sequence[int], layers: Sequence[int] | None, site: Site) -> Rows:
        """Rows of a prompt, at all served layers where None are named."""

    def logprobs(
        self, runs: Sequence[Run], tokens: Sequence[int], in_flight: int
    ) -> Iterator[tuple[int, tuple[float, ...]]]:
        """Natural log-probabilities of tokens after each run, with its index, as they come."""


def next_token(runs: Runs, prompt: Prompt, ids: Sequence[int], answer: str | int, name: str) -> int:
    """The first token of an answer behind a prompt."""
    if isinstance(answer, int):
        return answer
    if isinstance(prompt, str):
        longer: Prompt = prompt + answer
    elif is_chat(prompt):
        *before, last = messages_of(prompt)
        if last["role"] == "assistant":
            longer = [*before, last | {"content": f"{last['content']}{answer}"}]
        else:
            longer = [*before, last, {"role": "assistant", "content": answer}]
    else:
        raise SpecError(f"{name}={shown(answer)}: a prompt of token ids needs a token id here")
    found = runs.tokens(longer)
    n = len(ids)
    if len(found) <= n or list(found[:n]) != list(ids):
        raise SpecError(
            f"{name}={shown(answer)}: joins the last token of the prompt; let the prompt end "
            "before the space, and the answer begin with it, such as ' Paris'"
        )
    return int(found[n])


def warn_without_space(prompt: Prompt, **answers: str | int | None) -> None:
    """Warn of an answer that would continue the prompt's last word."""
    if isinstance(prompt, str):
        text = prompt
    elif is_chat(prompt) and messages_of(prompt)[-1].get("role") == "assistant":
        text = str(messages_of(prompt)[-1].get("content", ""))
    else:
        return  # of token ids, or the beginning of a turn
    for name, answer in answers.items():
        if isinstance(answer, str) and _is_letter(text[-1:]) and _is_letter(answer[:1]):
            last = text.split()[-1]
            warn_caller(
                f"{name}={shown(answer)}: goes on in the word that the prompt ends with, "
                f"{last + answer!r}, which the model hardly ever writes; where it is a word of its "
                f"own, write {' ' + answer!r}",
            )


def _is_letter(text: str) -> bool:
    # Other scripts write no space between words.
    return text.isascii() and text.isalnum()


def capture_spec(layers: Sequence[int] | None, site: Site) -> CaptureSpec:
    """What `Runs.capture` asks an engine for."""
    wanted: Any = "all" if layers is None else tuple(layers)
    return CaptureSpec(layers=wanted, site=site, positions="prompt")


def is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)


def messages_of(prompt: Prompt) -> list[dict[str, Any]]:
    """The messages of a prompt that is a chat."""
    return [dict(message) for message in cast("Sequence[Mapping[str, Any]]", prompt)]


def chat_ending(prompt: Prompt) -> dict[str, Any]:
    """Arguments of the chat template: an answer that has begun goes on."""
    goes_on = messages_of(prompt)[-1]["role"] == "assistant"
    return {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
