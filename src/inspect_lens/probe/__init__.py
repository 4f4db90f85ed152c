"""Apply trained probes to arrays, load and save them, and judge their scores."""

from inspect_lens import _names
from inspect_lens._base.artifact import write_atomic as write_atomic

from .card._card import *
from .card._points import *
from .kinds._foreign import *
from .kinds._linear import *
from .kinds._load import *
from .kinds._neural import *
from .pooling._pool import *
from .pooling._tokens import *
from .statistics._compare import *
from .statistics._measured import *
from .statistics._metrics import *
from .statistics._ranking import *
from .statistics._words import *

_SHARED = frozenset({"draws_of", "percentile_interval"})
"""What other folders draw with, and no user needs."""

if not _names.TYPE_CHECKING:
    __all__ = _names.public(globals(), _SHARED)
