"""Ask in words about activations: with an oracle, or by the model itself.

Each answer comes with controls.
"""

from ._ask import OracleAnswer, answer_table, ask_oracle
from ._explain import EXPLAIN, explain_rows
from ._load import Oracle, OracleConfig, load_oracle
from ._nla import Verbaliser, fraction_explained, read_verbaliser, verbalise
from ._send import CONTROLS

__all__ = [
    "CONTROLS",
    "EXPLAIN",
    "Oracle",
    "OracleAnswer",
    "OracleConfig",
    "Verbaliser",
    "answer_table",
    "ask_oracle",
    "explain_rows",
    "fraction_explained",
    "load_oracle",
    "read_verbaliser",
    "verbalise",
]
