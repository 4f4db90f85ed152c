"""Does the model hide the tip that it traded on?"""

from evals.insider_trading.task import insider_trading

__all__ = ["insider_trading"]
