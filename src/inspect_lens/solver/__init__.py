"""Inspect solvers that use the lens: thin, one per file.

Owns `with_capture`.
May import inspect_ai, `model`, `probe` and `spec`; keeps out torch and scorers.
"""

from ._capture import with_capture

__all__ = ["with_capture"]
