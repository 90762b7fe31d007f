"""The report of a benchmark of hand-offs. Pure but for ``load_results``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from kvshuttle.bench.figures import percentile
from kvshuttle.bench.machine_facts import read_facts
from kvshuttle.bench.markdown import NOTHING, machine_rows, pairs, table
from kvshuttle.bench.plan import HandoffPlan, SystemName
from kvshuttle.bench.plan_file import read_plan
from kvshuttle.bench.record_file import there_must_be
from kvshuttle.bench.records import CellDone, HandoffRecord, PaceRecord, Record, read_records
from kvshuttle.bench.run_files import FACTS_FILE, RECORDS_FILE
from kvshuttle.bench.systems import SYSTEMS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from kvshuttle.bench.plan import Cell

AIMS = (
    (SystemName.UPSTREAM_PUSH, 1 / 3),
    (SystemName.UPSTREAM_PUSH_PACED, 1 / 3),
    (SystemName.UPSTREAM_PUSH_QUIET, 1 / 3),
    (SystemName.UPSTREAM_PULL, 1 / 5),
    (SystemName.UPSTREAM_PULL_PACED, 1 / 5),
    (SystemName.UPSTREAM_PULL_QUIET, 1 / 5),
)
"""Our push's gap at most this part of the other's, from ``AIM_FROM_TOKENS`` on."""
AIM_FROM_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Results:
    """A run: what was asked for, on what it ran, what came of it."""

    plan: HandoffPlan
    facts: Mapping[str, Any]
    records: Sequence[Record]

    @property
    def systems(self) -> list[SystemName]:
        """Those with any records, in the order of the plan."""
        measured = {record.system for record in self.records}
        return [SystemName(name) for name in self.plan.systems if name in measured]

    def handoffs(self, system: str, cell: Cell) -> list[HandoffRecord]:
        """Hand-offs of one cell that worked."""
        return [r for r in self.records if isinstance(r, HandoffRecord) and not r.error and _is_of(r, system, cell)]

    def intervals_s(self, system: str, cell: Cell, condition: str) -> list[float]:
        """All seconds between decode steps of one cell under one condition."""
        return [
            interval
            for r in self.records
            if isinstance(r, PaceRecord) and r.condition == condition and _is_of(r, system, cell)
            for interval in r.intervals_s
        ]


def load_results(directory: Path) -> Results:
    """A run's directory. Raises ``OSError`` when it is not one, ``ConfigError`` when its plan cannot be read."""
    plan = read_plan(HandoffPlan, directory)
    facts = read_facts(directory / FACTS_FILE, is_emulated=True)
    return Results(plan, facts, there_must_be(read_records(directory / RECORDS_FILE), directory))


def handoff_markdown(directory: Path) -> str:
    """The report of a run's directory. Raises what ``load_results`` does."""
    return markdown(load_results(directory))


