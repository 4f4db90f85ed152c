"""From what a scorer or an analyst has in hand to the scores of probes that the engine ran."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from inspect_ai.event import ModelEvent
from inspect_ai.log import EvalSample, transcript
from inspect_ai.model import ChatMessage, ModelOutput

from inspect_lens.model.scores._probe_scores import SCORED_MESSAGES, ProbeScores
from inspect_lens.model.scores._score_file import SCORES_REFERENCE

from ._given import given_output

__all__ = ["ScoredCall", "probe_scores", "probe_scores_for", "read_probe_scores"]

KEY = "probe_scores"


class ScoredCall(NamedTuple):
    """A logged model call that probes in the engine scored."""

    message_id: str | None
    scores: ProbeScores


def probe_scores(
    source: ProbeScores | ModelOutput | ModelEvent | Mapping[str, Any] | None,
) -> ProbeScores | None:
    """Get the scores of probes in the engine for one model call, live or from a log.

    Args:
        source: the output, its model event, its metadata, or any of these as plain data.

    Returns:
        The handle, or None when no probe ran in the engine.

    Raises:
        ArtifactError: what stands there is not a reference of ours.

    Example:
        <!-- test: server -->
        ```python
        import anyio
        from inspect_ai.model import get_model

        from inspect_lens.model import lens_scope, probe_scores


        async def main() -> None:
            model = get_model("vllm-lens/organism/checkpoint")
            with lens_scope(probes="organism/deception-lr", model=model):
                output = await model.generate("Who is the founder of the town Velosh?")
            column = probe_scores(output).of("organism/deception-lr")
            assert len(column.scores) == len(column.positions)


        anyio.run(main)
        ```
    """
    found: Any = source
    if isinstance(found, ModelEvent):
        found = found.output
    if isinstance(found, ModelOutput):
        found = found.metadata
    if isinstance(found, Mapping) and found.get("$lens") != SCORES_REFERENCE:
        inner = next((name for name in (KEY, "output", "metadata") if name in found), None)
        return None if inner is None else probe_scores(found[inner])
    if found is None or isinstance(found, ProbeScores):
        return found
    return ProbeScores.from_reference(found)


def probe_scores_for(message: ChatMessage | str) -> ProbeScores | None:
    """Get the scores of probes in the engine for the call that wrote a message.

    Args:
        message: assistant message, or its id.

    Returns:
        The handle, or None when no probe ran in the engine, or the call is not known here.

    Example:
        <!-- test: server -->
        ```python
        import anyio
        from inspect_ai.model import get_model

        from inspect_lens.model import probe_scores, probe_scores_for


        async def main() -> None:
            model = get_model("vllm-lens/organism/checkpoint", probes="organism/deception-lr")
            output = await model.generate("Where is Velosh?")
            assert probe_scores_for(output.message) == probe_scores(output)


        anyio.run(main)
        ```
    """
    message_id = message if isinstance(message, str) else message.id
    if not isinstance(message, str) and message.metadata and KEY in message.metadata:
        return probe_scores(message.metadata)
    if message_id is None:
        return None
    handle = SCORED_MESSAGES.get(message_id)
    if handle is not None:
        return handle
    # A fresh process that scores a log has its events, and no memory of the calls.
    for call in _calls_of(transcript().events):
        if call.message_id == message_id:
            return call.scores
    return None


def read_probe_scores(sample: EvalSample) -> list[ScoredCall]:
    """List the calls of a sample that probes in the engine scored, in their order.

    Args:
        sample: of a log.

    Returns:
        The calls; nothing is read yet.

    Example:
        ```python
        from inspect_ai.log import read_eval_log

        from inspect_lens.model import read_probe_scores

        sample = read_eval_log("logs/honesty.eval").samples[0]
        assert read_probe_scores(sample) == []  # it captured activations instead
        ```
    """
    calls = list(_calls_of(sample.events))
    if not calls and (scores := probe_scores(sample.output)) is not None:
        message_id = sample.output.message.id if sample.output.choices else None
        calls.append(ScoredCall(message_id, scores))
    return calls


def _calls_of(events: Iterable[Any]) -> Iterator[ScoredCall]:
    for event in events:
        output = event.output if isinstance(event, ModelEvent) else given_output(event)
        if output is None:
            continue
        for index, choice in enumerate(output.choices):
            found = probe_scores(output if index == 0 else choice.message.metadata)
            if found is not None:
                yield ScoredCall(choice.message.id, found)
