"""`kvshuttle bench report` of a load benchmark: its records as Markdown and as a page. Pure but for ``write_``."""

from __future__ import annotations

from collections import Counter
from statistics import fmean, median
from typing import TYPE_CHECKING

from kvshuttle.bench.figures import percentile
from kvshuttle.bench.fleets import ARRANGEMENTS
from kvshuttle.bench.grid_charts import STAGES, STYLES, gap_charts, legend, rate_charts, stage_charts, stage_means_ms
from kvshuttle.bench.grid_error import error_section
from kvshuttle.bench.grid_facts import facts_section
from kvshuttle.bench.grid_figures import drift, fairness
from kvshuttle.bench.grid_records import NOT_KNOWN, Served, StepPace
from kvshuttle.bench.grid_results import GridResults, load_grid, point_of
from kvshuttle.bench.markdown import NOTHING
from kvshuttle.bench.sections import Section, write_sections

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvshuttle.bench.grid_plan import GridSystem
    from kvshuttle.bench.grid_records import CellRecord
    from kvshuttle.bench.grid_results import Point

TITLE = "Load on disaggregated engines, by connector"


def write_grid_report(directory: Path) -> Path:
    """Write Markdown and page beside the records and return the page's path. Raises like ``load_grid``."""
    return write_sections(directory, TITLE, report_sections(load_grid(directory)), STYLES)


def report_sections(results: GridResults) -> list[Section]:
    """The whole report."""
    sections = [
        facts_section(results),
        error_section(results),
        _latency(results, "Time to the first token", "TTFT", lambda request: request.ttft_s),
        _latency(results, "Time per output token", "TPOT", lambda request: request.tpot_s),
        _spread(results),
        _gaps(results),
        _stages(results),
        _pace(results),
        _fair(results, "prefill"),
        _fair(results, "decode"),
        _keeping_up(results),
        _front(results),
        _engine_cpu(results),
        _machine(results),
        _not_counted(results),
    ]
    return [section for section in sections if section is not None]


def _latency(results: GridResults, title: str, name: str, value_s: Callable[[Served], float]) -> Section:
    def text(system: GridSystem, point: Point) -> str:
        values_ms = [value_s(request) * 1000 for request in results.served(system, point)]
        num_failed = sum(len(run.requests) - len(run.served) for run in results.runs(system, point))
        told = " / ".join(f"{percentile(values_ms, part):,.1f}" for part in (50, 90, 99)) if values_ms else NOTHING
        return f"{told} ({num_failed} failed)" if num_failed else told

    return Section(
        title,
        f"{name} at the client, milliseconds on this machine's clock: median / 90th / 99th percentile of requests that"
        " were answered; how many were not stands behind. Of fewer than 100 requests the 99th percentile is all but"
        " the slowest one. Whiskers: lowest and highest of the runs.",
        *_table(results, text),
        charts=rate_charts(results, name, value_s),
        legend=legend(results),
    )


def _spread(results: GridResults) -> Section | None:
    """How far runs of the same cell lie apart; nothing where each was run once."""
    if len(results.plan.seeds) * results.plan.repeats < 2:
        return None

    def text(system: GridSystem, point: Point) -> str:
        runs = [record.served for record in results.runs(system, point) if record.served]
        if len(runs) < 2:
            return NOTHING
        parts = []
        for name in ("ttft_s", "tpot_s"):
            medians_ms = [median([getattr(request, name) * 1000 for request in run]) for run in runs]
            parts.append(f"{min(medians_ms):,.1f} to {max(medians_ms):,.1f}")
        return "; ".join(parts)

    told = "Medians of TTFT; of TPOT, milliseconds: lowest to highest of the runs with other seeds, and repeats."
    return Section("Spread over runs", told, *_table(results, text))


def _gaps(results: GridResults) -> Section:
    def text(system: GridSystem, point: Point) -> str:
        gaps_ms = [gap_s * 1000 for gap_s in results.gaps_s(system, [point])]
        if not gaps_ms:
            return NOTHING
        return f"{median(gaps_ms):.1f} ({percentile(gaps_ms, 10):.1f} to {percentile(gaps_ms, 90):.1f})"

    return Section(
        "Hand-off gap",
        "From the end of the prefill engine's last forward pass for a request to the start of the decode engine's first"
        " one, as both wrote it down. Milliseconds: median (10th to 90th percentile). It holds the transfer, what"
        " follows it, and the wait for a slot and for the end of the present step. Charts: all rates together.",
        *_table(results, text),
        charts=gap_charts(results),
        legend=legend(results),
    )


