"""What calls captured, on its way from a server to a file: fetched, decoded, checked, written.

Done in a thread of the Inspect process, or in a process beside it (`BESIDE`), which leaves the
interpreter to the event loop. May import `_base`, `spec`, `errors`; keeps out Inspect, so that the
other process starts in half a second.
"""

from inspect_lens import _names

from ._payload import *
from ._process import *

if not _names.TYPE_CHECKING:
    __all__ = _names.public(globals())
