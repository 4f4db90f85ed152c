"""Write a report of a probe or a sweep: one HTML file, and figures as PNG."""

from ._content import Case, ReportSet, cases
from ._dose import draw_dose_response, write_dose_response
from ._frontier import CascadeLike, draw_cascade, draw_transfer
from ._write import write_report

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
