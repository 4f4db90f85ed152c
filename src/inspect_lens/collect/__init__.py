"""Send a data set through a model and store the activations.

Many requests run at once, memory stays bounded, and a stopped run continues.
"""

from ._collect import collect, collect_async, computing_facts

__all__ = [
    "collect",
    "collect_async",
    "computing_facts",
]
