"""The report of a run of overload and churn, as Markdown and as a page. Pure but for ``write_`` and ``read_``."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import TYPE_CHECKING

from kvshuttle.bench.churn_faults import ROUTER
from kvshuttle.bench.churn_plan import ChurnPlan
from kvshuttle.bench.churn_records import (
    DIED,
    NOT_OVER,
    AskRecord,
    EndRecord,
    How,
    LookRecord,
    RestRecord,
    WindowRecord,
    read_churn_records,
)
from kvshuttle.bench.churn_verdict import (
    FINE,
    Causes,
    ChurnResults,
    Verdict,
    explained_part,
    judge,
    slope_per_hour,
    well_part,
)
from kvshuttle.bench.figures import percentile
from kvshuttle.bench.machine_facts import read_facts
from kvshuttle.bench.markdown import NOTHING, machine_rows
from kvshuttle.bench.plan_file import command_of, read_plan
from kvshuttle.bench.plots import Axes, Series, line_chart
from kvshuttle.bench.record_file import there_must_be
from kvshuttle.bench.run_files import FACTS_FILE, PAGE_FILE, RECORDS_FILE, REPORT_FILE
from kvshuttle.bench.sections import Section, as_markdown, as_page

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

TITLE = "Overload and churn"
STYLES = {
    "right": "#2b9a66",
    "failed": "#d6336c",
    "outage": "light-dark(#555d66,#a9b2bd)",
    "prefill-0": "#2f6fd0",
    "prefill-1": "#8a4fc4",
    "decode-0": "#e08a1e",
    "decode-1": "#b5651d",
    "router": "#2b9a66",
}
"""Colours of what charts show; engines beyond the second of a role have the last."""
_BUCKET_S = 10.0
_MOST_ROWS = 40


def read_churn_results(directory: Path) -> ChurnResults:
    """A run's directory. Raises ``OSError`` when it is none, ``ConfigError`` when its plan cannot be read."""
    facts = read_facts(directory / FACTS_FILE, is_emulated=False)
    return ChurnResults(read_plan(ChurnPlan, directory), facts, read_churn_records(directory / RECORDS_FILE))


def read_verdict(directory: Path) -> Verdict:
    """Whether the run in a directory passes. Raises like ``read_churn_results``."""
    return judge(read_churn_results(directory))


def write_churn_report(directory: Path) -> Path:
    """Write Markdown and page beside the records and return the page's path. Raises like ``read_churn_results``."""
    results = read_churn_results(directory)
    there_must_be(results.records, directory)
    sections = report_sections(results)
    (directory / REPORT_FILE).write_text(as_markdown(TITLE, sections))
    page = directory / PAGE_FILE
    page.write_text(as_page(TITLE, sections, STYLES))
    return page


def report_sections(results: ChurnResults) -> list[Section]:
    """The whole report."""
    return [
        _verdict(results),
        _facts(results),
        _faults(results),
        _requests(results),
        _failures(results),
        _windows(results),
        _transfers(results),
        _rest(results),
        _processes(results),
    ]


def _verdict(results: ChurnResults) -> Section:
    verdict, asks = judge(results), results.of(AskRecord)
    counts = Counter(ask.how for ask in asks)
    told = (
        f"{'PASS' if verdict.is_pass else 'FAIL'}. {len(asks):,} requests: {counts[How.RIGHT]:,} answered, every one"
        f" compared with the answer that its prompt must have; {counts[How.WRONG]} wrong; {counts[How.LEFT]} left by"
        f" their clients; {len(results.failed):,} failed. {len(results.outages)} faults."
    )
    return Section("Verdict", told, ("Against it",) if verdict.reasons else (), [[each] for each in verdict.reasons])


