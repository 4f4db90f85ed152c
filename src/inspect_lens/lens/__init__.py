"""Load and apply tuned and Jacobian lenses, which read a layer as a prediction.

`inspect_lens.train` fits them. An engine applies those that are registered with it.
"""

from ._files import LensCard, LensQuality, LensTraining
from ._lens import Lens, load_lens

__all__ = ["Lens", "LensCard", "LensQuality", "LensTraining", "load_lens"]
