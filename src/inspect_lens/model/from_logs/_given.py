"""What stands in a log of an answer that was read: no call of the model made it."""

from __future__ import annotations

from inspect_ai.event import Event, InfoEvent
from inspect_ai.log import transcript
from inspect_ai.model import ModelOutput

from inspect_lens.model.stored._handle import MESSAGES, Activations

__all__ = ["GIVEN_TOKENS", "given_output", "record_given"]

GIVEN_TOKENS = "given_tokens"
"""Key of `output.metadata` with the number of tokens of an answer that was read."""
_SOURCE = "inspect_lens/read_given"


def record_given(output: ModelOutput, handle: Activations, *, n_tokens: int) -> None:
    """Attach activations to an answer that was read, and write it into the transcript.

    Args:
        output: the answer; what follows may take its place as the output of the sample.
        handle: of its activations.
        n_tokens: of the answer; 0 for raw text.
    """
    output.metadata = {"activations": handle, GIVEN_TOKENS: n_tokens}
    # Whoever has the message alone finds them, too.
    output.message.metadata = {"activations": handle}
    transcript().info(
        {
            "model": output.model,
            "message_id": output.message.id,
            "completion": output.completion,
            GIVEN_TOKENS: n_tokens,
            "activations": handle.model_dump(mode="json"),
        },
        source=_SOURCE,
    )


def given_output(event: Event) -> ModelOutput | None:
    """The output that an event of `record_given` tells of.

    Args:
        event: of a sample, live or out of a log.

    Returns:
        The output as it was, or None for any other event.

    Raises:
        ArtifactError: the reference in it is damaged.
    """
    if not isinstance(event, InfoEvent) or event.source != _SOURCE:
        return None
    facts = event.data
    if not isinstance(facts, dict):
        return None
    message_id = str(facts["message_id"])
    reference = facts["activations"]
    handle = MESSAGES.get(message_id)
    if handle is None:
        handle = Activations.from_reference(reference if isinstance(reference, dict) else {})
    output = ModelOutput.from_content(model=str(facts["model"]), content=str(facts["completion"]))
    output.message.id = message_id
    output.metadata = {"activations": handle, GIVEN_TOKENS: facts[GIVEN_TOKENS]}
    return output
