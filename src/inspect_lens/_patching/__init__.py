"""Activation patching without an engine: prompts and rows in, events and arrays out.

`inspect_lens.patch` runs it on an engine of this process or a server's, and a server on its own.
Read `_sweep.py` first; `_runs.py` says what it asks an engine for.
"""

from ._align import Align, Alignment, align_tokens, choose_positions, find_subject
from ._result import CausalTrace, PatchCell, PatchSweep, RunScore, Source
from ._runs import (
    Prompt,
    Rows,
    Run,
    Runs,
    capture_spec,
    chat_ending,
    is_chat,
    messages_of,
    next_token,
    warn_without_space,
)
from ._sweep import (
    IN_FLIGHT,
    CellDone,
    EventLines,
    FloorFound,
    Stored,
    SweepEvent,
    SweepSpec,
    SweepStarted,
    check_site,
    events_of,
    gather,
    patches,
    specs_of,
    sweep,
    to_body,
    windows,
)

__all__ = [
    "IN_FLIGHT",
    "Align",
    "Alignment",
    "CausalTrace",
    "CellDone",
    "EventLines",
    "FloorFound",
    "PatchCell",
    "PatchSweep",
    "Prompt",
    "Rows",
    "Run",
    "RunScore",
    "Runs",
    "Source",
    "Stored",
    "SweepEvent",
    "SweepSpec",
    "SweepStarted",
    "align_tokens",
    "capture_spec",
    "chat_ending",
    "check_site",
    "choose_positions",
    "events_of",
    "find_subject",
    "gather",
    "is_chat",
    "messages_of",
    "next_token",
    "patches",
    "specs_of",
    "sweep",
    "to_body",
    "warn_without_space",
    "windows",
]
