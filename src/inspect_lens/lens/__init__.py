"""Load and apply tuned and Jacobian lenses, which read a layer as a prediction.

`inspect_lens.train` fits them. An engine applies those that are registered with it.
"""

from inspect_lens import _names

from ._coordinates import *
from ._lens import *

if not _names.TYPE_CHECKING:
    __all__ = _names.public(globals())
