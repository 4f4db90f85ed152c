"""Arguments of this repository's scripts."""

from __future__ import annotations

import argparse
import json
from typing import Any

__all__ = ["key_and_json"]


def key_and_json(text: str) -> tuple[str, Any]:
    """Read `KEY=JSON`, as a `type` of argparse; what is not JSON is a string.

    Raises:
        argparse.ArgumentTypeError: there is no key.
    """
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise argparse.ArgumentTypeError(f"{text!r}: KEY=JSON is wanted, as in enforce_eager=true")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value
