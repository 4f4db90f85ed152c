"""Show token scores: one page per log, and summaries for Inspect's own viewer."""

from inspect_lens._token_texts import TokenTexts

from ._summary import note_readings, probe_summary, sparkline
from ._viewer import probe_viewer
from ._write import MAX_PAGE_BYTES, WrittenView, write_view

__all__ = [
    "MAX_PAGE_BYTES",
    "TokenTexts",
    "WrittenView",
    "note_readings",
    "probe_summary",
    "probe_viewer",
    "sparkline",
    "write_view",
]
