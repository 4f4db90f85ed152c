"""Ask in words about activations: with an oracle, or by the model itself.

Each answer comes with controls.
"""

from inspect_lens import _names

from ._ask import *
from ._explain import *
from ._load import *
from ._nla import *
from ._reconstruct import *
from ._send import *

if not _names.TYPE_CHECKING:
    __all__ = _names.public(globals())
