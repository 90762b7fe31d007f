"""Charts as SVG text for reports: lines, and stacked bars. Pure; colours come from the page's style by class names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_WIDTH, _HEIGHT = 340, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 26, 38
_NUM_TICKS = 5
_BAR_HEIGHT, _BAR_GAP, _BAR_LABEL_WIDTH, _BAR_WIDTH = 18, 8, 290, 780


@dataclass(frozen=True, slots=True)
class Series:
    """One line. ``style``: a class name of the page. ``spread``: (x, lowest, highest), drawn as whiskers."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]
    spread: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True, slots=True)
class Axes:
    """What a chart shows. Ticks of ``x`` stand where they are given; logarithmic axes take values above 0 only."""

    title: str
    x_label: str
    y_label: str
    x_ticks: tuple[float, ...] = ()
    is_log_x: bool = False
    is_log_y: bool = False
    has_marks: bool = True


@dataclass(frozen=True, slots=True)
class Bar:
    """One stacked bar: its parts in the order of the chart's names; those below 0 count as 0."""

    label: str
    parts: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Scale:
    """One axis: from values to pixels."""

    low: float
    high: float
    from_px: float
    to_px: float
    is_log: bool

    def px(self, value: float) -> float:
        low, high, value = (math.log10(each) if self.is_log else each for each in (self.low, self.high, value))
        part = (value - low) / (high - low) if high > low else 0.5
        return self.from_px + min(max(part, 0.0), 1.0) * (self.to_px - self.from_px)

    def ticks(self) -> list[float]:
        if not self.is_log:
            step = nice_step((self.high - self.low) / _NUM_TICKS)
            first = math.ceil(self.low / step)
            return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        digits = (1, 2, 5) if self.high / self.low < 1000 else (1,)
        ticks = [digit * 10.0**decade for decade in decades for digit in digits]
        return [tick for tick in ticks if self.low * 0.999 <= tick <= self.high * 1.001]


def line_chart(axes: Axes, series: Sequence[Series]) -> str:
    """Lines through points, one for each series. Without any points it says so."""
    xs, ys = _values(axes, series)
    if not xs:
        return _frame(axes.title, [f'<text x="{_WIDTH / 2}" y="{_HEIGHT / 2}" text-anchor="middle">no data</text>'])
    x = _Scale(*_range(xs, is_log=axes.is_log_x, is_from_zero=False), _LEFT + 8, _WIDTH - _RIGHT - 8, axes.is_log_x)
    y = _Scale(*_range(ys, is_log=axes.is_log_y, is_from_zero=True), _HEIGHT - _BOTTOM, _TOP, axes.is_log_y)
    parts = _grid(axes, x, y)
    for each in series:
        parts += _line(each, x, y, has_marks=axes.has_marks)
    return _frame(axes.title, parts)


def bar_chart(title: str, unit: str, part_names: Sequence[str], bars: Sequence[Bar]) -> str:
    """Bars from left to right, one below the other, each made of the same parts. The total stands at its end."""
    longest = max((sum(max(part, 0.0) for part in bar.parts) for bar in bars), default=0.0)
    width, height = _BAR_WIDTH, _TOP + len(bars) * (_BAR_HEIGHT + _BAR_GAP)
    room = width - _BAR_LABEL_WIDTH - 80
    parts = []
    for index, bar in enumerate(bars):
        top = _TOP + index * (_BAR_HEIGHT + _BAR_GAP)
        left = float(_BAR_LABEL_WIDTH)
        middle = top + _BAR_HEIGHT / 2 + 4
        parts.append(f'<text x="{left - 6:.1f}" y="{middle:.1f}" text-anchor="end">{escape(bar.label)}</text>')
        for number, (name, value) in enumerate(zip(part_names, bar.parts, strict=True)):
            length = max(value, 0.0) / longest * room if longest else 0.0
            told = f"<title>{escape(bar.label)}, {escape(name)}: {number_text(value)} {escape(unit)}</title>"
            parts.append(
                f'<rect class="part{number}" x="{left:.1f}" y="{top}" width="{length:.1f}" height="{_BAR_HEIGHT}">'
                f"{told}</rect>"
            )
            left += length
        total = sum(max(part, 0.0) for part in bar.parts)
        parts.append(f'<text x="{left + 6:.1f}" y="{middle:.1f}">{number_text(total)} {escape(unit)}</text>')
    return _frame(title, parts, width=width, height=height)


