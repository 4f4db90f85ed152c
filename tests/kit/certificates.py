"""Clients of tests speak plain HTTP, so they need not read who may sign for HTTPS.

Each client of HTTP reads the whole bundle of authorities: longer than most tests of one take.
"""

from __future__ import annotations

import ssl
from typing import Any

__all__ = ["read_no_authorities"]


def read_no_authorities() -> None:
    """Make clients of this process trust nobody over HTTPS."""
    context: Any = ssl.SSLContext
    context.load_verify_locations = _nothing


def _nothing(*_: Any, **__: Any) -> None:
    """In place of reading a bundle."""
