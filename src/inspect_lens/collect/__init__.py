"""Send a data set through a model and store the activations, or store those of a log.

Many requests run at once, memory stays bounded, and a stopped run continues.
"""

from inspect_lens import _names

from ._collect import *
from ._feed_again import *
from ._from_log import *
from ._stream import *

if not _names.TYPE_CHECKING:
    __all__ = _names.public(globals())
