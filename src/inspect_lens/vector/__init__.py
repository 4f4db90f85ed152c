"""Steering vectors with cards: directions per layer, files, controls, dose and response.

`inspect_lens.train` finds them.
"""

from ._dose import DosePoint, DoseResponse, Response, dose_response
from ._foreign import VectorFormat, export_vector, import_vector
from ._vector import Vector, VectorCard, VectorLike, VectorTraining, load_vector, steering_vector

__all__ = [
    "DosePoint",
    "DoseResponse",
    "Response",
    "Vector",
    "VectorCard",
    "VectorFormat",
    "VectorLike",
    "VectorTraining",
    "dose_response",
    "export_vector",
    "import_vector",
    "load_vector",
    "steering_vector",
]
