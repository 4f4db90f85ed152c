"""How much does a vector move a model to agree with its user?"""

from evals.sycophancy_steering.dataset import sycophancy_dataset
from evals.sycophancy_steering.task import (
    agreement_by_dose,
    behaviour_match,
    sycophancy_steering,
)

__all__ = ["agreement_by_dose", "behaviour_match", "sycophancy_dataset", "sycophancy_steering"]
