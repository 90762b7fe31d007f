"""Charts of a load benchmark: latency against rate, gaps as distributions, stages as stacked bars. Pure."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from kvshuttle.bench.figures import percentile
from kvshuttle.bench.fleets import ARRANGEMENTS
from kvshuttle.bench.grid_plan import GridSystem
from kvshuttle.bench.grid_records import NOT_KNOWN, Served, requests_of
from kvshuttle.bench.grid_results import Point
from kvshuttle.bench.plots import Axes, Bar, Series, bar_chart, cumulative, line_chart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvshuttle.bench.grid_results import GridResults, Shape

STYLES: dict[str, str] = {
    GridSystem.PLAIN: "light-dark(#555d66,#a9b2bd)",
    GridSystem.UPSTREAM_PULL: "#e08a1e",
    GridSystem.UPSTREAM_PULL_QUIET: "#e08a1e",
    GridSystem.UPSTREAM_PUSH: "#d6336c",
    GridSystem.UPSTREAM_PUSH_QUIET: "#d6336c",
    GridSystem.UPSTREAM_PULL_PACED: "#b5651d",
    GridSystem.UPSTREAM_PUSH_PACED: "#a61e4d",
    GridSystem.SHUTTLE_PULL: "#2b9a66",
    GridSystem.SHUTTLE_PUSH: "#2f6fd0",
    GridSystem.SHUTTLE_AUTO: "#8a4fc4",
    GridSystem.FRONT_NONE: "light-dark(#555d66,#a9b2bd)",
    GridSystem.FRONT_PROXY: "#e08a1e",
    GridSystem.FRONT_ROUTER: "#2f6fd0",
}
"""Colours by system."""

STAGES = {"part0": "queue", "part1": "prefill", "part2": "hand-off", "part3": "first step", "part4": "way back"}
"""Parts of the time to the first token, by style."""


def legend(results: GridResults) -> dict[str, str]:
    """Names of the systems by style."""
    return {name: ARRANGEMENTS[name].title for name in results.systems}


def rate_charts(results: GridResults, name: str, value_s: Callable[[Served], float]) -> list[str]:
    """For each shape three charts: median, 90th and 99th percentile against the rate."""
    return [
        _rate_chart(results, f"{name} p{part}, {shape.text}", shape, value_s, part)
        for shape in results.shapes
        for part in (50, 90, 99)
    ]


def gap_charts(results: GridResults) -> list[str]:
    """For each shape the distribution of hand-off gaps at all rates."""
    charts = []
    for shape in results.shapes:
        points = [Point(shape, rate) for rate in results.plan.rates]
        series = [
            Series(ARRANGEMENTS[name].title, name, cumulative([gap_s * 1000 for gap_s in gaps_s if gap_s > 0]))
            for name in results.systems
            if (gaps_s := results.gaps_s(name, points))
        ]
        axes = Axes(f"gap, {shape.text}", "milliseconds", "% of hand-offs", is_log_x=True, has_marks=False)
        if series:
            charts.append(line_chart(axes, series))
    return charts


def stage_charts(results: GridResults) -> list[str]:
    """For each shape two charts of stacked bars: at the lowest rate and at the highest."""
    rates = sorted({min(results.plan.rates), max(results.plan.rates)})
    charts = []
    for shape in results.shapes:
        for rate in rates:
            means = {name: stage_means_ms(results.served(name, Point(shape, rate))) for name in results.systems}
            bars = [Bar(ARRANGEMENTS[name].title, tuple(values)) for name, values in means.items() if values]
            if bars:
                charts.append(bar_chart(f"{shape.text}, rate {rate:g}", "ms", list(STAGES.values()), bars))
    return charts


def stage_means_ms(requests: Sequence[Served]) -> list[float]:
    """Means of the stages, in the order of ``STAGES``; none without requests that traces tell of."""
    told = [request for request in requests if request.queue_s != NOT_KNOWN]
    if not told:
        return []
    rows = [
        (request.queue_s, request.prefill_s, max(request.gap_s, 0.0), max(request.first_step_s, 0.0))
        for request in told
    ]
    means_s = [fmean(column) for column in zip(*rows, strict=True)]
    rest_s = fmean([request.ttft_s for request in told]) - sum(means_s)
    return [mean_s * 1000 for mean_s in (*means_s, rest_s)]


def _rate_chart(results: GridResults, title: str, shape: Shape, value_s: Callable[[Served], float], part: float) -> str:
    series = []
    for name in results.systems:
        points, spread = [], []
        for rate in sorted(results.plan.rates):
            runs = [run for run in results.runs(name, Point(shape, rate)) if run.served]
            if not runs:
                continue
            points.append((rate, percentile([value_s(request) * 1000 for request in requests_of(runs)], part)))
            by_run = [percentile([value_s(request) * 1000 for request in run.served], part) for run in runs]
            if len(by_run) > 1:
                spread.append((rate, min(by_run), max(by_run)))
        series.append(Series(ARRANGEMENTS[name].title, name, points, spread))
    axes = Axes(title, "requests per second", "ms", tuple(sorted(results.plan.rates)), is_log_x=True, is_log_y=True)
    return line_chart(axes, series)
