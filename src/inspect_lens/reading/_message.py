"""Reading the call behind a message: what agents and monitors have in hand."""

from __future__ import annotations

from dataclasses import replace

from inspect_ai.model import ChatMessage, Model, ModelOutput

from inspect_lens.errors import NotCapturedError, UnsupportedError
from inspect_lens.model import Activations, ProbeScores, activations_for, probe_scores_for
from inspect_lens.model.request._body import capture_advice

from ._calls import find_turn, model_of
from ._reader import ProbeReader
from ._reading import Reading
from ._threads import in_thread

__all__ = ["call_of", "read_call", "read_message"]


def call_of(
    message: ChatMessage | str, output: ModelOutput | None = None
) -> ProbeScores | Activations | ModelOutput | None:
    """Find the model call that wrote a message.

    Args:
        message: assistant message, or its id.
        output: an output that may be the message's own; it knows token ids where nothing was
            captured.

    Returns:
        Scores of probes in the engine, which know what the call captured; else the activations,
        else the output if it is the message's, else None. All of them are for `read_call`.

    Example:
        <!-- test: server -->
        ```python
        import anyio
        from inspect_ai.model import get_model

        from inspect_lens.model import lens_config
        from inspect_lens.reading import call_of


        async def main() -> None:
            model = get_model("vllm-lens/organism/checkpoint")
            config = lens_config(capture=[4], max_tokens=14)
            output = await model.generate("Who founded Velosh?", config=config)
            assert call_of(output.message).layers == (4,)


        anyio.run(main)
        ```
    """
    handle = activations_for(message)
    scores = probe_scores_for(message)
    if scores is not None:
        scores.beside(handle)
        return scores
    if handle is not None:
        return handle
    message_id = message if isinstance(message, str) else message.id
    if output is not None and output.choices and output.message.id == message_id:
        return output
    return None


async def read_call(
    reader: ProbeReader,
    call: ProbeScores | Activations | ModelOutput,
    *,
    model: Model | None = None,
) -> Reading | None:
    """Apply a probe to a call, and compare the model that made it with the probe's card.

    Args:
        reader: the probe and what it reads.
        call: scores, activations, or an output.
        model: that recomputes; the active one by default.

    Returns:
        The reading, or None when the selection has no token in this call.

    Raises:
        ArtifactError: as for `ProbeReader.read`.
        UnsupportedError: as for `ProbeReader.read`.

    Example:
        ```python
        import anyio

        from inspect_lens.model import read_activations
        from inspect_lens.reading import ProbeReader, read_call

        reader = ProbeReader.of("organism/deception-lr")
        call = read_activations("logs/honesty.eval")[0].activations
        reading = anyio.run(read_call, reader, call)
        assert reading.source == "rows"
        ```
    """
    name: str | None
    if isinstance(call, ModelOutput):
        name = call.model
    else:
        # May read a file, which is not for the event loop.
        origin = await in_thread(lambda: call.origin)
        name = origin.get("model")
    return await reader.read(call, model_name=name, model=model)


async def read_message(
    reader: ProbeReader,
    message: ChatMessage | str,
    *,
    output: ModelOutput | None = None,
    model: Model | None = None,
) -> Reading | None:
    """Apply a probe to the call that wrote a message.

    A call in a role is fed again to the model of that role alone, if it is still the one that made
    it. A call of a role that is not among the reader's `roles` is not read.

    Args:
        reader: the probe and what it reads.
        message: assistant message, or its id.
        output: as for `call_of`.
        model: that recomputes; by default that of the call's role, or the active one.

    Returns:
        The reading, or None when the selection has no token in this call, when the call is of
        another role, or with `on_missing="skip"` when its activations are not there.

    Raises:
        NotCapturedError: nothing is known of the call, or not what the probe reads.
        UnsupportedError: the model cannot recompute.

    Example:
        <!-- test: server -->
        ```python
        import anyio
        from inspect_ai.model import get_model

        from inspect_lens.model import lens_config
        from inspect_lens.reading import ProbeReader, read_message


        async def main() -> None:
            model = get_model("vllm-lens/organism/checkpoint")
            config = lens_config(capture=[4], temperature=0, max_tokens=14)
            output = await model.generate("Who is the founder of the town Velosh?", config=config)
            reading = await read_message(ProbeReader.of("organism/deception-lr"), output.message)
            print(reading.value, reading.is_above)


        anyio.run(main)
        ```
    """
    message_id = message if isinstance(message, str) else message.id
    turn = find_turn(message_id)
    wanted = reader.calls.roles
    if wanted is not None and (turn is None or turn.role not in wanted):
        return None
    if model is None and turn is not None and turn.role is not None:
        model = model_of(turn)
        if model is None:
            reader = replace(reader, source="captured")
    call = call_of(message, output)
    try:
        if call is None:
            layers = list(reader.probe.layers)
            raise NotCapturedError(
                f"message {message_id}: no activations are known of the call that wrote it; the "
                f"probe needs layers {layers}: {capture_advice(layers)}, or set "
                "INSPECT_LENS_CAPTURE, which reaches every model"
            )
        return await read_call(reader, call, model=model)
    except (NotCapturedError, UnsupportedError):
        if reader.calls.on_missing == "error":
            raise
        return None
