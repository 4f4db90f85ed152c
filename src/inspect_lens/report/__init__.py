"""Write a report of a probe or a sweep: one HTML file, and figures as PNG."""

from ._content import Case, ReportSet, cases
from ._html import write_report
from ._sweeps import (
    CascadeLike,
    draw_cascade,
    draw_dose_response,
    draw_transfer,
    write_dose_response,
)

__all__ = [
    "CascadeLike",
    "Case",
    "ReportSet",
    "cases",
    "draw_cascade",
    "draw_dose_response",
    "draw_transfer",
    "write_dose_response",
    "write_report",
]
