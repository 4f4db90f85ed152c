"""Labelled data sets, their registry, and stores of activations on disk."""

from inspect_lens import _names
from inspect_lens._base.shipped import organism_data as organism_data

from ._registry import *
from ._rows import *
from ._sample import *
from ._store import *
from ._synthetic import *

if not _names.TYPE_CHECKING:
    __all__ = _names.public(globals())
