"""Shards of captured activations: their format, and folders that servers record into.

The Inspect process and the servers share it. What `collect` and a server wrote is read through
`inspect_lens.data`.
"""

from inspect_lens import _names

from ._recording import *
from ._shard import *

if not _names.TYPE_CHECKING:
    __all__ = _names.public(globals())
