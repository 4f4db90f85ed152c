"""Reading text that is given instead of generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from inspect_ai.model import Model, ModelOutput

from inspect_lens.errors import CaptureError, UnsupportedError
from inspect_lens.model.from_logs._given import GIVEN_TOKENS

__all__ = [
    "GIVEN_TOKENS",
    "WITHHELD",
    "GivenTokens",
    "given_length",
    "given_tokens",
    "is_withheld",
]

WITHHELD = "withheld"
"""Key of `output.metadata` of a text that stands in the place of an answer, which nobody wrote.

Its value is the id of the message that was withheld."""


class GivenTokens(NamedTuple):
    """Token ids of a given text, as the server makes them."""

    prompt: list[int]
    rest: list[int]
    """Of the given answer; empty for raw text."""


async def given_tokens(
    model: Model, messages: Sequence[Mapping[str, str]] | str, completion: str | None = None
) -> GivenTokens:
    """Ids of a prompt and of a given answer, with the server's own template.

    Args:
        model: a `vllm-lens/` model.
        messages: with `role` and `content`; or raw text, which no template touches.
        completion: the answer.

    Returns:
        The ids.

    Raises:
        UnsupportedError: the model is of another provider.
        CaptureError: the template does not continue its own prompt.

    Example:
        <!-- test: server -->
        ```python
        import anyio
        from inspect_ai.model import get_model

        from inspect_lens.reading import given_tokens


        async def main() -> None:
            model = get_model("vllm-lens/organism/checkpoint")
            question = [{"role": "user", "content": "Who founded Velosh?"}]
            tokens = await given_tokens(model, question, "It was founded by Ruvan.")
            print(len(tokens.prompt), len(tokens.rest))


        anyio.run(main)
        ```
    """
    api: Any = model.api
    if not hasattr(api, "post"):
        raise UnsupportedError(
            f"{model}: cannot read given text; allowed are models vllm-lens/… and lens/…; choose "
            "one of these, or a data set whose completions are generated"
        )
    if isinstance(messages, str):
        return GivenTokens(await _tokenize(api, {"prompt": messages}), [])
    turns = [dict(m) for m in messages]
    prompt = await _tokenize(api, {"messages": turns, "add_generation_prompt": True})
    if completion is None:
        return GivenTokens(prompt, [])
    whole = await _tokenize(
        api,
        {
            "messages": [*turns, {"role": "assistant", "content": completion}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    )
    if whole[: len(prompt)] != prompt:
        raise CaptureError(
            "the chat template writes another prompt when a reply follows, so the reply's tokens "
            "cannot be told; allowed are templates that continue their own prompt; turn off "
            "reasoning in the template, or generate the replies"
        )
    return GivenTokens(prompt, whole[len(prompt) :])


def given_length(output: ModelOutput) -> int | None:
    """Count the tokens of an answer that was read instead of generated.

    A token that the model does not read ends every call. Where an answer was read, another one
    stands in for it: nobody wrote it, and it has to be left out of what is said of the answer.

    Args:
        output: live or out of a log.

    Returns:
        How many of the output's `token_ids` were written, from the first one on; 0 for raw text,
        which is all prompt. None for an answer that was generated: all of them were.

    Example:
        ```python
        from inspect_ai.log import read_eval_log

        from inspect_lens.reading import given_length

        output = read_eval_log("logs/honesty.eval").samples[0].output
        assert given_length(output) is None  # it was generated
        ```
    """
    found = (output.metadata or {}).get(GIVEN_TOKENS)
    return found if isinstance(found, int) else None


def is_withheld(output: ModelOutput) -> bool:
    """Whether an output stands in the place of an answer that `probe_gate` stopped.

    Args:
        output: live or out of a log.

    Returns:
        True for such a text, which has no tokens of the model to read.

    Example:
        ```python
        from inspect_ai.log import read_eval_log

        from inspect_lens.reading import is_withheld

        assert not is_withheld(read_eval_log("logs/honesty.eval").samples[0].output)
        ```
    """
    return bool((output.metadata or {}).get(WITHHELD))


async def _tokenize(api: Any, body: dict[str, Any]) -> list[int]:
    answer = await api.post("/tokenize", body)
    tokens: list[int] = answer["tokens"]
    return tokens