def _facts(results: ChurnResults) -> Section:
    plan = results.plan
    engines = (
        f"{plan.num_prefill} prefill with {plan.prefill_blocks} KV blocks of 128 tokens, {plan.num_decode} decode with"
        f" {plan.decode_blocks} and {plan.decode_slots} slots; lease {plan.lease_s:g} s, turns kept {plan.ttl_s:g} s;"
        f" {plan.profile} emulated, durations times {plan.time_scale:g}, {plan.bytes_scale:g} of the bytes"
    )
    load = (
        f"vllm bench serve at {plan.overload:g} and {plan.calm:g} times what the engines answered before the first"
        f" fault, in turns of {plan.window_s:g} s, prompts of about {plan.prompt_tokens} tokens, answers of"
        f" {plan.output_tokens}; beside it {plan.conversations} clients with conversations of up to {plan.turns} turns,"
        f" whole and streamed, who leave {plan.leaving:.0%} of the streams"
    )
    rows = [*machine_rows(results.facts), ("Engines", engines), ("Load", load), ("Command", command_of(plan))]
    return Section("What was run", "", ("", ""), [list(row) for row in rows])


def _faults(results: ChurnResults) -> Section:
    rows = []
    for outage in results.outages[:_MOST_ROWS]:
        lasted = NOTHING if outage.ended_s == NOT_OVER else f"{outage.ended_s - outage.began_s:.0f}"
        detail = (outage.detail.splitlines() or [""])[0]
        rows.append([f"{outage.began_s:.0f}", outage.kind, outage.name, lasted, detail])
    counts = Counter(outage.kind for outage in results.outages)
    told = ", ".join(f"{count} x {kind}" for kind, count in sorted(counts.items())) or "none"
    more = len(results.outages) - len(rows)
    return Section(
        "Faults",
        f"{told}. kill: SIGKILL to all processes of an engine, which is started again after some seconds; stop:"
        f" SIGSTOP, then SIGCONT; restart: SIGTERM to the router and another one; {DIED}: nobody here did it."
        " Seconds from the begin until it was healthy again."
        + (f" {more} more are in the records." if more > 0 else "")
        + " Part of the time of the load in which each was under no fault: "
        + ", ".join(f"{name} {well_part(results, name):.0%}" for name in _names(results))
        + ".",
        ("At, s", "What", "Whom", "Lasted, s", ""),
        rows,
    )


def _requests(results: ChurnResults) -> Section:
    asks = results.of(AskRecord)
    groups = sorted({(ask.client, ask.mode, ask.is_streamed) for ask in asks})
    rows = []
    for client, mode, is_streamed in groups:
        mine = [ask for ask in asks if (ask.client, ask.mode, ask.is_streamed) == (client, mode, is_streamed)]
        counts = Counter(ask.how for ask in mine)
        took_s = [ask.ended_s - ask.sent_s for ask in mine if ask.how == How.RIGHT]
        took = f"{median(took_s):.1f} / {percentile(took_s, 99):.1f}" if took_s else NOTHING
        form = "streamed" if is_streamed else "whole"
        rows.append([client, mode, form, str(len(mine)), *(str(counts[how]) for how in How), took])
    num_tokens = sum(ask.num_tokens for ask in asks if ask.how == How.RIGHT)
    right, failed = (
        _rate([ask.ended_s for ask in asks if ask.how == How.RIGHT]),
        _rate([ask.sent_s for ask in asks if ask.how not in FINE]),
    )
    chart = line_chart(
        Axes("requests", "seconds", "per second", has_marks=False),
        [Series("answered", "right", right), Series("failed", "failed", failed), _outage_series(results)],
    )
    return Section(
        "Requests",
        f"{num_tokens:,} tokens of answers were right. Seconds: median / 99th percentile of those answered. Clients:"
        " load is vllm bench serve, talk the OpenAI client, last the requests after everything was at rest.",
        ("Client", "Mode", "Form", "All", *(how.capitalize() for how in How), "Seconds"),
        rows,
        charts=[chart],
        legend={"right": "answered", "failed": "failed", "outage": "processes under a fault"},
    )


