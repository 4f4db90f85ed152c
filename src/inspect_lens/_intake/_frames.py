"""Messages on a stream of bytes: the length in four bytes, then the content."""

from __future__ import annotations

__all__ = ["Frames", "frame"]

_HEAD = 4


def frame(content: bytes) -> bytes:
    """A message as it travels."""
    return len(content).to_bytes(_HEAD, "big") + content


class Frames:
    """Puts messages together that come in pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; gives the messages that are whole now."""
        buffer = self._buffer
        buffer += data
        start = 0
        whole = []
        while len(buffer) >= start + _HEAD:
            end = start + _HEAD + int.from_bytes(buffer[start : start + _HEAD], "big")
            if len(buffer) < end:
                break
            whole.append(bytes(buffer[start + _HEAD : end]))
            start = end
        del buffer[:start]
        return whole