def _stages(results: GridResults) -> Section:
    def text(system: GridSystem, point: Point) -> str:
        means_ms = stage_means_ms(results.served(system, point))
        return " + ".join(f"{mean_ms:,.0f}" for mean_ms in means_ms) if means_ms else NOTHING

    return Section(
        "Where the first token's time goes",
        f"Milliseconds, means: {' + '.join(STAGES.values())}. Queue: from sending until the first forward pass."
        " Prefill: until the prompt's last token is computed. Hand-off: the gap. First step: the decode engine's first"
        " pass. Way back: until the client has the token. Charts: lowest and highest rate.",
        *_table(results, text),
        charts=stage_charts(results),
        legend=STAGES,
    )


def _pace(results: GridResults) -> Section:
    def text(system: GridSystem, point: Point) -> str:
        runs = results.runs(system, point)
        quiet, moving = (_sum([getattr(run, name) for run in runs]) for name in ("quiet", "moving"))
        if not quiet.num_steps or not moving.num_steps:
            return f"{(quiet.ratio or moving.ratio):.2f}" if quiet.num_steps + moving.num_steps else NOTHING
        return f"{moving.ratio:.2f} / {quiet.ratio:.2f} = {moving.ratio / quiet.ratio:.2f}"

    return Section(
        "Decode steps while prompts are on their way",
        "How much longer decode engines' steps take, from start to start, than the profile says for their batch (where"
        " engines compute: than their passes took): while"
        " some prompt is computed for them or handed to them / while none is = slowed down by. One number where only"
        " one of both occurred.",
        *_table(results, text),
    )


def _fair(results: GridResults, role: str) -> Section | None:
    """Shares and times by engine, where there are several of a role."""
    num_engines = {"prefill": results.plan.num_prefill, "decode": results.plan.num_decode}[role]
    if num_engines < 2:
        return None
    names = [f"{role}-{index}" for index in range(num_engines)]
    rows = []
    for point in results.points:
        for system in results.systems:
            by_engine = [[r for r in results.served(system, point) if getattr(r, role) == name] for name in names]
            if not any(by_engine):
                continue
            rows.append([*_place(point), ARRANGEMENTS[system].title, *map(_engine_text, by_engine), _jain(by_engine)])
    return Section(
        f"Fairness across {role} engines",
        "For each engine: its share of the requests, then medians of TTFT and of the gap in milliseconds. Evenness is"
        " Jain's index, 1 for all alike: of shares; of mean TTFT.",
        ("In", "Out", "Slots", "Rate", "System", *names, "Evenness"),
        rows,
    )


def _engine_text(requests: Sequence[Served]) -> str:
    if not requests:
        return "0"
    gaps_ms = [request.gap_s * 1000 for request in requests if request.gap_s != NOT_KNOWN]
    gap_text = f"{median(gaps_ms):.0f}" if gaps_ms else NOTHING
    return f"{len(requests)}; {median([request.ttft_s for request in requests]) * 1000:,.0f}; {gap_text}"


def _jain(by_engine: Sequence[Sequence[Served]]) -> str:
    times_s = [fmean([request.ttft_s for request in requests]) for requests in by_engine if requests]
    return f"{fairness([float(len(requests)) for requests in by_engine]):.3f}; {fairness(times_s):.3f}"


def _keeping_up(results: GridResults) -> Section:
    def text(system: GridSystem, point: Point) -> str:
        runs = [run for run in results.runs(system, point) if run.duration_s]
        if not runs:
            return NOTHING
        scale = results.plan.time_scale
        answered = fmean([len(run.served) / run.duration_s * scale for run in runs])
        return f"{answered:.2f}; {fmean([drift(run.served) for run in runs]):.2f}"

    return Section(
        "Keeping up",
        "Requests answered per second, from the first sent to the last answered, in the plan's unit; and the median"
        " TTFT of the last third of requests by that of the first third: well above 1, a queue grows for as long as"
        " load comes, and the other figures of the cell depend on how long that was.",
        *_table(results, text),
    )


def _front(results: GridResults) -> Section:
    def text(system: GridSystem, point: Point) -> str:
        runs = [run for run in results.runs(system, point) if run.front_cpu_s != NOT_KNOWN and run.requests]
        costs_ms = [run.front_cpu_s / len(run.requests) * 1000 for run in runs]
        return f"{fmean(costs_ms):.1f}" if costs_ms else NOTHING

    return Section(
        "What stands in front",
        "CPU milliseconds for each request of the process between client and engines, its idle work included. vLLM's"
        " connectors stand behind a plain proxy that is made of our router's parts and gives engines turns; ours stands"
        " behind our router. TTFT and TPOT are measured at the client, so they include it.",
        *_table(results, text),
    )