def _failures(results: ChurnResults) -> Section:
    causes = Causes(results)
    groups: Counter[tuple[str, str, str, str]] = Counter()
    for ask in results.failed:
        routed = causes.routed(ask)
        failures = ", ".join(sorted({_without_engine(each) for each in routed.failures})) if routed else NOTHING
        how = f"{ask.how} {ask.status}" if ask.status >= 400 else str(ask.how)
        groups[how, failures or NOTHING, routed.outcome if routed else "not logged", causes.of(ask) or "NOTHING"] += 1
    rows = [[how, failures, outcome, cause, str(n)] for (how, failures, outcome, cause), n in groups.most_common()]
    return Section(
        "Failures by kind and cause",
        "As the client saw it, and as the router logged it: legs that failed, and the outcome. A cause is a fault that"
        f" overlaps the request's life, or was over less than {results.plan.explained_within_s:g} s before it was sent,"
        " and was the engines' that the router names, or its own, where the router says that engines failed it; else"
        " its own; or the limit of connections to engines, where the router says so and more is sent than they can"
        " answer, or a fault is near. By the times alone some fault would explain failures in"
        f" {explained_part(results):.0%} of the time of the load, and one of the router in"
        f" {explained_part(results, (ROUTER,)):.0%}.",
        ("Client saw", "Legs", "Router says", "Cause", "Requests"),
        rows,
    )


def _windows(results: ChurnResults) -> Section:
    rows = [
        [
            window.name,
            f"{window.began_s:.0f} to {window.ended_s:.0f}",
            f"{window.rate:.2f}" if window.rate else "all at once",
            str(window.num_requests),
            str(window.num_right),
            window.error.splitlines()[0] if window.error else "",
        ]
        for window in results.of(WindowRecord)
    ]
    charts = [
        _gauge_chart(results, "requests waiting in engines", "waiting", "requests"),
        _gauge_chart(results, "KV pool in use", "usage", "part"),
        _gauge_chart(results, "blocks held for readers", "held_blocks", "blocks"),
    ]
    preemptions = sum(
        max((look.gauges.get("preemptions", 0.0) for look in looks), default=0.0) for looks in results.lives().values()
    )
    fullest = max((look.gauges.get("usage", 0.0) for look in results.of(LookRecord)), default=0.0)
    return Section(
        "Load",
        f"{preemptions:.0f} preemptions; the fullest pool was {fullest:.0%} in use. The first window, before any fault,"
        " says what the engines can do.",
        ("Window", "Seconds", "Sent per second", "Requests", "Answered", ""),
        rows,
        charts=charts,
        legend=_engine_legend(results),
    )


def _transfers(results: ChurnResults) -> Section:
    """What connectors counted, as of the last look at each life."""
    totals: Counter[str] = Counter()
    for looks in results.lives().values():
        for name, value in next((look.gauges for look in reversed(looks) if look.gauges), {}).items():
            if " " in name:
                totals[name] += int(value)
    rows = [[*name.split(" ", 1), str(count)] for name, count in sorted(totals.items()) if count]
    return Section(
        "Hand-offs",
        "By the connectors' own count, as of the last look at each life of an engine.",
        ("Direction", "Outcome", "Requests"),
        rows,
    )


def _rest(results: ChurnResults) -> Section:
    lines = [
        f"{'Something was left' if rest.left else 'Nothing was left'} within {rest.took_s:.0f} s; it may take"
        f" {rest.bound_s:.0f} s."
        for rest in results.of(RestRecord)
    ]
    lines += [
        f"Engines found wrong KV {end.num_wrong_kv_lines} times; counters of bugs at the end: {end.bugs or 'all 0'}."
        for end in results.of(EndRecord)
    ]
    return Section(
        "At rest",
        "Once nobody asks any more: no request runs or waits, no block is in use, held, leased, kept or quarantined,"
        f" and the router has no request and no turn in its tables. {' '.join(lines) or 'It did not come to that.'}",
    )


