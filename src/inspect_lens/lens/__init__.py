"""Load and apply tuned and Jacobian lenses, which read a layer as a prediction.

`inspect_lens.train` fits them. An engine applies those that are registered with it.
"""

from ._files import LensCard, LensQuality, LensTraining
from ._lens import Lens
from ._load import is_lens, load_lens
from ._swap import frozen_swap

__all__ = ["Lens", "LensCard", "LensQuality", "LensTraining", "frozen_swap", "is_lens", "load_lens"]
