"""What people look at: token pages of logs, summaries in Inspect's viewer, a chat page, reports.

Pages are single HTML files. Figures need matplotlib, which the extra `train` brings.
"""

from inspect_lens._base.token_texts import TokenTexts

from ._chat_server import ChatPage
from ._chat_talk import ChatSetup, ChatTalk, open_talk
from ._report import Case, ReportSet, cases, write_report
from ._sweeps import (
    draw_cascade,
    draw_transfer,
    write_dose_response,
)
from ._viewer import note_readings, probe_summary, probe_viewer, sparkline
from ._write import MAX_PAGE_BYTES, WrittenView, write_view

__all__ = [
    "MAX_PAGE_BYTES",
    "Case",
    "ChatPage",
    "ChatSetup",
    "ChatTalk",
    "ReportSet",
    "TokenTexts",
    "WrittenView",
    "cases",
    "draw_cascade",
    "draw_transfer",
    "note_readings",
    "open_talk",
    "probe_summary",
    "probe_viewer",
    "sparkline",
    "write_dose_response",
    "write_report",
    "write_view",
]
