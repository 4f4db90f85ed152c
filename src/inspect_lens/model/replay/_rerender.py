"""Feeding a logged conversation to a model that did not have it: text in, activations out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from inspect_ai.model import ChatMessage, ChatMessageAssistant, Model, messages_to_openai
from inspect_ai.tool import ToolInfo

from inspect_lens.errors import ArtifactError, UnsupportedError
from inspect_lens.model.stored._handle import Activations
from inspect_lens.spec import RESID_POST, Site

from ._recapture import recapture

__all__ = ["reread"]


async def reread(
    model: Model,
    *,
    messages: Sequence[ChatMessage],
    answer: ChatMessageAssistant,
    layers: Sequence[int] | Literal["all"],
    tools: Sequence[ToolInfo] = (),
    site: Site = RESID_POST,
) -> Activations:
    """Capture a finished conversation: render it again with the chat template, and feed it.

    For logs without token ids, and for models other than the one that wrote the answer: what
    comes back is how this model reads the text, which is off-policy even where it is the same
    model, because sampled tokens need not be those that the tokenizer makes of their text.

    Args:
        model: a `vllm-lens/` model.
        messages: the conversation before the answer.
        answer: the assistant message; its tokens take the place of the completion.
        layers: layers to capture, or `all`.
        tools: that the conversation was generated with.
        site: place in the block.

    Returns:
        The handle, kept in memory; rows as a capture of the generation would have them.

    Raises:
        UnsupportedError: the model's provider cannot capture.
        ArtifactError: the answer is empty, or the template changes what stands before it.
        CaptureError: the server refused.

    Example:
        <!-- test: server -->
        ```python
        import anyio
        from inspect_ai.log import read_eval_log
        from inspect_ai.model import get_model

        from inspect_lens.model import reread

        *before, answer = read_eval_log("logs/honesty.eval").samples[0].messages


        async def main() -> None:
            model = get_model("vllm-lens/organism/checkpoint")
            handle = await reread(model, messages=before, answer=answer, layers=[4])
            assert handle.layers == (4,)


        anyio.run(main)
        ```
    """
    from inspect_lens.model.provider._provider import LensAPI

    api = model.api
    if not isinstance(api, LensAPI):
        raise UnsupportedError(
            f"reading a logged conversation needs a vllm-lens/ model, and this one is {model}; "
            "pass model='vllm-lens/…'"
        )
    shown: dict[str, Any] = {"add_special_tokens": False}
    if tools:
        shown["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters.model_dump(exclude_none=True),
                },
            }
            for tool in tools
        ]
    before: list[Any] = await messages_to_openai(list(messages))
    after: list[Any] = await messages_to_openai([*messages, answer])
    asked = {"messages": before, "add_generation_prompt": True}
    prompt = await _tokenize(api, shown | asked)
    whole = await _tokenize(
        api,
        shown | {"messages": after, "add_generation_prompt": False, "continue_final_message": True},
    )
    if whole[: len(prompt)] != prompt:
        raise ArtifactError(
            f"message {answer.id}: with the answer behind it the chat template renders the "
            "conversation in another way (it may drop reasoning), so the answer's tokens cannot "
            "be told from the prompt's; score activations that were captured instead"
        )
    completion = whole[len(prompt) :]
    if not completion:
        raise ArtifactError(f"message {answer.id}: the answer has no text to read")
    # The last token of a completion is never read by the model that wrote it. Here that is the
    # end of the turn, which the rendering leaves out, so any token stands for it.
    return await recapture(
        model,
        prompt_token_ids=prompt,
        token_ids=[*completion, completion[-1]],
        layers=layers,
        site=site,
    )


async def _tokenize(api: Any, body: dict[str, Any]) -> list[int]:
    answer = await api.post("/tokenize", body)
    return [int(token) for token in answer["tokens"]]
