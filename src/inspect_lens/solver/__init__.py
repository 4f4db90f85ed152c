"""Solvers for Inspect tasks: capture, steer, edit, patch, sweep, read a lens, act on a probe."""

from inspect_lens import _names

from ._gate import *
from ._lens import *
from ._oracle import *
from ._pairs import *
from ._patch import *
from ._sweep import *

if not _names.TYPE_CHECKING:
    __all__ = _names.public(globals())
