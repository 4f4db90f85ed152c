"""One prompt of an oracle: rendered by the server, answered by it, and its stream measured."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
from inspect_ai.model import ChatMessage, GenerateConfig, Model, ModelOutput
from numpy.typing import NDArray

from inspect_lens.errors import CaptureError, UnsupportedError
from inspect_lens.model import lens_config, recapture, receipt
from inspect_lens.model.request._instrument import instrument_message
from inspect_lens.model.request._scopes import outside_scopes
from inspect_lens.spec import LensRequest, to_extra_args

from ._inject import injection
from ._load import Oracle
from ._prompt import find_placeholders, oracle_message, placeholder_id
from ._shown import Shown

__all__ = [
    "Prompt",
    "answer_edited",
    "answer_prompt",
    "placeholder_norms",
    "render_prompt",
    "server_of",
    "tokenize_chat",
]

_KWARGS: Final = {"enable_thinking": False}
"""Templates that know no such switch ignore it."""
_REMEMBERED: Final = 4096


class Prompt(NamedTuple):
    """One rendered prompt."""

    text: str
    ids: tuple[int, ...]
    places: tuple[int, ...]
    """Positions of the placeholders."""


T = TypeVar("T")


class _Memo(Generic[T]):
    """What is the same for every sample, by prompt; the least recently used ones leave."""

    def __init__(self) -> None:
        self._items: OrderedDict[tuple[str, ...], T] = OrderedDict()

    def get(self, key: tuple[str, ...]) -> T | None:
        if key in self._items:
            self._items.move_to_end(key)
        return self._items.get(key)

    def put(self, key: tuple[str, ...], value: T) -> T:
        self._items[key] = value
        while len(self._items) > _REMEMBERED:
            self._items.popitem(last=False)
        return value

    def clear(self) -> None:
        self._items.clear()


_prompts: _Memo[Prompt] = _Memo()
_norms: _Memo[tuple[float, ...]] = _Memo()


async def render_prompt(oracle: Oracle, model: Model, question: str, shown: Shown) -> Prompt:
    """Spell a question, let the server tokenise it, and find the placeholders."""
    n_layers, count = len(shown.layers), len(shown.positions)
    text = oracle_message(oracle.config, question, layers=shown.layers, count=count)
    key = (*_address(model), oracle.config.special_token, text)
    if (known := _prompts.get(key)) is not None:
        return known
    ids, alone = await tokenize_chat(
        model, [{"role": "user", "content": text}], oracle.config.special_token
    )
    token = placeholder_id(alone, oracle.config.special_token)
    places = find_placeholders(ids, token, n_layers=n_layers, count=count)
    return _prompts.put(key, Prompt(text, ids, places))


async def placeholder_norms(oracle: Oracle, model: Model, prompt: Prompt) -> tuple[float, ...]:
    """Norms of the stream that vectors are matched to, at the placeholders of one prompt.

    They depend on the prompt alone, so one forward pass serves every sample.
    """
    key = (*_address(model), oracle.adapter, prompt.text)
    if (known := _norms.get(key)) is not None:
        return known
    layer = oracle.config.hook_onto_layer
    seen = await recapture(
        model,
        prompt_token_ids=prompt.ids,
        token_ids=prompt.ids[:1],
        layers=[layer],
        adapter=oracle.adapter,
    )
    rows = seen.numpy()[0][list(prompt.places)].astype(np.float64)
    return _norms.put(key, tuple(map(float, np.linalg.norm(rows, axis=-1))))


async def answer_prompt(
    oracle: Oracle,
    model: Model,
    prompt: Prompt,
    rows: NDArray[np.float32] | None,
    *,
    max_tokens: int,
) -> ModelOutput:
    """Answer one prompt greedily, with vectors or without, and see that it was this prompt.

    Args:
        oracle: the oracle.
        model: a `vllm-lens/` model.
        prompt: rendered.
        rows: (placeholders, hidden); None puts in nothing.
        max_tokens: longest answer.

    Raises:
        CaptureError: other tokens were answered, or not every placeholder was steered.
    """
    steer = () if rows is None else (injection(oracle.config, rows, prompt.places),)
    return await answer_edited(
        model, [instrument_message(prompt.text, name="oracle")], prompt,
        LensRequest(steer=steer), lora=oracle.lora_request, max_tokens=max_tokens,
    )  # fmt: skip


async def answer_edited(
    model: Model,
    messages: list[ChatMessage],
    prompt: Prompt,
    request: LensRequest,
    *,
    lora: dict[str, Any] | None = None,
    max_tokens: int,
) -> ModelOutput:
    """Answer one prompt greedily as a request edits it, and see that it was this prompt.

    Args:
        model: a `vllm-lens/` model.
        messages: the prompt's, marked as those of an instrument.
        prompt: as the server renders them.
        request: what is put in at the placeholders; an empty one puts in nothing.
        lora: adapter that answers; the model itself without one.
        max_tokens: longest answer.

    Raises:
        CaptureError: other tokens were answered, or not every placeholder was edited.
    """
    args = to_extra_args(request)
    # A capture that the model is configured with is not for an instrument's own prompts.
    args["output_residual_stream"] = False
    config = lens_config(
        lora=lora,
        # All of it is said here: nothing of the task's own extra_body or system prompt is meant.
        base=GenerateConfig(),
        extra_body={"extra_args": args, "chat_template_kwargs": dict(_KWARGS)},
        system_message="",
        temperature=0.0,
        max_tokens=max_tokens,
        num_choices=1,
    )
    # Edits that are meant for the model under evaluation are not for its instruments.
    with outside_scopes():
        output = await model.generate(messages, config=config)
    seen = tuple((output.metadata or {}).get("prompt_token_ids") or ())
    if seen != prompt.ids:
        raise CaptureError(
            f"oracle: the prompt was answered as {len(seen)} other tokens than /tokenize made of "
            f"it ({len(prompt.ids)}), so the vectors went to the wrong places; something between "
            "changes messages, such as a system message or a template of the server"
        )
    done = receipt(output)
    if (request.steer or request.edits) and done is not None:
        steered = done.steer
        if steered is None or steered.n_tokens + steered.cached_tokens < len(prompt.places):
            raise CaptureError(
                f"oracle: {len(prompt.places)} placeholders were to be steered, and the receipt "
                f"says {steered and steered.n_tokens}"
            )
    return output


async def tokenize_chat(
    model: Model, messages: list[dict[str, str]], placeholder: str
) -> tuple[tuple[int, ...], list[int]]:
    """Tokens of a chat and of the placeholder alone, as the server makes them.

    Args:
        model: a `vllm-lens/` model.
        messages: with `role` and `content`; a last one of the assistant is continued.
        placeholder: text that stands where vectors go.
    """
    api: Any = model.api
    goes_on = messages[-1]["role"] == "assistant"
    alone = await api.post("/tokenize", {"prompt": placeholder, "add_special_tokens": False})
    whole = await api.post(
        "/tokenize",
        {
            "messages": messages,
            "add_generation_prompt": not goes_on,
            "chat_template_kwargs": dict(_KWARGS),
            **({"continue_final_message": True} if goes_on else {}),
        },
    )
    return tuple(whole["tokens"]), list(alone["tokens"])


def server_of(model: Model, what: str) -> Model:
    """The model, if its server can be asked to edit.

    Args:
        model: under evaluation.
        what: needs it, for the error.

    Raises:
        UnsupportedError: it is of another provider.
    """
    from inspect_lens.model.provider._provider import LensAPI

    if not isinstance(model.api, LensAPI):
        raise UnsupportedError(
            f"{what} needs a vllm-lens/ model that can steer and load adapters, and the model is "
            f"{model}; pass --model vllm-lens/… or model="
        )
    return model


def _address(model: Model) -> tuple[str, str]:
    return str(model), str(getattr(model.api, "base_url", None))
