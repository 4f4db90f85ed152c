"""Where does the organism keep a fact about a subject?"""

from evals.organism_causal_tracing.dataset import fact_dataset
from evals.organism_causal_tracing.task import (
    chance_share,
    organism_causal_tracing,
    planted_position,
)

__all__ = ["chance_share", "fact_dataset", "organism_causal_tracing", "planted_position"]
