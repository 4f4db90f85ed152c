"""What was sealed before: a batch asks for one thing a thousand times, of prompts of few sizes."""

from __future__ import annotations

from collections.abc import Callable

from inspect_lens._engine.protocol.envelope import Packed
from inspect_lens._engine.protocol.kept import Kept
from inspect_lens.spec import EngineFacts, LensRequest

from .probe_scores import Reads

__all__ = ["SealedBatches"]

_MOST = 1024
"""Envelopes."""
_MOST_LISTED = 1 << 14
"""Positions that are named, and letters of what is asked of probes."""

_Key = tuple[int, int, int, int, int, tuple[bool, bool]]
_Value = tuple[tuple[LensRequest, EngineFacts, Reads | None], Packed]


class SealedBatches:
    """Packed envelopes of requests that are the same in all that an envelope says."""

    def __init__(self, salt: Callable[[str], str]) -> None:
        """Start empty."""
        self._salt = salt
        self._known: Kept[_Key, _Value] = Kept(_MOST)

    def get(
        self,
        request: LensRequest,
        facts: EngineFacts,
        reads: Reads | None,
        *,
        n_prompt: int,
        max_tokens: int,
        manner: tuple[bool, bool],
    ) -> Packed | None:
        """The packed envelope of such a request, which nobody changes; None where none is known."""
        key = id(request), id(facts), id(reads), n_prompt, max_tokens, manner
        known = self._known.get(key)
        if known is None:
            return None
        salted = known[1].envelope.steer_hash
        if salted is not None and salted != self._salt(salted.rpartition(":")[2]):
            return None
        return known[1]

    def keep(
        self,
        packed: Packed,
        request: LensRequest,
        facts: EngineFacts,
        reads: Reads | None,
        *,
        max_tokens: int,
        manner: tuple[bool, bool],
    ) -> None:
        """Remember a packed envelope for requests that are the same.

        Not where the envelope tells its request from others, or is large.
        """
        envelope = packed.envelope
        capture = envelope.capture
        if capture is not None and capture.token:
            return
        n_listed = sum(len(part.positions or ()) for part in envelope.results if part is not None)
        if n_listed + len(packed.uses or "") > _MOST_LISTED:
            return
        key = id(request), id(facts), id(reads), envelope.n_prompt, max_tokens, manner
        # Kept, so that nothing else gets their identity.
        self._known.keep(key, ((request, facts, reads), packed), request.tensor_bytes)
