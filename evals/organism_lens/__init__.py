"""Does a lens read the truth in a model that lies?"""

from evals.organism_lens.task import (
    organism_lens,
    read_values,
    share_with_interval,
    truth_behind_lie,
)

__all__ = ["organism_lens", "read_values", "share_with_interval", "truth_behind_lie"]
