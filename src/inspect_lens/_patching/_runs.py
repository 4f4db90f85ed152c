"""What patching asks of an engine, whichever answers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import SpecError
from inspect_lens.spec import CaptureSpec, EditBase, Site, shown

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
            warnings.warn(
                f"{name}={shown(answer)}: goes on in the word that the prompt ends with, "
                f"{last + answer!r}, which the model hardly ever writes; where it is a word of its "
                f"own, write {' ' + answer!r}",
                stacklevel=3,
            )


def _is_letter(text: str) -> bool:
    # Other scripts write no space between words.
    return text.isascii() and text.isalnum()


def capture_spec(layers: Sequence[int] | None, site: Site) -> CaptureSpec:
    """What `Runs.capture` asks an engine for."""
    wanted: Any = "all" if layers is None else tuple(layers)
    return CaptureSpec(layers=wanted, site=site, positions="prompt")


def is_chat(prompt: Prompt) -> bool:
    """Whether a prompt is chat messages."""
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)


def messages_of(prompt: Prompt) -> list[dict[str, Any]]:
    """The messages of a prompt that is a chat."""
    return [dict(message) for message in cast("Sequence[Mapping[str, Any]]", prompt)]


def chat_ending(prompt: Prompt) -> dict[str, Any]:
    """Arguments of the chat template: an answer that has begun goes on."""
    goes_on = messages_of(prompt)[-1]["role"] == "assistant"
    return {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
