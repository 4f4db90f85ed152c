"""The three kinds of figures of the gallery, as data and as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tests.kit.figures._canvas import Axis, Canvas, Plot

__all__ = ["Bar", "Bars", "Chart", "Heat", "Line", "Lines", "draw"]

COLOURS: Final = ("blue", "orange", "green", "purple", "grey")
WIDTH: Final = 720


@dataclass(frozen=True)
class Bar:
    """A value with its interval."""

    group: str
    series: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Bars:
    """Horizontal bars: a block for each group, a colour for each series."""

    title: str
    across: str
    bars: Sequence[Bar]
    low: float = 0.0
    high: float = 1.0
    mark: float | None = None
    """Where a vertical line stands, such as chance."""


@dataclass(frozen=True)
class Heat:
    """A table whose cells are coloured by their value."""

    title: str
    across: str
    up: str
    columns: Sequence[str]
    rows: Sequence[str]
    values: Sequence[Sequence[float]]
    low: float = 0.0
    high: float = 1.0
    middle: float | None = None
    """Value without colour; what lies below it is orange. None: `low`."""
    digits: int = 2


@dataclass(frozen=True)
class Line:
    """Points that belong together, with their intervals where they have any."""

    series: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Lines:
    """Curves over one axis."""

    title: str
    across: str
    up: str
    lines: Sequence[Line]
    low: float = 0.0
    high: float = 1.0
    ticks: Sequence[float] = ()
    """Of the horizontal axis; the points of the first line by default."""


Chart = Bars | Heat | Lines


def draw(chart: Chart, palette: str) -> str:
    """The SVG of a chart in `light` or `dark`."""
    if isinstance(chart, Bars):
        return _bars(chart, palette)
    return _heat(chart, palette) if isinstance(chart, Heat) else _lines(chart, palette)


def _bars(chart: Bars, palette: str) -> str:
    groups = list(dict.fromkeys(bar.group for bar in chart.bars))
    series = list(dict.fromkeys(bar.series for bar in chart.bars))
    tall = {g: 24 * sum(b.group == g for b in chart.bars) + 34 for g in groups}
    top = 24 + 19 * len(series) if len(series) > 1 else 16
    height = top + sum(tall.values())
    canvas = Canvas(WIDTH, height + 52, palette, chart.title)
    if len(series) > 1:
        canvas.legend(30, 24, [(COLOURS[i], name) for i, name in enumerate(series)])
    ticks = [chart.low + (chart.high - chart.low) * i / 4 for i in range(5)]
    across = Axis(chart.low, chart.high, ticks, chart.across, say="{:.3g}".format)
    plot = Plot(canvas, 30, top, WIDTH - 90, height - top, across, Axis(0, 1, ()))
    plot.frame()
    if chart.mark is not None:
        x = plot.x(chart.mark)
        canvas.line([(x, top), (x, height)], stroke="text", dash="4 3")
    zero, y = plot.x(min(max(0.0, chart.low), chart.high)), float(top)
    for group in groups:
        # No line runs through a word.
        canvas.box(29, y, WIDTH - 88, 24, fill="back")
        canvas.text(34, y + 18, group, bold=True)
        y += 26
        for bar in (b for b in chart.bars if b.group == group):
            x = plot.x(bar.value)
            colour = COLOURS[series.index(bar.series)]
            canvas.box(
                min(zero, x), y, max(abs(x - zero), 2), 17, fill=colour, opacity=0.6,
                title=f"{group}, {bar.series}: {bar.value:.3f}",
            )  # fmt: skip
            end = x
            if bar.low is not None and bar.high is not None:
                ends = [(plot.x(v), y + 8.5) for v in (bar.low, bar.high)]
                canvas.line(ends, stroke="text", width=1.6)
                end = max(x, ends[1][0])
            canvas.box(end + 4, y, 34, 17, fill="back")
            canvas.text(end + 6, y + 13, f"{bar.value:.2f}", size=12)
            y += 24
        y += 8
    return canvas.svg()


def _heat(chart: Heat, palette: str) -> str:
    left = 24 + max(7.2 * max(map(len, chart.rows)), 40)
    cell = (WIDTH - left - 12) / len(chart.columns)
    size = 30 if len(chart.rows) <= 14 else 21
    slanted = max(map(len, chart.columns)) * 7.2 > cell
    top = 34.0 + (min(max(map(len, chart.columns)) * 7.2, 150) if slanted else 12)
    height = top + size * len(chart.rows)
    canvas = Canvas(WIDTH, round(height + 14), palette, chart.title)
    middle = chart.low if chart.middle is None else chart.middle
    for j, name in enumerate(chart.columns):
        x = left + cell * (j + 0.5)
        if slanted:
            canvas.text(x + 4, top - 8, name, size=12, turn=True)
        else:
            canvas.text(x, top - 8, name, anchor="middle", size=12)
    for i, (name, values) in enumerate(zip(chart.rows, chart.values, strict=True)):
        y = top + size * i
        canvas.text(left - 8, y + size / 2 + 4, name, anchor="end", size=12)
        for j, value in enumerate(values):
            far = chart.high - middle if value >= middle else middle - chart.low
            share = min(abs(value - middle) / far, 1.0) if far else 0.0
            fill = "blue" if value >= middle else "orange"
            canvas.box(
                left + cell * j, y, cell - 1, size - 1, fill=fill,
                opacity=0.04 + 0.56 * share, title=f"{name}, {chart.columns[j]}: {value:.3f}",
            )  # fmt: skip
            if cell >= 30 and size >= 20:
                said = f"{round(value, chart.digits) + 0.0:.{chart.digits}f}"
                canvas.text(
                    left + cell * (j + 0.5), y + size / 2 + 4, said, anchor="middle", size=12
                )
    canvas.text(left, 18, f"rows: {chart.up}; columns: {chart.across}", fill="faint", size=12)
    return canvas.svg()


def _lines(chart: Lines, palette: str) -> str:
    top = 22 + 19 * len(chart.lines)
    canvas = Canvas(WIDTH, top + 340, palette, chart.title)
    points = [x for line in chart.lines for x, _ in line.points]
    ticks = chart.ticks or [x for x, _ in chart.lines[0].points]
    span = max(points) - min(points) or 1.0
    across = Axis(min(points) - 0.02 * span, max(points) + 0.02 * span, ticks, chart.across)
    ups = [chart.low + (chart.high - chart.low) * i / 4 for i in range(5)]
    up = Axis(chart.low, chart.high, ups, chart.up, say="{:.3g}".format)
    plot = Plot(canvas, 76, top, WIDTH - 100, 280, across, up)
    plot.frame()
    canvas.legend(84, 22, [(COLOURS[i], line.series) for i, line in enumerate(chart.lines)])
    for i, line in enumerate(chart.lines):
        if line.band:
            xs = [x for x, _ in line.points]
            band = [plot.at(x, low) for x, (low, _) in zip(xs, line.band, strict=True)]
            band += [
                plot.at(x, high) for x, (_, high) in reversed(list(zip(xs, line.band, strict=True)))
            ]
            canvas.area(band, fill=COLOURS[i], opacity=0.14)
        canvas.line([plot.at(*point) for point in line.points], stroke=COLOURS[i], width=2.2)
        for x, y in line.points:
            title = f"{line.series}, {x:g}: {y:.3f}"
            canvas.dot(*plot.at(x, y), fill=COLOURS[i], radius=3.2, title=title)
    return canvas.svg()
