"""Activation sets from a model: many requests at once, resumable, in bounded memory.

Owns the way from a data set through the Inspect provider to a store. May import `model`, `data`,
`spec`, `errors` and inspect_ai; keeps out torch, vLLM and sklearn.
"""

from ._collect import collect, collect_async

__all__ = [
    "collect",
    "collect_async",
]
