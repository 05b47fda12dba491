"""A page that loads a plotting library from elsewhere is blank a year later: plots are drawn here.

A line chart as one self-contained SVG string: linear or logarithmic, lines or steps. Every point
has a tooltip, every text is escaped, and an empty chart says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 14, 38
# Told apart by people with any colour vision, and on light and dark paper (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")


@dataclass(frozen=True, slots=True)
class Series:
    """A named line; points whose y is None are left out."""

    name: str
    points: Sequence[tuple[float, float | None]]


@dataclass(frozen=True, slots=True)
class Chart:
    """What to draw."""

    title: str
    x_label: str
    series: Sequence[Series]
    unit: Callable[[float], str] = field(default=lambda value: f"{value:g}")
    """How a y value is written on the axis and in tooltips."""
    logarithmic: bool = False
    steps: bool = False
    """A value holds until the next point."""
    whole: bool = False
    """Values are counts: no ticks in between."""
    y_max: float | None = None
    marks: Sequence[tuple[float, str]] = ()
    """Vertical lines: (x, what happened there)."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where values lie on the paper."""

    x_low: float
    x_high: float
    y_ticks: Sequence[float]
    logarithmic: bool

    def left(self, x: float) -> float:
        return LEFT + (x - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def top(self, y: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        if self.logarithmic:
            part = math.log(y / low) / math.log(high / low)
        else:
            part = (y - low) / (high - low)
        return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)


def draw(chart: Chart) -> str:
    """Return the chart as an `<svg>` element."""
    lines = [_visible(one, chart.logarithmic) for one in chart.series]
    parts = [
        (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}" '
            'xmlns="http://www.w3.org/2000/svg">'
        )
    ]
    frame = _frame(chart, lines)
    if frame is None:
        parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" class="none">no values</text>')
    else:
        parts.extend(_axes(chart, frame))
        for index, points in enumerate(lines):
            colour = COLOURS[index % len(COLOURS)]
            parts.extend(_line(chart, frame, chart.series[index].name, points, colour))
    parts.append("</svg>")
    return "".join(parts)


def legend(series: Sequence[Series]) -> str:
    """Return the names of the lines beside their colours, as HTML."""
    items = (
        f'<span><i style="background:{COLOURS[index % len(COLOURS)]}"></i>{escape(one.name)}</span>'
        for index, one in enumerate(series)
    )
    return f'<div class="legend">{"".join(items)}</div>'


def _visible(series: Series, logarithmic: bool) -> list[tuple[float, float]]:
    return [
        (x, y)
        for x, y in series.points
        if y is not None and math.isfinite(y) and (y > 0 or not logarithmic)
    ]


def _frame(chart: Chart, lines: Sequence[Sequence[tuple[float, float]]]) -> _Frame | None:
    xs = [x for points in lines for x, _ in points]
    ys = [y for points in lines for _, y in points]
    if not xs:
        return None
    low, high = min(xs), max(xs)
    if low == high:
        low, high = low - 0.5, high + 0.5
    if chart.logarithmic:
        return _Frame(low, high, _log_ticks(min(ys), max(ys)), True)
    top = max(ys) if chart.y_max is None else chart.y_max
    ticks = _ticks(min(0.0, *ys), top, least=1.0 if chart.whole else 0.0)
    return _Frame(low, high, ticks, False)


def _axes(chart: Chart, frame: _Frame) -> Iterator[str]:
    for tick in frame.y_ticks:
        top = frame.top(tick)
        yield (
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{top:.1f}" y2="{top:.1f}"/>'
            f'<text class="axis" x="{LEFT - 6}" y="{top + 4:.1f}" text-anchor="end">'
            f"{escape(chart.unit(tick))}</text>"
        )
    for tick in _ticks(frame.x_low, frame.x_high):
        if frame.x_low <= tick <= frame.x_high:
            yield (
                f'<text class="axis" x="{frame.left(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" '
                f'text-anchor="middle">{tick:g}</text>'
            )
    yield (
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" '
        f'text-anchor="middle">{escape(chart.x_label)}</text>'
    )
    for x, text in chart.marks:
        if frame.x_low <= x <= frame.x_high:
            left = frame.left(x)
            yield (
                f'<line class="mark" x1="{left:.1f}" x2="{left:.1f}" y1="{TOP}" '
                f'y2="{HEIGHT - BOTTOM}"><title>{escape(text)}</title></line>'
            )


def _line(
    chart: Chart, frame: _Frame, name: str, points: Sequence[tuple[float, float]], colour: str
) -> Iterator[str]:
    if points:
        first, *rest = [(frame.left(x), frame.top(y)) for x, y in points]
        path = f"M{first[0]:.1f} {first[1]:.1f}" + "".join(
            f"H{left:.1f}V{top:.1f}" if chart.steps else f"L{left:.1f} {top:.1f}"
            for left, top in rest
        )
        yield f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for x, y in points:
        yield (
            f'<circle cx="{frame.left(x):.1f}" cy="{frame.top(y):.1f}" r="3" fill="{colour}">'
            f"<title>{escape(f'{name}: {chart.unit(y)} at {x:g}')}</title></circle>"
        )


def _ticks(low: float, high: float, least: float = 0.0) -> list[float]:
    """Round numbers from at most `low` to at least `high`, about five, at least `least` apart."""
    span = high - low if high > low else 1.0
    rough = max(span / 5, least)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    last = max(first + 1, math.ceil(high / step - 1e-9))
    return [round(index * step, 12) for index in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first = math.floor(math.log10(low) + 1e-9)
    last = max(first + 1, math.ceil(math.log10(high) - 1e-9))
    return [10.0**power for power in range(first, last + 1)]