def _processes(results: ChurnResults) -> Section:
    rows = []
    for (name, life), looks in sorted(results.lives().items()):
        first, last = looks[0], looks[-1]
        rows.append(
            [
                name,
                str(life),
                f"{first.at_s:.0f} to {last.at_s:.0f}",
                *(f"{value(first):.0f} to {value(last):.0f}{_slope(looks, value)}" for value in (_rss, _fds, _threads)),
            ]
        )
    charts = [
        _process_chart(results, "memory", "MiB", _rss),
        _process_chart(results, "open files", "files", _fds),
        _process_chart(results, "threads", "threads", _threads),
    ]
    return Section(
        "Memory, files and threads",
        "Of each life of each process, all its group together: when it was first seen healthy, and last; in parentheses"
        " by how much it grew in an hour, where there was a minute or more to see.",
        ("Process", "Life", "Seconds", "Memory, MiB", "Open files", "Threads"),
        rows,
        charts=charts,
        legend=_engine_legend(results),
    )


def _rss(look: LookRecord) -> float:
    return look.rss_mib


def _fds(look: LookRecord) -> float:
    return look.num_fds


def _threads(look: LookRecord) -> float:
    return look.num_threads


def _slope(looks: Sequence[LookRecord], value: Callable[[LookRecord], float]) -> str:
    slope = slope_per_hour([(look.at_s, value(look)) for look in looks])
    return "" if slope is None or looks[-1].at_s - looks[0].at_s < 60 else f" ({slope:+,.0f}/h)"


def _rate(instants_s: Sequence[float]) -> list[tuple[float, float]]:
    """How many in each second, by time."""
    counts = Counter(int(at_s // _BUCKET_S) for at_s in instants_s if at_s >= 0)
    return [((index + 0.5) * _BUCKET_S, counts[index] / _BUCKET_S) for index in range(max(counts, default=-1) + 1)]


def _outage_series(results: ChurnResults) -> Series:
    """How many processes were under a fault."""
    edges = [(outage.began_s, 1) for outage in results.outages]
    edges += [(outage.ended_s, -1) for outage in results.outages if outage.ended_s != NOT_OVER]
    points, level = [(0.0, 0.0)], 0
    for at_s, step in sorted(edges):
        points += [(at_s, float(level)), (at_s, float(level + step))]
        level += step
    return Series("processes under a fault", "outage", points)


def _gauge_chart(results: ChurnResults, title: str, gauge: str, unit: str) -> str:
    names = [name for name in _names(results) if name != ROUTER]
    series = [
        Series(
            name,
            _style(name),
            [
                (look.at_s, look.gauges[gauge])
                for look in results.of(LookRecord)
                if look.name == name and gauge in look.gauges
            ],
        )
        for name in names
    ]
    return line_chart(Axes(title, "seconds", unit, has_marks=False), series)


def _process_chart(results: ChurnResults, title: str, unit: str, value: Callable[[LookRecord], float]) -> str:
    series = [
        Series(name, _style(name), [(look.at_s, value(look)) for look in results.of(LookRecord) if look.name == name])
        for name in _names(results)
    ]
    return line_chart(Axes(title, "seconds", unit, has_marks=False), series)


def _engine_legend(results: ChurnResults) -> dict[str, str]:
    return {_style(name): name for name in _names(results)}


def _names(results: ChurnResults) -> list[str]:
    return [*results.plan.engine_names, ROUTER]


def _style(name: str) -> str:
    role, _, number = name.partition("-")
    return name if name in STYLES else f"{role}-{min(int(number), 1)}"


def _without_engine(failure: str) -> str:
    """``leg:engine:reason`` without the engine."""
    leg, _, rest = failure.partition(":")
    return f"{leg}: {rest.rpartition(':')[2]}"
