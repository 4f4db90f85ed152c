"""In the API server: results into HTTP responses, streams and the binary route."""

from __future__ import annotations


def install_when_serving() -> None:
    return None
