"""Show token scores: one page per log, summaries for Inspect's own viewer, and a chat page."""

from inspect_lens._token_texts import TokenTexts

from ._chat_server import ChatPage
from ._chat_talk import ChatSetup, ChatTalk, open_talk
from ._viewer import note_readings, probe_summary, probe_viewer, sparkline
from ._write import MAX_PAGE_BYTES, WrittenView, write_view

__all__ = [
    "MAX_PAGE_BYTES",
    "ChatPage",
    "ChatSetup",
    "ChatTalk",
    "TokenTexts",
    "WrittenView",
    "note_readings",
    "open_talk",
    "probe_summary",
    "probe_viewer",
    "sparkline",
    "write_view",
]
