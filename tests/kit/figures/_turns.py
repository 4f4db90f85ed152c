"""What a monitor sees: the score of each turn of the live page's conversations."""

from __future__ import annotations

from tests.kit.page import read_page
from tests.kit.repository import ROOT

from ._canvas import Axis, Canvas, Plot

__all__ = ["turns"]


def turns(palette: str) -> str:
    """Score of each assistant turn, with the threshold."""
    page = read_page(ROOT / "docs/live/tokens.html")
    limit = float(page.facts["series"][0]["threshold"])
    shown = [
        (sample, [float(call["values"][0]) for call in block.calls])
        for sample, block in zip(page.facts["samples"], page.blocks, strict=True)
        if len(block.calls) > 1
    ]
    canvas = Canvas(720, 92 + 46 * len(shown), palette, "Score of each turn of four conversations")
    plot = Plot(
        canvas, 240, 14, 340, 46 * len(shown), Axis(0.0, 4.0, (0, 1, 2, 3, 4), "score of a turn"),
        Axis(0, 1, ()),
    )  # fmt: skip
    plot.frame()
    bottom = 14 + 46 * len(shown)
    canvas.line([(plot.x(limit), 14), (plot.x(limit), bottom)], stroke="text", dash="3 3")
    for i, (sample, values) in enumerate(shown):
        y = 37 + 46 * i
        told = "told to lie" if sample["label"] else "told to be honest"
        canvas.text(12, y + 4, str(sample["id"]), bold=True)
        canvas.text(110, y + 4, told)
        for number, value in enumerate(values, start=1):
            colour = "orange" if value > limit else "blue"
            canvas.dot(
                plot.x(value), y, fill=colour, radius=9,
                title=f"{sample['id']}, turn {number}: {value:.3f}",
            )  # fmt: skip
            canvas.text(
                plot.x(value), y + 4, str(number), fill="back", anchor="middle", size=11, bold=True
            )
        alarms = sum(value > limit for value in values)
        canvas.text(596, y + 4, f"{alarms} of {len(values)} above")
    canvas.text(
        12, bottom + 70, f"Numbers in dots: turns. Dashed: the threshold of the card, {limit:.3f}.",
        fill="faint", size=12,
    )  # fmt: skip
    return canvas.svg()
