"""What people look at: token pages of logs, summaries in Inspect's viewer, a chat page, reports.

Pages are single HTML files. Figures need matplotlib, which the extra `train` brings.
"""

from inspect_lens import _names
from inspect_lens._base.token_texts import TokenTexts as TokenTexts

from ._chat_server import *
from ._chat_talk import *
from ._report import *
from ._sweeps import *
from ._viewer import *
from ._write import *

if not _names.TYPE_CHECKING:
    __all__ = _names.public(globals())
