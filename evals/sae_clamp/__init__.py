"""What does a model do while a latent of a sparse autoencoder is clamped?"""

from evals.sae_clamp.dataset import clamp_dataset
from evals.sae_clamp.task import (
    activation_by_value,
    behaviour_by_value,
    behaviour_seen,
    sae_clamp,
)

__all__ = [
    "activation_by_value",
    "behaviour_by_value",
    "behaviour_seen",
    "clamp_dataset",
    "sae_clamp",
]
