"""Read what a probe finds in model calls: scores of tokens, turns and cells of a sweep.

Scorers, monitors, tools and viewers are built on `ProbeReader`, so their numbers agree.
"""

from inspect_lens import _names

from ._attention import *
from ._calls import *
from ._columns import *
from ._latents import *
from ._reader import *
from ._rows import *
from ._samples import *
from ._stored import *
from ._thresholds import *
from ._token_scores import *

if not _names.TYPE_CHECKING:
    __all__ = _names.public(globals())
