"""Tensors in a response, and beside it: the two sinks that every server has."""

from __future__ import annotations

from typing import Any

from inspect_lens._vllm.sinks.sink import Done, Sink, own_memory
from inspect_lens.errors import LensError
from inspect_lens.spec import encode_frame, encode_tensor

from .payloads import PayloadStore

__all__ = ["Entries", "HandleSink", "ResponseSink"]

Entries = dict[str, Any]


class ResponseSink(Sink[Entries]):
    """Puts tensors into the response, as base64."""

    def take(self, done: Done) -> Entries:
        """What stands in the response, by name."""
        return {name: encode_tensor(tensor) for name, tensor in done.tensors.items()}


class HandleSink(Sink[Entries]):
    """Keeps tensors until their client fetches them."""

    def __init__(self, payloads: PayloadStore) -> None:
        self._payloads = payloads

    def take(self, done: Done) -> Entries:
        """What stands in the response, by name.

        Raises:
            LensError: there is no room; nothing is kept then.
        """
        entries: Entries = {}
        try:
            for name, tensor in done.tensors.items():
                entry, frame = encode_frame(own_memory(tensor))
                handle = self._payloads.put(frame)
                beside = {"handle": handle, "nbytes": len(frame), "transport": "binary"}
                entries[name] = entry | beside
        except LensError:
            self._payloads.discard([entry["handle"] for entry in entries.values()])
            raise
        return entries
