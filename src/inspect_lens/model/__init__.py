"""The Inspect providers, the configuration of a call, and its results."""

from inspect_lens import _names
from inspect_lens._base.to_torch import SavedValues as SavedValues
from inspect_lens._base.to_torch import read_results as read_results
from inspect_lens._intake import read_vector as read_vector

from ._handle import *
from ._places import *
from ._read import *
from ._recapture import *
from ._request import *
from ._scope import *
from ._scores import *

if not _names.TYPE_CHECKING:
    __all__ = _names.public(globals())
