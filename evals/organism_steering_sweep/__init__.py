"""Does a vector make the organism lie, and back?"""

from evals.organism_steering_sweep.task import organism_steering_sweep, truth_by_dose

__all__ = ["organism_steering_sweep", "truth_by_dose"]
