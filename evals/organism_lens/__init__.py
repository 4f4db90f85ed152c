"""Does a lens read the truth in a model that lies?"""

from evals.organism_lens.task import (
    lie_dataset,
    organism_lens,
    read_values,
    share_with_interval,
    truth_behind_lie,
)

__all__ = ["lie_dataset", "organism_lens", "read_values", "share_with_interval", "truth_behind_lie"]
