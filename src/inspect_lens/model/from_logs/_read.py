"""From what a scorer or an analyst has in hand to the activations behind it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from inspect_ai.event import ModelEvent
from inspect_ai.log import EvalLog, EvalSample, read_eval_log, transcript
from inspect_ai.model import ChatMessage, ModelOutput

from inspect_lens.errors import ArtifactError
from inspect_lens.model.stored._handle import MEMORY, MESSAGES, REFERENCES, Activations
from inspect_lens.model.stored._places import know_log
from inspect_lens.spec import Receipt

from ._given import given_output

__all__ = [
    "CapturedCall",
    "activations",
    "activations_for",
    "know_log",
    "read_activations",
    "receipt",
    "resident_activation_bytes",
]

KEY = "activations"


class CapturedCall(NamedTuple):
    """A logged model call with captured activations."""

    sample_id: str | int | None
    epoch: int | None
    message_id: str | None
    activations: Activations


def activations(
    source: Activations | ModelOutput | ModelEvent | Mapping[str, Any] | None,
    *,
    log: str | None = None,
) -> Activations | None:
    """Get the activations of one model call, live or from a log.

    Args:
        source: the output, its model event, its metadata, or any of these as plain data.
        log: address of the log that it stands in, so that files are found beside a log that
            was moved.

    Returns:
        The handle, or None when the call captured nothing.

    Raises:
        ArtifactError: what stands there is not a reference of ours.

    Example:
        ```python
        from inspect_ai.log import read_eval_log

        from inspect_lens.model import activations

        sample = read_eval_log("logs/honesty.eval").samples[0]
        handle = activations(sample.output, log="logs/honesty.eval")
        assert handle.layers == (3, 4, 5)
        assert handle.numpy().shape == (3, handle.n_prompt + handle.n_completion - 1, 256)
        ```
    """
    if log is not None:
        know_log(log)
    found: Any = source
    if isinstance(found, ModelEvent):
        found = found.output
    if isinstance(found, ModelOutput):
        found = found.metadata
    if isinstance(found, Mapping) and found.get("$lens") not in REFERENCES:
        # An event, an output or metadata as plain data: one level down, until there is none.
        inner = next((name for name in (KEY, "output", "metadata") if name in found), None)
        return None if inner is None else activations(found[inner])
    if found is None or isinstance(found, Activations):
        return found
    return Activations.from_reference(found)


def activations_for(message: ChatMessage | str) -> Activations | None:
    """Get the activations of the call that produced a message.

    Works where only messages are at hand: agents, monitors, and scorers of a reloaded log.

    Args:
        message: assistant message, or its id.

    Returns:
        The handle, or None when the message's call captured nothing or is not known here.

    Example:
        ```python
        from inspect_ai import score
        from inspect_ai.log import read_eval_log
        from inspect_ai.scorer import Score, Scorer, Target, mean, scorer
        from inspect_ai.solver import TaskState

        from inspect_lens.model import activations_for


        @scorer(metrics=[mean()])
        def tokens_read() -> Scorer:
            async def count(state: TaskState, target: Target) -> Score:
                handle = activations_for(state.messages[-1])
                return Score(value=0 if handle is None else len(handle.positions))

            return count


        log = score(read_eval_log("logs/honesty.eval"), tokens_read(), action="overwrite")
        assert log.samples[0].scores["tokens_read"].value > 0
        ```
    """
    message_id = message if isinstance(message, str) else message.id
    if not isinstance(message, str) and message.metadata and KEY in message.metadata:
        return activations(message.metadata)
    if message_id is None:
        return None
    handle = MESSAGES.get(message_id)
    if handle is not None:
        return handle
    # A fresh process that scores a log has its events, and no memory of the calls.
    for call in _calls_of(transcript().events):
        if call.message_id == message_id:
            return call.activations
    return None


def receipt(source: ModelOutput | ModelEvent | Mapping[str, Any]) -> Receipt | None:
    """Get the receipt of a model call: what the engine captured and how it steered.

    Args:
        source: as for `activations`.

    Returns:
        The receipt, or None for a call without the lens or a server that gives none.

    Example:
        <!-- test: server -->
        ```python
        import anyio
        from inspect_ai.model import get_model

        from inspect_lens.model import lens_config, receipt


        async def main() -> None:
            model = get_model("vllm-lens/organism/checkpoint")
            output = await model.generate("Where is Velosh?", config=lens_config(capture=[4]))
            assert receipt(output).capture.layers == (4,)


        anyio.run(main)
        ```
    """
    handle = activations(source)
    if handle is not None:
        return handle.receipt
    if isinstance(source, ModelEvent):
        source = source.output
    metadata = source.metadata if isinstance(source, ModelOutput) else source
    found = (metadata or {}).get("inspect_lens")
    return None if found is None else Receipt.model_validate(found)


def resident_activation_bytes() -> int:
    """Count the bytes of activations in memory; INSPECT_LENS_MEMORY_BYTES is the limit.

    One call alone may be larger than that; it is held until the next one comes.

    Example:
        ```python
        from inspect_lens.model import read_activations, resident_activation_bytes

        call = read_activations("logs/honesty.eval")[0]
        nbytes = call.activations.numpy().nbytes
        assert resident_activation_bytes() >= nbytes
        ```
    """
    return MEMORY.nbytes


def read_activations(
    source: EvalLog | EvalSample | ModelOutput | str | Path,
) -> list[CapturedCall]:
    """List every captured call of a log, in the order of samples and calls.

    An answer that `read_given` read stands among them at its place, though no call made it.

    Nothing large is read until a tensor is. A log (or its path) also says where its files are,
    so that later `activations(output)` finds them after the folder was moved.

    Args:
        source: a log, its path, one of its samples, or one output.

    Returns:
        The calls.

    Raises:
        ArtifactError: the log was read without its samples.

    Example:
        ```python
        from inspect_lens.model import read_activations

        for call in read_activations("logs/honesty.eval"):
            print(call.sample_id, call.activations.numpy().shape)  # (layers, tokens, hidden)
        ```
    """
    if isinstance(source, str | Path):
        source = read_eval_log(str(source))
    if isinstance(source, ModelOutput):
        handle = activations(source)
        message_id = source.message.id if source.choices else None
        return [] if handle is None else [CapturedCall(None, None, message_id, handle)]
    if isinstance(source, EvalSample):
        return list(_calls_of(source.events, source))
    if source.location:
        know_log(source.location)
    if source.samples is None:
        raise ArtifactError(
            f"{source.location or 'log'}: was read without its samples; read it again with "
            "header_only=False"
        )
    return [call for sample in source.samples for call in _calls_of(sample.events, sample)]


def _calls_of(events: Iterable[Any], sample: EvalSample | None = None) -> Iterator[CapturedCall]:
    sample_id = sample.id if sample else None
    epoch = sample.epoch if sample else None
    seen: set[str | None] = set()
    for event in events:
        output = event.output if isinstance(event, ModelEvent) else given_output(event)
        if output is None:
            continue
        first = activations(output)
        for index, choice in enumerate(output.choices):
            handle = first if index == 0 else activations(choice.message.metadata)
            if handle is not None:
                seen |= {handle.sha256, choice.message.id}
                yield CapturedCall(sample_id, epoch, choice.message.id, handle)
    if sample is None:
        return
    handle = activations(sample.output)
    message_id = sample.output.message.id if sample.output.choices else None
    if handle is not None and not seen & {handle.sha256, message_id}:
        yield CapturedCall(sample_id, epoch, message_id, handle)
