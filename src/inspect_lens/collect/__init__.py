"""Send a data set through a model and store the activations, or store those of a log.

Many requests run at once, memory stays bounded, and a stopped run continues.
"""

from ._collect import collect, collect_async, computing_facts
from ._feed_again import FedAgain, feed_again
from ._from_log import log_to_store
from ._stream import collect_stream

__all__ = [
    "FedAgain",
    "collect",
    "collect_async",
    "collect_stream",
    "computing_facts",
    "feed_again",
    "log_to_store",
]