def _engine_cpu(results: GridResults) -> Section | None:
    if all(record.decode_cpu_s == NOT_KNOWN for record in results.records):
        return None  # records from before it was written down

    def text(system: GridSystem, point: Point) -> str:
        runs = [run for run in results.runs(system, point) if run.decode_cpu_s != NOT_KNOWN and run.requests]
        if not runs:
            return NOTHING
        decode_ms = fmean([run.decode_cpu_s / len(run.requests) * 1000 for run in runs])
        prefill_ms = [run.prefill_cpu_s / len(run.requests) * 1000 for run in runs if run.prefill_cpu_s != NOT_KNOWN]
        return f"{fmean(prefill_ms) if prefill_ms else 0.0:,.0f} / {decode_ms:,.0f}"

    return Section(
        "CPU of the engines",
        "CPU milliseconds for each request of all prefill engines / of all that decode, with all their processes and"
        " their idle work.",
        *_table(results, text),
    )


def _machine(results: GridResults) -> Section:
    def text(system: GridSystem, point: Point) -> str:
        runs = [run for run in results.runs(system, point) if run.busy_cores != NOT_KNOWN]
        if not runs:
            return NOTHING
        return f"{fmean([run.busy_cores for run in runs]):.2f}; {max(run.load_average for run in runs):.1f}"

    return Section(
        "Load of the machine",
        f"Cores that were busy on average in a cell, of {results.facts['cores']}, the load generator's start included;"
        " and processes that could run, at its end, on average over a minute. Above the cores, some had to wait.",
        *_table(results, text),
    )


def _not_counted(results: GridResults) -> Section:
    requests = [request for record in results.records for request in record.requests]
    failed_cells = [record for record in results.records if record.error]
    failed = Counter((record.system, request.error) for record in results.records for request in record.requests)
    rows = [["cell", record.system, ", ".join(_place(point_of(record))), record.error] for record in failed_cells]
    rows += [["request", system, f"{count} times", error] for (system, error), count in failed.items() if error]
    recomputed = Counter(
        record.system for record in results.records for r in record.requests if _is_recomputed(r, record)
    )
    rows += [
        ["recomputed", name, f"{count} times", "the decode engine computed it"] for name, count in recomputed.items()
    ]
    preempted = Counter({record.system: 0 for record in results.records})
    for record in results.records:
        preempted[record.system] += record.num_preemptions
    rows += [
        ["preemption", name, f"{count} times", "no room on an engine"] for name, count in preempted.items() if count
    ]
    num_failed = sum(bool(request.error) for request in requests)
    return Section(
        "What does not count, and what went another way",
        f"{len(results.records)} cells with {len(requests)} requests; {len(failed_cells)} cells and {num_failed}"
        " requests do not count. Every answer was compared with those that the cell's prompts must have, each for one"
        " client, and every block of KV with the tokens that it stands for, but on engines that compute; one wrong"
        " block fails its cell. Requests whose prompt the decode engine computed itself, after a failed hand-off, do"
        " count.",
        ("What", "System", "Where", "Why"),
        rows,
    )


def _is_recomputed(request: Served, record: CellRecord) -> bool:
    is_handing_off = ARRANGEMENTS[_system(record)].is_handing_off
    return is_handing_off and bool(request.decode) and request.prefill == request.decode


def _system(record: CellRecord) -> GridSystem:
    return next(name for name in ARRANGEMENTS if name == record.system)


def _sum(paces: Sequence[StepPace]) -> StepPace:
    return StepPace(
        sum(pace.num_steps for pace in paces),
        sum(pace.took_s for pace in paces),
        sum(pace.planned_s for pace in paces),
    )


def _table(results: GridResults, text: Callable[[GridSystem, Point], str]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Heads and rows: a row for each point, a column for each system."""
    heads = ("In", "Out", "Slots", "Rate", *(ARRANGEMENTS[name].title for name in results.systems))
    return heads, [[*_place(point), *(text(name, point) for name in results.systems)] for point in results.points]


def _place(point: Point) -> list[str]:
    shape = point.shape
    return [f"{shape.input_tokens:,}", str(shape.output_tokens), str(shape.slots), f"{point.rate:g}"]