def markdown(results: Results) -> str:
    """The whole report."""
    parts = [
        "# Hand-off from P to D, by connector",
        _explanation(results),
        "## Hand-off gap",
        "From the end of P's last forward pass for a request to the start of D's first one. Milliseconds: median"
        " (10th to 90th percentile).",
        _table(results, _gap),
        "### Our push against the others",
        "Median gap of kvshuttle push divided by the other's. From"
        f" {AIM_FROM_TOKENS} tokens on the aim is at most 0.33 of vLLM's push and 0.20 of vLLM's pull.",
        _ratios(results),
        "## Time to the first token",
        "From sending the legs to the end of D's first forward pass. Milliseconds, median.",
        _table(results, _first_token),
        "## Where the gap goes",
        "Milliseconds, medians: until P's HTTP answer is at the client (in push nothing waits for it), and from there"
        " until D's first forward pass starts. For push: the whole gap, and what D computes of the prompt itself.",
        _table(results, _split),
        "## Decode pace on D",
        "Milliseconds from one decode step to the next of requests that decode all the while: mean with hand-offs under"
        " way / mean while P only computes / mean while nothing else runs.",
        _table(results, _pace, only_background=True),
        "## Load of the machine",
        "Processes that could run, on average over the last minute of each cell. Above the cores, some had to wait.",
        _table(results, _load),
        _failures(results),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _explanation(results: Results) -> str:
    plan, facts = results.plan, results.facts
    profile = facts["profile"]
    geometry = profile["geometry"]
    rows = [
        *machine_rows(facts),
        (
            "Accelerator",
            f"emulated: {profile['name']}; every duration times {plan.time_scale:g}, since this machine moves bytes"
            " slower than the profile's",
        ),
        (
            "KV cache",
            f"{geometry['num_layers']} layers, {geometry['num_kv_heads']} KV heads x {geometry['head_dim']},"
            f" {geometry['dtype']}: {facts['kv_bytes_per_token']:,} bytes a token"
            f" ({plan.bytes_scale:g} of the profile's); {plan.kv_cache_gib} GiB for each engine",
        ),
        (
            "Engines",
            f"1 P, 1 D, chunks of {plan.chunk_tokens} tokens, 32 slots, prefix caches on, every prompt new;"
            f" processes {'sleep' if plan.is_quiet_wait else 'spin, as vLLM ships,'} while they wait for each other",
        ),
        ("Load", f"{plan.output_tokens} tokens out, seed {plan.seed}, no router: the legs are driven directly"),
    ]
    return pairs(rows)


def _table(results: Results, cell_text: Callable[[Results, str, Cell], str], *, only_background: bool = False) -> str:
    heads = ["Prompt", "At a time", "Decoding on D", *(SYSTEMS[name].title for name in results.systems)]
    rows = [
        [f"{cell.prompt_tokens:,}", str(cell.concurrency), str(cell.background)]
        + [cell_text(results, name, cell) for name in results.systems]
        for cell in results.plan.cells
        if cell.background or not only_background
    ]
    return table(heads, rows) if rows else "Not measured: the plan has no requests that decode meanwhile."


def _gap(results: Results, system: str, cell: Cell) -> str:
    gaps_ms = [record.gap_s * 1000 for record in results.handoffs(system, cell)]
    if not gaps_ms:
        return NOTHING
    return f"{median(gaps_ms):.1f} ({percentile(gaps_ms, 10):.1f} to {percentile(gaps_ms, 90):.1f})"


def _first_token(results: Results, system: str, cell: Cell) -> str:
    times_s = [record.decode_end_s for record in results.handoffs(system, cell)]
    return f"{median(times_s) * 1000:.0f}" if times_s else NOTHING


def _split(results: Results, system: str, cell: Cell) -> str:
    records = results.handoffs(system, cell)
    if not records:
        return NOTHING
    computed = f"{median([record.decode_computed_tokens for record in records]):.0f} tokens"
    if str(SYSTEMS[SystemName(system)].mode) == "push":
        return f"{median([record.gap_s for record in records]) * 1000:.1f}; {computed}"
    answer_ms = median([(record.prefill_answered_s - record.prefill_end_s) * 1000 for record in records])
    rest_ms = median([(record.decode_start_s - record.prefill_answered_s) * 1000 for record in records])
    return f"{answer_ms:.1f} + {rest_ms:.1f}; {computed}"


def _pace(results: Results, system: str, cell: Cell) -> str:
    texts = []
    for condition in ("transfer", "prefill", "idle"):
        intervals_s = results.intervals_s(system, cell, condition)
        texts.append(f"{fmean(intervals_s) * 1000:.1f}" if intervals_s else NOTHING)
    return " / ".join(texts)


def _load(results: Results, system: str, cell: Cell) -> str:
    loads = [r.load_average for r in results.records if isinstance(r, CellDone) and _is_of(r, system, cell)]
    return f"{max(loads):.1f}" if loads and max(loads) >= 0 else NOTHING


def _ratios(results: Results) -> str:
    others = [(name, aim) for name, aim in AIMS if name in results.systems]
    if SystemName.SHUTTLE_PUSH not in results.systems or not others:
        return "Not measured: it takes our push and one of vLLM's connectors."
    heads = ["Prompt", "At a time", "Decoding on D", *(f"of {SYSTEMS[name].title}" for name, _ in others)]
    rows = []
    for cell in results.plan.cells:
        texts = [_ratio_text(ratio(results, name, cell), aim, cell) for name, aim in others]
        rows.append([f"{cell.prompt_tokens:,}", str(cell.concurrency), str(cell.background), *texts])
    return table(heads, rows)


def ratio(results: Results, other: SystemName, cell: Cell) -> float | None:
    """Median gap of our push by the other's; None when either is not measured."""
    ours = [record.gap_s for record in results.handoffs(SystemName.SHUTTLE_PUSH, cell)]
    theirs = [record.gap_s for record in results.handoffs(other, cell)]
    return median(ours) / median(theirs) if ours and theirs else None


def _ratio_text(value: float | None, aim: float, cell: Cell) -> str:
    if value is None:
        return NOTHING
    if cell.prompt_tokens < AIM_FROM_TOKENS:
        return f"{value:.2f}"
    return f"{value:.2f}, {'met' if value <= aim else 'missed'}"


def _failures(results: Results) -> str:
    failed = Counter((r.system, r.error) for r in results.records if isinstance(r, HandoffRecord) and r.error)
    total = sum(isinstance(record, HandoffRecord) for record in results.records)
    lines = [f"{total} hand-offs, {sum(failed.values())} of them do not count."]
    lines += [f"- {system}: {count} x {error}" for (system, error), count in sorted(failed.items())]
    return "## What does not count\n\n" + "\n".join(lines)


def _is_of(record: Record, system: str, cell: Cell) -> bool:
    return (record.system, record.prompt_tokens, record.concurrency, record.background) == (
        system,
        cell.prompt_tokens,
        cell.concurrency,
        cell.background,
    )
