"""One sample through the provider: generated, or read as it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    GenerateConfig,
    Model,
)

from inspect_lens.data import Captured, Message, ProbeSample, SampleRecord
from inspect_lens.errors import CaptureError, LensError
from inspect_lens.model import Activations, activations, lens_config, recapture
from inspect_lens.reading import GivenTokens, given_tokens
from inspect_lens.spec import CaptureSpec, Layers, Positions, TensorData, resolve_positions

__all__ = ["Request", "capture_sample"]

_RESIDUAL = "residual_stream"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to capture, and how to generate."""

    layers: Layers
    positions: Positions
    max_tokens: int
    temperature: float
    seed: int


async def capture_sample(model: Model, index: int, sample: ProbeSample, how: Request) -> Captured:
    """Capture one sample.

    Args:
        model: of a provider of this package.
        index: of the sample, which also makes its seed.
        sample: generated, or read where it has a completion or is raw text.
        how: what to capture.

    Returns:
        The sample with its rows.

    Raises:
        CaptureError: no activations came, or a chat template does not continue its own prompt.
        UnsupportedError: the model is of another provider.
    """
    if sample.reading == "generate":
        handle, completion = await _generate(model, index, sample, how)
        n_fed = handle.n_prompt + max(handle.n_completion - 1, 0)
        ids = (*handle.prompt_token_ids, *handle.token_ids)
        n_prompt = handle.n_prompt
    else:
        prompt, rest = await _tokens(model, sample)
        # The last id of a replay is not fed; a copy of one stands in for it.
        handle = await recapture(
            model, prompt_token_ids=prompt, token_ids=[*rest, prompt[0]], layers=how.layers
        )
        ids, n_prompt, completion = (*prompt, *rest), len(prompt), sample.completion or ""
        n_fed = len(ids)
    positions = _select(how.positions, n_prompt=n_prompt, n_fed=n_fed, raw=sample.raw)
    if sample.unread and how.positions == "completion":
        first = n_prompt + await _unread(model, sample, ids[n_prompt:])
        positions = tuple(p for p in positions if p >= first)
    acts = _rows(handle, positions)
    record = SampleRecord(
        index=index,
        id=sample.id,
        label=sample.label,
        group=sample.group,
        n_rows=len(positions),
        n_prompt=n_prompt,
        completion=completion,
        columns=dict(sample.columns),
        prompt="\n".join(m.content for m in sample.messages),
        content=sample.content_id,
    )
    return Captured(
        record=record, acts=acts, layers=handle.layers, positions=positions, token_ids=ids
    )


async def _generate(
    model: Model, index: int, sample: ProbeSample, how: Request
) -> tuple[Activations, str]:
    # All fed tokens from the first position that is wanted; a range is cut by the engine.
    capture = CaptureSpec(layers=how.layers, positions=how.positions)
    base = GenerateConfig(
        temperature=how.temperature, max_tokens=how.max_tokens, seed=how.seed + index
    )
    messages = [_message(m) for m in sample.messages]
    try:
        output = await model.generate(messages, config=lens_config(capture=capture, base=base))
    except LensError:
        raise
    except Exception as error:
        raise CaptureError(f"{sample.id}: {_reason(error)}") from error
    if output.error:
        raise CaptureError(f"{sample.id}: {output.error}")
    handle = activations(output)
    if handle is None:
        raise CaptureError(
            f"{sample.id}: no activations came back; allowed are models vllm-lens/… and lens/…; "
            "check the model's name and that the server has the plug-in"
        )
    return handle, output.completion


def _reason(error: Exception) -> str:
    """What a server, or the start of one, said: the error's own text may quote the request."""
    text = getattr(error, "provider_message", None) or str(error)
    return " ".join(str(text).split())[:800] or type(error).__name__


async def _tokens(model: Model, sample: ProbeSample) -> GivenTokens:
    """Ids of the prompt and of what follows, as the server's own template makes them."""
    if sample.raw:
        return await given_tokens(model, sample.messages[0].content)
    turns = [{"role": m.role, "content": m.content} for m in sample.messages]
    try:
        return await given_tokens(model, turns, sample.completion)
    except CaptureError as error:
        raise CaptureError(f"{sample.id}: {error}") from None


async def _unread(model: Model, sample: ProbeSample, rest: Sequence[int]) -> int:
    """Tokens at the beginning of a completion that are wholly of its unread part."""
    turns = [{"role": m.role, "content": m.content} for m in sample.messages]
    _, part = await given_tokens(model, turns, sample.unread)
    # A token that joins both parts is read: some of it is of the answer.
    pairs = enumerate(zip(part, rest, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(part), len(rest)))


def _select(positions: Positions, *, n_prompt: int, n_fed: int, raw: bool) -> tuple[int, ...]:
    if raw and positions == "completion":
        positions = "prompt"  # raw text is all there is to read
    return tuple(resolve_positions(positions, n_prompt=n_prompt, n_max=n_fed, field="positions"))


def _rows(handle: Activations, positions: Sequence[int]) -> TensorData | None:
    if not positions:
        return None
    data = handle.data(_RESIDUAL)
    at = {position: i for i, position in enumerate(handle.positions)}
    missing = [p for p in positions if p not in at]
    if missing:
        raise CaptureError(f"position {missing[0]} was asked for and did not come")
    rows = [at[p] for p in positions]
    return TensorData(data.storage[:, rows], data.dtype)


def _message(message: Message) -> ChatMessage:
    kinds: dict[str, Any] = {
        "system": ChatMessageSystem,
        "user": ChatMessageUser,
        "assistant": ChatMessageAssistant,
        "tool": ChatMessageTool,
    }
    made: ChatMessage = kinds[message.role](content=message.content)
    return made
