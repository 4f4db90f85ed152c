"""Scorers and metrics for Inspect tasks."""

from inspect_lens import _names

from ._attention import *
from ._baselines import *
from ._cascade import *
from ._dose import *
from ._feature import *
from ._judges import *
from ._labels import *
from ._metrics import *
from ._monitor import *
from ._oracle import *
from ._probe import *
from ._reconstruction import *
from ._sweeps import *

if not _names.TYPE_CHECKING:
    __all__ = _names.public(globals())
