"""Read what a probe finds in model calls: scores of tokens, turns and cells of a sweep.

Scorers, monitors, tools and viewers are built on `ProbeReader`, so their numbers agree.
"""

from ._calls import Calls, CallSelection, OnMissing, Over, Turn, read_turns
from ._cells import CellKind, CellScores, SteeringCell, SteeringCells, read_cells
from ._columns import captured_calls_column, lens_column
from ._documents import DocumentReader, DocumentReading
from ._given import (
    GIVEN_TOKENS,
    WITHHELD,
    ContrastiveAnswer,
    ContrastiveAnswers,
    GivenTokens,
    PairRow,
    given_length,
    given_tokens,
    is_withheld,
    read_pairs,
)
from ._latents import LatentReader, LatentReading
from ._message import call_of, read_call, read_message
from ._queries_keys import read_queries_keys
from ._reader import ProbeReader
from ._reading import Reading, ScoredTokens
from ._rows import Rows, Source, pick_rows, read_rows, read_token_ids
from ._samples import (
    CallReading,
    Combine,
    SampleReading,
    combining,
    read_latents,
    read_sample,
    read_sample_captured,
)
from ._suspicion import Suspicion, SuspicionUnit
from ._token_scores import TokenScores, engine_records, read_token_scores, save_token_scores
from ._tracker import FocusReading, TrackerReader, calibrate_tracker

__all__ = [
    "GIVEN_TOKENS",
    "WITHHELD",
    "CallReading",
    "CallSelection",
    "Calls",
    "CellKind",
    "CellScores",
    "Combine",
    "ContrastiveAnswer",
    "ContrastiveAnswers",
    "DocumentReader",
    "DocumentReading",
    "FocusReading",
    "GivenTokens",
    "LatentReader",
    "LatentReading",
    "OnMissing",
    "Over",
    "PairRow",
    "ProbeReader",
    "Reading",
    "Rows",
    "SampleReading",
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
    "captured_calls_column",
    "combining",
    "engine_records",
    "given_length",
    "given_tokens",
    "is_withheld",
    "lens_column",
    "pick_rows",
    "read_call",
    "read_cells",
    "read_latents",
    "read_message",
    "read_pairs",
    "read_queries_keys",
    "read_rows",
    "read_sample",
    "read_sample_captured",
    "read_token_ids",
    "read_token_scores",
    "read_turns",
    "save_token_scores",
]
