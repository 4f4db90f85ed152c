"""Does the model lie when it is told to?"""

from evals.ai_liar.task import ai_liar

__all__ = ["ai_liar"]
