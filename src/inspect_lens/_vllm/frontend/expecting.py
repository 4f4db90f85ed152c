"""What a front-end notes of a request when vLLM takes it in, and of what was said at its end."""

from __future__ import annotations

from typing import Any

from inspect_lens._engine.protocol.envelope import Envelope
from inspect_lens._vllm.registered.probe_scores import Reading
from inspect_lens._vllm.results.expected import AskedBy
from inspect_lens._vllm.sinks.process import SINK_KEY

from .state import FrontEnd

__all__ = ["expect", "said_by"]


def expect(
    front: FrontEnd, request: Any, params: Any, packed: dict[str, Any], prompt: Any, parent: Any
) -> Reading | None:
    """Take note of a sealed request; returns what reads its probes."""
    n_prompt = len(request.prompt_token_ids)
    n_max = n_prompt + max(params.max_tokens or 1, 1) - 1
    reading = _reading(front, packed, n_prompt, n_max)
    envelope = Envelope.unpack(packed)
    hashes = () if envelope.probes is None else envelope.probes.names
    if envelope.lens is not None and envelope.lens.lens:
        hashes = (*hashes, envelope.lens.lens)
    front.results.expect(
        request.request_id,
        packed,
        n_prompt=n_prompt,
        n_max=n_max,
        reading=reading,
        request=None if parent is None else parent.request_id,
        asked_by=_asked_by(request, prompt) if SINK_KEY in packed else None,
        let_go=front.registry.hold(hashes) if hashes else None,
    )
    return reading


def _asked_by(request: Any, prompt: Any) -> AskedBy:
    # Choices of one request have ids of their own, made of its.
    key = getattr(request, "external_req_id", None) or request.request_id
    choice, _, rest = str(request.request_id).partition("_")
    key = f"{key}-{choice}" if rest and choice.isdigit() else key
    text = prompt if isinstance(prompt, str) else ""
    return AskedBy(str(key), tuple(request.prompt_token_ids), text)


def _reading(front: FrontEnd, packed: dict[str, Any], n_prompt: int, n_max: int) -> Reading | None:
    """What reads the probes of a sealed request."""
    probes = Envelope.unpack(packed).probes
    if probes is None:
        return None
    return Reading(
        front.registry.reads_of(packed),
        lo=probes.lo,
        n_prompt=n_prompt,
        n_max=n_max,
    )


def said_by(detokenizer: Any) -> tuple[tuple[int, ...], str]:
    """All that was sampled, whichever part of it an output has."""
    return tuple(detokenizer.output_token_ids), detokenizer.get_next_output_text(True, False)
