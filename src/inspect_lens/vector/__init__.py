"""Steering vectors with cards: directions per layer, files, controls, dose and response.

`inspect_lens.train` finds them.
"""

from inspect_lens import _names

from ._dose import *
from ._foreign import *
from ._vector import *

if not _names.TYPE_CHECKING:
    __all__ = _names.public(globals())
