"""Activation patching and causal tracing: which layer and token a prediction depends on."""

from inspect_lens import _names
from inspect_lens._patching.result import *
from inspect_lens._patching.runs import *

from ._sweep import *

if not _names.TYPE_CHECKING:
    __all__ = _names.public(globals())
