"""Small figures as SVG text, in a light and a dark palette.

Numbers are text elements or titles of marks, so a test can read them out of the picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final
from xml.sax.saxutils import escape

__all__ = ["PALETTES", "Axis", "Canvas", "Plot"]

PALETTES: Final = {
    "light": {
        "text": "#1f2430", "faint": "#5b6472", "line": "#d0d5dc", "back": "#ffffff",
        "panel": "#f2f5f8", "blue": "#1f5fa8", "orange": "#b3470a", "green": "#0b7a55",
        "grey": "#7f8790", "purple": "#8a4fa0",
    },
    "dark": {
        "text": "#e6e9ef", "faint": "#a9b1bd", "line": "#4a505c", "back": "#1e2129",
        "panel": "#262a33", "blue": "#7db4f5", "orange": "#f0a35e", "green": "#5cc9a0",
        "grey": "#8d95a1", "purple": "#c79be0",
    },
}  # fmt: skip
"""Colours by name. Blue, orange and green are told apart by people who see colours differently."""

SIZE: Final = 13
SMALL: Final = 12


@dataclass
class Canvas:
    """A drawing of a fixed size."""

    width: int
    height: int
    palette: str
    title: str
    lines: list[str] = field(default_factory=list)

    def colour(self, name: str) -> str:
        """A colour of the palette."""
        return PALETTES[self.palette][name]

    def text(
        self, x: float, y: float, said: str, *, fill: str = "text", anchor: str = "start",
        size: int = SIZE, bold: bool = False, mono: bool = False, turn: bool = False,
    ) -> None:  # fmt: skip
        """Write one line; `turn` writes upwards."""
        more = ' font-weight="600"' if bold else ""
        more += ' font-family="ui-monospace, Menlo, Consolas, monospace"' if mono else ""
        more += f' font-size="{size}"' if size != SIZE else ""
        more += f' transform="rotate(-90 {_n(x)} {_n(y)})"' if turn else ""
        self.lines.append(
            f'<text x="{_n(x)}" y="{_n(y)}" fill="{self.colour(fill)}" '
            f'text-anchor="{anchor}"{more}>{escape(said)}</text>'
        )

    def line(
        self, points: Sequence[tuple[float, float]], *, stroke: str, width: float = 1.0,
        dash: str = "", opacity: float = 1.0,
    ) -> None:  # fmt: skip
        """Draw a line through points."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        more = f' stroke-dasharray="{dash}"' if dash else ""
        more += f' stroke-opacity="{opacity:g}"' if opacity < 1 else ""
        self.lines.append(
            f'<polyline points="{path}" fill="none" stroke="{self.colour(stroke)}" '
            f'stroke-width="{width:g}" stroke-linejoin="round"{more}/>'
        )

    def area(
        self, points: Sequence[tuple[float, float]], *, fill: str, opacity: float = 0.18
    ) -> None:
        """Fill a polygon."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self.lines.append(
            f'<polygon points="{path}" fill="{self.colour(fill)}" fill-opacity="{opacity:g}"/>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, *, fill: str, opacity: float = 1.0,
        stroke: str = "", radius: float = 0.0, title: str = "",
    ) -> None:  # fmt: skip
        """Draw a rectangle."""
        more = f' stroke="{self.colour(stroke)}"' if stroke else ""
        more += f' rx="{radius:g}"' if radius else ""
        more += f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
        self.lines.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" '
            f'fill="{self.colour(fill)}"{more}{_close("rect", title)}'
        )

    def dot(
        self, x: float, y: float, *, fill: str, radius: float = 4.0, ring: bool = False,
        title: str = "",
    ) -> None:  # fmt: skip
        """Draw a point; a ring around it marks the one that was chosen."""
        if ring:
            self.lines.append(
                f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{radius + 4:g}" fill="none" '
                f'stroke="{self.colour("text")}" stroke-width="1.5"/>'
            )
        self.lines.append(
            f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{radius:g}" '
            f'fill="{self.colour(fill)}"{_close("circle", title)}'
        )

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """Write (colour, text) below one another, each behind a dot."""
        for i, (fill, said) in enumerate(entries):
            self.dot(x, y + 19 * i - 4, fill=fill, radius=4.5)
            self.text(x + 12, y + 19 * i, said)

    def svg(self) -> str:
        """The file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'role="img" font-family="system-ui, sans-serif" font-size="{SIZE}">'
        )
        back = f'<rect width="{self.width}" height="{self.height}" fill="{self.colour("back")}"/>'
        return "\n".join(
            [head, f"<title>{escape(self.title)}</title>", back, *self.lines, "</svg>", ""]
        )


@dataclass(frozen=True)
class Axis:
    """One direction of a plot."""

    low: float
    high: float
    ticks: Sequence[float]
    name: str = ""
    log: bool = False
    say: Callable[[float], str] = "{:g}".format

    def share(self, value: float) -> float:
        """Where a value is between the ends, 0 to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Plot:
    """A rectangle of a canvas with two axes."""

    canvas: Canvas
    left: float
    top: float
    width: float
    height: float
    across: Axis
    up: Axis

    def x(self, value: float) -> float:
        """Place of a value on the horizontal axis."""
        return self.left + self.width * self.across.share(value)

    def y(self, value: float) -> float:
        """Place of a value on the vertical axis."""
        return self.top + self.height * (1.0 - self.up.share(value))

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Place of a point."""
        return self.x(x), self.y(y)

    def frame(self) -> None:
        """Draw grid, ticks and names."""
        bottom = self.top + self.height
        for tick in self.across.ticks:
            x = self.x(tick)
            self.canvas.line([(x, self.top), (x, bottom)], stroke="line")
            self.canvas.text(
                x, bottom + 17, self.across.say(tick), fill="faint", anchor="middle", size=SMALL
            )
        for tick in self.up.ticks:
            y = self.y(tick)
            self.canvas.line([(self.left, y), (self.left + self.width, y)], stroke="line")
            self.canvas.text(
                self.left - 8, y + 4, self.up.say(tick), fill="faint", anchor="end", size=SMALL
            )
        if self.across.name:
            self.canvas.text(
                self.left + self.width / 2, bottom + 37, self.across.name, anchor="middle"
            )
        if self.up.name:
            self.canvas.text(
                self.left - 46, self.top + self.height / 2, self.up.name, anchor="middle", turn=True
            )


def _close(tag: str, title: str) -> str:
    return f"><title>{escape(title)}</title></{tag}>" if title else "/>"


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
