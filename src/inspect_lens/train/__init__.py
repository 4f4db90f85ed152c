"""Train probes and steering vectors on activations, and lenses on texts, offline.

Activations and labels go in, and a probe with its card comes out. A model and texts go in, and a
lens comes out.
"""

from inspect_lens import _names

from ._lenses import *
from ._train import *
from .families._binary import *
from .families._direction import *
from .families._ensemble import *
from .families._families import *
from .families._head import *
from .families._logistic import *
from .families._sae import *
from .fitting._across import *
from .fitting._fit import *
from .fitting._thresholds import *
from .judging._domains import *
from .judging._evaluate import *
from .judging._select import *
from .judging._shift import *
from .sets._dataset import *
from .sets._from_arrays import *
from .sets._splits import *
from .sets._store_set import *
from .vectors._condition import *
from .vectors._refusal import *
from .vectors._vectors import *

if not _names.TYPE_CHECKING:
    __all__ = _names.public(globals())
