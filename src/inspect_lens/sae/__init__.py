"""Sparse autoencoders: read their files, compute latents of rows, and make edits of latents.

A file of SAELens or Gemma Scope goes in. `SparseEncoder` says which latents are active in captured
rows, and `SparseAutoencoder` also makes the edits that change them in an engine, and the form in
which an engine keeps all of it.
`matched_latents` finds others to compare such an edit with.
"""

from inspect_lens import _names

from ._encoder import *
from ._files import *

if not _names.TYPE_CHECKING:
    __all__ = _names.public(globals())
