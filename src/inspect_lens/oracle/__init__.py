"""Ask in words about activations: with an oracle, or by the model itself.

Each answer comes with controls.
"""

from ._ask import OracleAnswer, answer_table, ask_oracle
from ._explain import EXPLAIN, explain_rows
from ._explained import FractionExplained, fraction_explained
from ._load import Oracle, OracleConfig, load_oracle
from ._nla import Verbaliser, read_verbaliser, verbalise
from ._reconstruct import Reconstructor, complete_reconstructor, read_reconstructor, reconstruct
from ._send import CONTROLS

__all__ = [
    "CONTROLS",
    "EXPLAIN",
    "FractionExplained",
    "Oracle",
    "OracleAnswer",
    "OracleConfig",
    "Reconstructor",
    "Verbaliser",
    "answer_table",
    "ask_oracle",
    "complete_reconstructor",
    "explain_rows",
    "fraction_explained",
    "load_oracle",
    "read_reconstructor",
    "read_verbaliser",
    "reconstruct",
    "verbalise",
]
