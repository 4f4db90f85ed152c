"""Does the model, in a part, deceive about what the part knows?"""

from evals.roleplaying_deception.task import roleplaying_deception

__all__ = ["roleplaying_deception"]
