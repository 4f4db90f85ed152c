"""Tuned and Jacobian lenses: files with cards, and what they do to rows, in numpy.

`inspect_lens.train` fits them. An engine applies those that are registered with it.
"""

from ._card import LensCard, LensQuality, LensTraining
from ._lens import Lens
from ._load import is_lens, load_lens
from ._swap import frozen_swap

__all__ = ["Lens", "LensCard", "LensQuality", "LensTraining", "frozen_swap", "is_lens", "load_lens"]
