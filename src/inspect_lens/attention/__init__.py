"""Compute attention patterns from captured queries and keys, and score heads by them.

Attention Tracker finds injected prompts by a few heads, and CoRe heads rank documents.
"""

from inspect_lens import _names

from ._heads import *
from ._pattern import *

if not _names.TYPE_CHECKING:
    __all__ = _names.public(globals())
