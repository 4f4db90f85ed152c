"""How much does a vector move a model to refuse, or to comply?"""

from evals.refusal_steering.dataset import refusal_dataset
from evals.refusal_steering.task import by_kind, each_kind, refusal_steering, refusals_by_dose

__all__ = ["by_kind", "each_kind", "refusal_dataset", "refusal_steering", "refusals_by_dose"]
