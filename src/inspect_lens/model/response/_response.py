"""What a lens server adds to a response: taken out before Inspect dumps it."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import BaseModel

from inspect_lens._intake import ChoiceFields, FetchBytes, Payload, fetch_payload
from inspect_lens.errors import CaptureError
from inspect_lens.spec import LensRequest

__all__ = ["LensFields", "fetch_payloads", "missing_activations", "take_fields"]


@dataclass(kw_only=True)
class LensFields:
    """Lens fields of one response; there is one entry per choice, in order."""

    prompt_token_ids: list[int] = field(default_factory=list)
    choices: list[ChoiceFields] = field(default_factory=list)


def take_fields(completion: BaseModel) -> LensFields:
    """Remove the lens fields from a chat completion.

    Args:
        completion: of the OpenAI client; changed in place, so that neither the model event nor
            the raw model call holds tensors or token ids.

    Returns:
        The fields; the first choice's are those at the top level.
    """
    top = completion.model_extra or {}
    fields = LensFields(prompt_token_ids=list(top.pop("prompt_token_ids", None) or ()))
    for choice in getattr(completion, "choices", None) or ():
        extra = choice.model_extra or {}
        fields.choices.append(
            ChoiceFields(
                activations=extra.pop("activations", None),
                token_ids=list(extra.pop("token_ids", None) or ()),
                receipt=extra.pop("inspect_lens", None),
                hook_results=extra.pop("hook_results", None),
            )
        )
        fields.prompt_token_ids = fields.prompt_token_ids or list(
            extra.pop("prompt_token_ids", None) or ()
        )
    activations, receipt = top.pop("activations", None), top.pop("inspect_lens", None)
    saved = top.pop("hook_results", None)
    if fields.choices:
        first = fields.choices[0]
        first.activations = activations or first.activations
        # A receipt counts one choice's tokens, so the others bring their own or have none.
        first.receipt = receipt or first.receipt
        first.hook_results = saved or first.hook_results
    return fields


def fetch_payloads(fields: LensFields, request: LensRequest, fetch: FetchBytes) -> list[Payload]:
    """Decode the activations of every choice; not for the event loop.

    Args:
        fields: of the response; the encoded tensors are taken out of it.
        request: that was sent; it asked for a capture.
        fetch: gets the bytes behind a handle of the binary transport, in the calling thread.

    Returns:
        One payload per choice.

    Raises:
        CaptureError: something that was asked for did not come, or does not fit the tokens.
    """
    payloads = []
    for index, choice in enumerate(fields.choices):
        if not choice.activations:
            raise CaptureError(missing_activations(index, len(fields.choices)))
        payloads.append(fetch_payload(choice, fields.prompt_token_ids, request, fetch))
        choice.activations = None  # the encoded form is as large as the tensors
    return payloads


def missing_activations(index: int, count: int) -> str:
    """What to say where a choice brought none."""
    if index == 0:
        return (
            "activations: asked for, and the response has none; the server runs without the "
            "inspect-lens plug-in (install inspect-lens in the server's environment, and see "
            "that VLLM_PLUGINS and INSPECT_LENS_DISABLE allow it)"
        )
    return (
        f"activations: num_choices={count}, and the server returned none for choice {index}; use "
        "num_choices=1 and call generate once per choice, or epochs"
    )
