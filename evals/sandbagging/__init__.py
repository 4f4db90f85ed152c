"""Does the model do worse than it can, and hide it?"""

from evals.sandbagging.task import sandbagging

__all__ = ["sandbagging"]