def cumulative(values: Sequence[float]) -> list[tuple[float, float]]:
    """Points of a distribution: each value, and the percentage of values up to it."""
    ordered = sorted(values)
    return [(value, 100 * (index + 1) / len(ordered)) for index, value in enumerate(ordered)]


def nice_step(step: float) -> float:
    """1, 2 or 5 times a power of ten, at least ``step``."""
    if step <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(step))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= step * 0.999)


def number_text(value: float) -> str:
    """Three digits at most where that is enough."""
    if value and abs(value) < 10:
        return f"{value:.2g}"
    return f"{value:,.0f}"


def _values(axes: Axes, series: Sequence[Series]) -> tuple[list[float], list[float]]:
    points = [point for each in series for point in each.points if _is_drawn(axes, point)]
    return [x for x, _ in points], [y for _, y in points]


def _is_drawn(axes: Axes, point: tuple[float, float]) -> bool:
    return (point[0] > 0 or not axes.is_log_x) and (point[1] > 0 or not axes.is_log_y)


def _range(values: Sequence[float], *, is_log: bool, is_from_zero: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if is_log:
        return (low / 1.2, high * 1.2) if is_from_zero or low == high else (low, high)
    if is_from_zero:
        return 0.0, high * 1.08 or 1.0
    return (low, high) if low < high else (low - 1, high + 1)


def _grid(axes: Axes, x: _Scale, y: _Scale) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for value in y.ticks():
        at = y.px(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{at + 4:.1f}" text-anchor="end">{number_text(value)}</text>')
    for value in axes.x_ticks or x.ticks():
        at = x.px(value)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{bottom}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 14}" text-anchor="middle">{number_text(value)}</text>')
    middle = (_LEFT + right) / 2
    parts.append(f'<text x="{middle:.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(axes.x_label)}</text>')
    parts.append(f'<text x="4" y="{_TOP - 6}">{escape(axes.y_label)}</text>')
    return parts


def _line(series: Series, x: _Scale, y: _Scale, *, has_marks: bool) -> list[str]:
    drawn = [
        (each, x.px(each[0]), y.px(each[1]))
        for each in series.points
        if (each[0] > 0 or not x.is_log) and (each[1] > 0 or not y.is_log)
    ]
    path = " ".join(f"{at_x:.1f},{at_y:.1f}" for _, at_x, at_y in drawn)
    parts = [f'<polyline class="line {escape(series.style)}" points="{path}"/>']
    whisker: Callable[[float, float, float], str] = lambda at, low, high: (  # noqa: E731 - a template
        f'<line class="whisker {escape(series.style)}" x1="{x.px(at):.1f}" y1="{y.px(low):.1f}"'
        f' x2="{x.px(at):.1f}" y2="{y.px(high):.1f}"/>'
    )
    parts += [whisker(*each) for each in series.spread if each[1] > 0 or not y.is_log]
    if has_marks:
        parts += [
            f'<circle class="mark {escape(series.style)}" cx="{at_x:.1f}" cy="{at_y:.1f}" r="3">'
            f"<title>{escape(series.name)}: {number_text(point[1])} at {number_text(point[0])}</title></circle>"
            for point, at_x, at_y in drawn
        ]
    return parts


def _frame(title: str, parts: Sequence[str], *, width: int = _WIDTH, height: int = _HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"'
        f' aria-label="{escape(title)}"><text class="title" x="{width / 2:.0f}" y="12" text-anchor="middle">'
        f"{escape(title)}</text>{''.join(parts)}</svg>"
    )
