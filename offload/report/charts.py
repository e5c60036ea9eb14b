"""Line charts as SVG, without any library."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

MARK = "<!-- plotted by offload -->"
"""In every file, so that one of ours is known."""

_WIDTH, _HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 96, 34, 46
_COLORS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d", "#444444")
_NUM_TICKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line with its name in the legend; points in the order of x."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart. With `x_names`, x is the index of a name; else a number."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    x_names: Sequence[str] = field(default=())


def render_page(title: str, caption: str, charts: Sequence[Chart], *, columns: int = 3) -> str:
    """Returns an SVG document with the charts in rows of `columns`."""
    columns = max(1, min(columns, len(charts)))
    rows = -(-len(charts) // columns)
    width, height = columns * _WIDTH, rows * _HEIGHT + 64
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">'
        ),
        MARK,
        '<rect width="100%" height="100%" fill="white"/>',
        _text(16, 26, title, size=18),
        _text(16, 46, caption, size=11, color="#555555"),
    ]
    for i, chart in enumerate(charts):
        x, y = i % columns * _WIDTH, i // columns * _HEIGHT + 56
        parts.append(f'<g transform="translate({x},{y})">{_chart(chart)}</g>')
    return "\n".join([*parts, "</svg>", ""])


def _chart(chart: Chart) -> str:
    points = [point for line in chart.lines for point in line.points]
    x_ends = _x_ends(chart, [x for x, _ in points])
    y_ticks = _ticks(max((y for _, y in points), default=1.0))
    frame = _Frame(x_ends=x_ends, y_end=y_ticks[-1])
    parts = [_text(_LEFT, 20, chart.title, size=13, weight="bold")]
    parts += [_y_tick(frame, value) for value in y_ticks]
    parts += [_x_tick(frame, x, name) for x, name in _x_ticks(chart, x_ends)]
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, chart.x_label, anchor="middle"))
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(
        f'<g transform="rotate(-90 14 {middle})">'
        f"{_text(14, middle, chart.y_label, anchor='middle')}</g>"
    )
    for i, line in enumerate(chart.lines):
        parts += _line(frame, line, _COLORS[i % len(_COLORS)])
        parts += _legend(i, line.name)
    return "\n".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    x_ends: tuple[float, float]
    y_end: float

    def x(self, value: float) -> float:
        low, high = self.x_ends
        return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - value / self.y_end * (_HEIGHT - _TOP - _BOTTOM)


def _x_ends(chart: Chart, values: Sequence[float]) -> tuple[float, float]:
    if chart.x_names:
        return -0.3, len(chart.x_names) - 0.7
    high = max(values, default=1.0)
    return 0.0, high if high > 0 else 1.0


def _x_ticks(chart: Chart, ends: tuple[float, float]) -> list[tuple[float, str]]:
    if chart.x_names:
        return [(float(i), name) for i, name in enumerate(chart.x_names)]
    return [(value, f"{value:g}") for value in _ticks(ends[1]) if value <= ends[1]]


def _ticks(largest: float) -> list[float]:
    """Round numbers from 0 to `largest` or a little more."""
    if largest <= 0:
        return [0.0, 1.0]
    raw = largest / _NUM_TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
    return [round(i * step, 12) for i in range(math.ceil(largest / step - 1e-9) + 1)]


def _y_tick(frame: _Frame, value: float) -> str:
    y = frame.y(value)
    return (
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>'
        + _text(_LEFT - 6, y + 4, f"{value:g}", anchor="end", size=11)
    )


def _x_tick(frame: _Frame, value: float, name: str) -> str:
    x, base = frame.x(value), _HEIGHT - _BOTTOM
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 4}" stroke="#888888"/>'
        + _text(x, base + 17, name, anchor="middle", size=11)
    )


def _line(frame: _Frame, line: Line, color: str) -> list[str]:
    at = [(frame.x(x), frame.y(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    parts = [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"/>']
    if len(at) <= 16:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{color}"/>' for x, y in at]
    return parts


def _legend(index: int, name: str) -> list[str]:
    x, y = _WIDTH - _RIGHT + 10, _TOP + 6 + 17 * index
    color = _COLORS[index % len(_COLORS)]
    return [
        f'<line x1="{x}" x2="{x + 14}" y1="{y}" y2="{y}" stroke="{color}" stroke-width="2.5"/>',
        _text(x + 18, y + 4, name, size=11),
    ]


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 12,
    anchor: str = "start",
    weight: str = "normal",
    color: str = "#222222",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'font-weight="{weight}" fill="{color}">{escape(text)}</text>'
    )
