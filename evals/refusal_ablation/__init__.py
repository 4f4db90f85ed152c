"""Does a model still refuse without one direction, and refuse without need with it?"""

from evals.refusal_ablation.task import (
    arms_by_kind,
    refusal_ablation,
    refusal_arms,
    refusals_by_arm,
)

__all__ = ["arms_by_kind", "refusal_ablation", "refusal_arms", "refusals_by_arm"]
