"""Load and apply tuned and Jacobian lenses, which read a layer as a prediction.

`inspect_lens.train` fits them. An engine applies those that are registered with it.
"""

from ._coordinates import (
    CoordinatePatch,
    Decomposition,
    Occupancy,
    coordinate_patch,
    decompose,
    estimate_occupancy,
)
from ._foreign import import_lens
from ._lens import Lens, LensCard, LensQuality, LensTraining, load_lens

__all__ = [
    "CoordinatePatch",
    "Decomposition",
    "Lens",
    "LensCard",
    "LensQuality",
    "LensTraining",
    "Occupancy",
    "coordinate_patch",
    "decompose",
    "estimate_occupancy",
    "import_lens",
    "load_lens",
]
