"""Ask in words about activations: with an oracle, or by the model itself.

Each answer comes with controls.
"""

from ._answer import OracleAnswer, answer_table
from ._ask import OraclePlan, ask_oracle, plan_asking
from ._config import OracleConfig, read_config
from ._explain import EXPLAIN, ExplainPlan, explain_rows, plan_explaining
from ._inject import CONTROLS, injection, random_rows, shuffled_rows
from ._load import Oracle, load_oracle
from ._prompt import find_placeholders, oracle_message

__all__ = [
    "CONTROLS",
    "EXPLAIN",
    "ExplainPlan",
    "Oracle",
    "OracleAnswer",
    "OracleConfig",
    "OraclePlan",
    "answer_table",
    "ask_oracle",
    "explain_rows",
    "find_placeholders",
    "injection",
    "load_oracle",
    "oracle_message",
    "plan_asking",
    "plan_explaining",
    "random_rows",
    "read_config",
    "shuffled_rows",
]
