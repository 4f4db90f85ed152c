"""Is the model organism deceiving? A probe reads it while it answers."""

from evals.organism_deception.dataset import organism_dataset
from evals.organism_deception.task import organism_control, organism_deception, truthfulness

__all__ = ["organism_control", "organism_dataset", "organism_deception", "truthfulness"]
