"""Does a model still refuse without one direction, and refuse without need with it?"""

from evals.refusal_ablation.task import (
    rates_by_kind,
    refusal_ablation,
    refusal_edits,
    refusals_by_edit,
)

__all__ = ["rates_by_kind", "refusal_ablation", "refusal_edits", "refusals_by_edit"]
