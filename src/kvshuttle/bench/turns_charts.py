"""Charts of conversations: against history, turn by turn, and the memory that reuse takes over time. Pure."""

from __future__ import annotations

import itertools
from statistics import median
from typing import TYPE_CHECKING

from kvshuttle.bench.figures import percentile
from kvshuttle.bench.plots import Axes, Series, line_chart
from kvshuttle.bench.turns_plan import Answers, ClientName, PrefillCache, TurnsSystem

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvshuttle.bench.turns_figures import Measure, TurnsResults
    from kvshuttle.bench.turns_plan import TurnsCell
    from kvshuttle.bench.turns_records import MemoryRecord, TurnsCellDone

    Look = Callable[[MemoryRecord, TurnsCellDone], float]

_COLOURS = {
    "push": ("#2f6fd0", "#7a93b8", "#8a4fc4"),
    "pull": ("#2b9a66", "#84a896", "#a61e4d"),
    "push-whole": ("#17a2b8", "#82b5bd", "#5f3dc4"),
    "pull-whole": ("#74b816", "#a9c288", "#862e9c"),
    "upstream": ("#e08a1e", "#c9ac86", "#555d66"),
}
"""With reuse, without, and without but with more memory for P."""
_PARTS = ("reused", "anew", "larger")
_CACHES = {"off": (PrefillCache.OFF,), "on": (PrefillCache.ON, PrefillCache.LARGER)}
"""What one chart shows together: more memory for P belongs beside its ordinary cache."""
_MIB = 2**20

STYLES = {
    f"{mode}-{part}": colour for mode, colours in _COLOURS.items() for part, colour in zip(_PARTS, colours, strict=True)
}
"""Colours by style."""


def style_of(cell: TurnsCell) -> str:
    """The style of a cell's lines; cells of one chart have different ones."""
    way = str(cell.mode)
    if cell.system is TurnsSystem.UPSTREAM:
        way = "upstream"
    elif cell.answers is Answers.WHOLE:
        way = f"{cell.mode}-whole"
    if cell.prefill_cache is PrefillCache.LARGER:
        return f"{way}-larger"
    return f"{way}-{'reused' if cell.is_reusing else 'anew'}"


def legend(results: TurnsResults) -> dict[str, str]:
    """What the lines of all charts are, by style."""
    ends = {"reused": "history reused", "anew": "computed anew", "larger": "computed anew, P's cache has more memory"}
    return {
        style: f"{cell.served}, {ends[style.rpartition('-')[2]]}" for cell in results.cells if (style := style_of(cell))
    }


def history_charts(results: TurnsResults, name: str, measure: Measure, *, scale: float = 1000.0) -> list[str]:
    """``measure`` of each turn against the tokens of history that it had. ``scale``: from its unit to milliseconds."""

    def points(cell: TurnsCell) -> Series:
        line, spread = [], []
        for turn in range(1, results.plan.turns + 1):
            values = [value * scale for value in results.values(cell, turn, measure)]
            if not values:
                continue
            at = results.history_tokens(cell, turn)
            line.append((at, median(values)))
            if len(values) > 1:
                spread.append((at, percentile(values, 10), percentile(values, 90)))
        return Series(cell.text, style_of(cell), line, spread)

    return _by_cache(results, name, Axes("", "tokens of history", "ms"), points)


def computed_charts(results: TurnsResults) -> list[str]:
    """Tokens of the prompt that P computed, by turn: the mean over conversations."""

    def points(cell: TurnsCell) -> Series:
        line = []
        for turn in range(1, results.plan.turns + 1):
            values = results.values(cell, turn, lambda record: record.computed_tokens)
            if values:
                line.append((float(turn), sum(values) / len(values)))
        return Series(cell.text, style_of(cell), line)

    return _by_cache(results, "P computed", Axes("", "turn", "tokens", _turn_ticks(results.plan.turns)), points)


def memory_charts(results: TurnsResults) -> list[str]:
    """What is kept for later turns, in blocks and in MiB, and how full both pools are: against the cell's time."""
    looks: tuple[tuple[str, str, Look], ...] = (
        ("blocks kept for later turns", "blocks", lambda look, _: look.retained_blocks),
        ("MiB kept for later turns", "MiB", lambda look, done: look.retained_blocks * done.block_len_bytes / _MIB),
        ("P's pool in use", "%", lambda look, _: look.prefill_usage * 100),
        ("D's pool in use, with what it keeps", "%", lambda look, _: look.decode_usage * 100),
    )
    return [chart for name, unit, value in looks for chart in _memory_charts(results, name, unit, value)]


def _memory_charts(results: TurnsResults, name: str, unit: str, value: Look) -> list[str]:
    def points(cell: TurnsCell) -> Series:
        done = results.done(cell)
        line = [(look.at_s, value(look, done)) for look in results.memory(cell)]
        return Series(cell.text, style_of(cell), line)

    return _by_cache(results, name, Axes("", "seconds", unit, has_marks=False), points)


def _by_cache(results: TurnsResults, name: str, axes: Axes, points: Callable[[TurnsCell], Series]) -> list[str]:
    charts = []
    for client, (cache, settings) in itertools.product(ClientName, _CACHES.items()):
        series = [points(cell) for cell in results.cells if cell.prefill_cache in settings and cell.client is client]
        drawn = [each for each in series if each.points]
        if drawn:
            by = "" if client is ClientName.OPENAI else f", by {client}"
            charts.append(line_chart(_titled(axes, f"{name}, P's cache {cache}{by}"), drawn))
    return charts


def _titled(axes: Axes, title: str) -> Axes:
    return Axes(title, axes.x_label, axes.y_label, axes.x_ticks, has_marks=axes.has_marks)


def _turn_ticks(num_turns: int) -> tuple[float, ...]:
    step = max(1, -(-num_turns // 8))
    return tuple(float(turn) for turn in range(1, num_turns + 1, step))
