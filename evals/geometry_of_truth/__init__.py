"""Is there a direction of truth in statements?"""

from evals.geometry_of_truth.task import geometry_of_truth, statement_probe

__all__ = ["geometry_of_truth", "statement_probe"]
