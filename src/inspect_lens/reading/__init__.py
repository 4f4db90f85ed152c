"""Read what a probe finds in model calls: scores of tokens, turns and cells of a sweep.

Scorers, monitors, tools and viewers are built on `ProbeReader`, so their numbers agree.
"""

from ._attention import calibrate_tracker, read_queries_keys
from ._calls import Calls, CallSelection, OnMissing, Over, Turn, read_turns
from ._columns import captured_calls_column, lens_column
from ._latents import LatentReader, LatentReading
from ._reader import ProbeReader, Reading
from ._rows import Source
from ._samples import (
    CallReading,
    SampleReading,
    read_calls,
    read_latents,
    read_message,
    read_sample,
    read_sample_captured,
)
from ._stored import PairRow, SteeringCell, SteeringCells, given_length, read_cells, read_pairs
from ._thresholds import Suspicion, SuspicionUnit
from ._token_scores import TokenScores, read_token_scores

__all__ = [
    "CallReading",
    "CallSelection",
    "Calls",
    "LatentReader",
    "LatentReading",
    "OnMissing",
    "Over",
    "PairRow",
    "ProbeReader",
    "Reading",
    "SampleReading",
    "Source",
    "SteeringCell",
    "SteeringCells",
    "Suspicion",
    "SuspicionUnit",
    "TokenScores",
    "Turn",
    "calibrate_tracker",
    "captured_calls_column",
    "given_length",
    "lens_column",
    "read_calls",
    "read_cells",
    "read_latents",
    "read_message",
    "read_pairs",
    "read_queries_keys",
    "read_sample",
    "read_sample_captured",
    "read_token_scores",
    "read_turns",
]
