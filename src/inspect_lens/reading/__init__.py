"""Read what a probe finds in model calls: scores of tokens, turns and cells of a sweep.

Scorers, monitors, tools and viewers are built on `ProbeReader`, so their numbers agree.
"""

from ._calls import CallReading, Calls, Over, calls_to_read, check_over, read_calls
from ._cell_scores import CellScores
from ._cells import CellKind, SteeringCell, SteeringCells, read_cells
from ._columns import captured_calls_column, lens_column
from ._documents import DocumentReader, DocumentReading
from ._given import (
    GIVEN_TOKENS,
    WITHHELD,
    GivenTokens,
    given_length,
    given_tokens,
    is_withheld,
)
from ._latents import LatentCall, LatentReader, LatentReading, read_latents
from ._message import call_of, read_call, read_message
from ._pairs import ContrastiveAnswer, ContrastiveAnswers, PairRow, read_pairs
from ._queries_keys import read_queries_keys
from ._reader import ProbeReader
from ._reading import Reading
from ._rows import Rows, Source, pick_rows, read_rows, read_token_ids
from ._scored import ScoredTokens
from ._suspicion import Suspicion, SuspicionUnit
from ._token_scores import TokenScores, engine_records, read_token_scores, save_token_scores
from ._tracker import FocusReading, TrackerReader, calibrate_tracker
from ._turns import Turn, read_turns

__all__ = [
    "GIVEN_TOKENS",
    "WITHHELD",
    "CallReading",
    "Calls",
    "CellKind",
    "CellScores",
    "ContrastiveAnswer",
    "ContrastiveAnswers",
    "DocumentReader",
    "DocumentReading",
    "FocusReading",
    "GivenTokens",
    "LatentCall",
    "LatentReader",
    "LatentReading",
    "Over",
    "PairRow",
    "ProbeReader",
    "Reading",
    "Rows",
    "ScoredTokens",
    "Source",
    "SteeringCell",
    "SteeringCells",
    "Suspicion",
    "SuspicionUnit",
    "TokenScores",
    "TrackerReader",
    "Turn",
    "calibrate_tracker",
    "call_of",
    "calls_to_read",
    "captured_calls_column",
    "check_over",
    "engine_records",
    "given_length",
    "given_tokens",
    "is_withheld",
    "lens_column",
    "pick_rows",
    "read_call",
    "read_calls",
    "read_cells",
    "read_latents",
    "read_message",
    "read_pairs",
    "read_queries_keys",
    "read_rows",
    "read_token_ids",
    "read_token_scores",
    "read_turns",
    "save_token_scores",
]
