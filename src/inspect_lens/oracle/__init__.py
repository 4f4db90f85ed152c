"""Ask in words about activations: with an oracle, or by the model itself.

Each answer comes with controls.
"""

from ._ask import OracleAnswer, OraclePlan, answer_table, ask_oracle, plan_asking
from ._explain import EXPLAIN, ExplainPlan, explain_rows, plan_explaining
from ._load import Oracle, OracleConfig, load_oracle, read_config
from ._send import (
    CONTROLS,
    find_placeholders,
    injection,
    oracle_message,
    random_rows,
    shuffled_rows,
)

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
