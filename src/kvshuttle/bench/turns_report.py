"""The report of a benchmark of conversations, as Markdown and as a page. Pure but for ``write_turns_report``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from kvshuttle.bench.figures import percentile
from kvshuttle.bench.machine_facts import read_facts
from kvshuttle.bench.markdown import NOTHING
from kvshuttle.bench.plan import BLOCK_SIZE_TOKENS
from kvshuttle.bench.plan_file import read_plan
from kvshuttle.bench.record_file import there_must_be
from kvshuttle.bench.run_files import FACTS_FILE, RECORDS_FILE
from kvshuttle.bench.sections import Section, write_sections
from kvshuttle.bench.turns_charts import STYLES, computed_charts, history_charts, legend, memory_charts
from kvshuttle.bench.turns_facts import facts_section
from kvshuttle.bench.turns_figures import (
    TurnsResults,
    compared,
    over_time,
    peak_retained_blocks,
    prefill_s,
    total_s,
    ttft_s,
)
from kvshuttle.bench.turns_plan import PrefillCache, TurnsPlan, TurnsSystem
from kvshuttle.bench.turns_records import read_turn_records
from kvshuttle.config import ConnectorConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvshuttle.bench.turns_figures import Measure
    from kvshuttle.bench.turns_plan import TurnsCell

TITLE = "Conversations, with and without reuse of history"
AIM_FASTER = 10.0
"""With P's cache off, the prefill leg so many times faster with reuse, from ``AIM_FROM_TOKENS`` of history on."""
AIM_FROM_TOKENS = 6000
_THRESHOLD_TOKENS = int(ConnectorConfig().kv_recompute_threshold)
_TIME_PARTS = 10


def write_turns_report(directory: Path) -> Path:
    """Write Markdown and page beside the records and return the page's path.

    Raises ``OSError`` when the directory is no run, ``ConfigError`` when its plan is bad.
    """
    plan = read_plan(TurnsPlan, directory)
    facts = read_facts(directory / FACTS_FILE, is_emulated=bool(plan.profile))
    records = there_must_be(read_turn_records(directory / RECORDS_FILE), directory)
    results = TurnsResults(plan, facts, records)
    return write_sections(directory, TITLE, report_sections(results), STYLES)


def report_sections(results: TurnsResults) -> list[Section]:
    """The whole report."""
    if not results.cells:
        return [facts_section(results), Section("Nothing is measured yet.")]
    sections = [
        facts_section(results),
        *_by_turn(results, _FIRST_TOKEN, history_charts(results, "TTFT", ttft_s)),
        *_by_turn(results, _PREFILL_LEG, history_charts(results, "prefill leg", prefill_s)),
        _aim(results),
        *_by_turn(results, _WHOLE_ANSWER, history_charts(results, "whole answer", total_s)),
        *_by_turn(results, _COMPUTED, computed_charts(results)),
        _excess(results),
        _cells(results),
        _memory(results),
        _kept_over_time(results),
        _answers(results),
        _troubles(results),
    ]
    return [section for section in sections if section is not None]


# --- by turn ----------------------------------------------------------------------------------------


def _milliseconds(value_s: float) -> str:
    return f"{value_s * 1000:,.0f}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


@dataclass(frozen=True, slots=True)
class _Figure:
    """What is told of each turn. ``is_compared``: also how many times less it is with reuse."""

    title: str
    text: str
    measure: Measure
    text_of: Callable[[float], str] = _milliseconds
    is_compared: bool = True


_FIRST_TOKEN = _Figure(
    "Time to the first token", "From sending a turn to its first text at the client. Milliseconds.", ttft_s
)
_PREFILL_LEG = _Figure(
    "Prefill leg",
    "From sending it to its answer, by the log of the router or proxy: P's queue, its read of the history, and its"
    " computing. Milliseconds.",
    prefill_s,
)
_WHOLE_ANSWER = _Figure("Whole answer", "From sending a turn to the end of its answer. Milliseconds.", total_s)
_COMPUTED = _Figure(
    "Tokens that P computed",
    "Of the prompt, for this request; the rest it had itself or got from D.",
    lambda record: record.computed_tokens,
    _count,
    is_compared=False,
)


def _by_turn(results: TurnsResults, figure: _Figure, charts: Sequence[str]) -> list[Section]:
    """A section for each way of serving that has such figures: a row for each turn, a column for each cell."""
    sections: list[Section] = []
    ways = dict.fromkeys(cell.way for cell in results.cells)
    for way in ways:
        cells = [cell for cell in results.cells if cell.way == way]
        heads, rows = _turn_table(results, figure, cells)
        if not rows:
            continue
        title = figure.title if len(ways) == 1 else f"{figure.title}: {way}"
        is_first = not sections
        sections.append(
            Section(
                title,
                figure.text,
                heads,
                rows,
                charts=charts if is_first else (),
                legend=legend(results) if is_first else None,
            )
        )
    return sections


def _turn_table(
    results: TurnsResults, figure: _Figure, cells: Sequence[TurnsCell]
) -> tuple[tuple[str, ...], list[list[str]]]:
    columns = _columns(cells, is_compared=figure.is_compared)
    rows = []
    is_any = False
    for turn in range(1, results.plan.turns + 1):
        prompts = results.values(cells[0], turn, lambda record: record.prompt_tokens)
        texts = [
            _spread(results.values(cell, turn, figure.measure), figure.text_of)
            if anew is None
            else _times(results.ratio(anew, cell, turn, figure.measure))
            for cell, anew in columns.values()
        ]
        is_any = is_any or any(text != NOTHING for text in texts)
        rows.append([str(turn), _spread(prompts, _count), *texts])
    return ("Turn", "Prompt", *columns), rows if is_any else []


def _columns(cells: Sequence[TurnsCell], *, is_compared: bool) -> dict[str, tuple[TurnsCell, TurnsCell | None]]:
    """By title, a cell; or one that reuses and one that does not, to be compared."""
    columns: dict[str, tuple[TurnsCell, TurnsCell | None]] = {}
    for cell in cells:
        columns[_title(cell)] = cell, None
        anew = _without_reuse(cell, cells)
        if anew is not None and is_compared:
            columns[f"Faster, {_cache_title(cell)}"] = cell, anew
    return columns


def _without_reuse(cell: TurnsCell, cells: Sequence[TurnsCell]) -> TurnsCell | None:
    """What a cell that reuses is to be compared with; None for another, or where that is not measured."""
    anew = replace(cell, is_reusing=False)
    return anew if cell.is_reusing and anew in cells else None


def _title(cell: TurnsCell) -> str:
    return f"{'Reused' if cell.is_reusing else 'Anew'}, {_cache_title(cell)}"


def _cache_title(cell: TurnsCell) -> str:
    titles = {
        PrefillCache.OFF: "P's cache off",
        PrefillCache.ON: "P's cache on",
        PrefillCache.LARGER: "P's cache on and larger",
    }
    return titles[cell.prefill_cache]


def _spread(values: Sequence[float], text_of: Callable[[float], str]) -> str:
    if not values:
        return NOTHING
    middle = text_of(median(values))
    if len(values) == 1 or min(values) == max(values):
        return middle
    return f"{middle} ({text_of(percentile(values, 10))} to {text_of(percentile(values, 90))})"


def _times(ratio: float | None) -> str:
    return NOTHING if ratio is None else f"{ratio:.1f}x"


def _aim(results: TurnsResults) -> Section | None:
    rows = []
    for cell in results.cells:
        anew = _without_reuse(cell, results.cells)
        if anew is None or cell.prefill_cache is not PrefillCache.OFF:
            continue
        for turn in range(1, results.plan.turns + 1):
            history = results.history_tokens(cell, turn)
            ratio = results.ratio(anew, cell, turn, prefill_s)
            if history >= AIM_FROM_TOKENS and ratio is not None:
                verdict = "met" if ratio >= AIM_FASTER else "missed"
                rows.append([cell.way, str(turn), _count(history), _times(ratio), verdict])
    if not rows:
        return None
    text = (
        f"With P's cache off, the aim is a prefill leg at least {AIM_FASTER:g} times faster from"
        f" {AIM_FROM_TOKENS:,} tokens of history on."
    )
    return Section("The aim", text, ("Served by", "Turn", "History", "Faster", "Aim"), rows)


def _excess(results: TurnsResults) -> Section | None:
    limit = BLOCK_SIZE_TOKENS + _THRESHOLD_TOKENS
    rows = []
    for cell in results.cells:
        excess = results.excess_tokens(cell)
        if cell.is_reusing and excess:
            num_within = sum(value <= limit for value in excess)
            rows.append([cell.text, f"{num_within} of {len(excess)}", _count(max(excess))])
    if not rows:
        return None
    text = (
        "With reuse P is to compute no more than what is new in a turn, a block"
        f" ({BLOCK_SIZE_TOKENS}) and the threshold of a read ({_THRESHOLD_TOKENS})."
    )
    return Section("Computed beyond what is new", text, ("Cell", "Later turns within it", "Most, tokens"), rows)


# --- by cell ----------------------------------------------------------------------------------------


def _cells(results: TurnsResults) -> Section:
    heads = (
        "Cell",
        "Turns",
        "Prompt tokens",
        "P computed",
        "P had",
        "P got from D",
        "TTFT p50",
        "TTFT p90",
        "Whole p50",
        "TPOT p50",
        "Seconds",
        "Preemptions",
        "Load",
    )
    return Section(
        "The cells",
        "Tokens by the engines' own counters; load is the machine's, over the minute before the end.",
        heads,
        [_cell_row(results, cell) for cell in results.cells],
    )


def _cell_row(results: TurnsResults, cell: TurnsCell) -> list[str]:
    done, turns = results.done(cell), [record for record in results.turns(cell) if not record.error]
    ttfts_s, totals_s, tpots_s, computed = (
        [value for record in turns if (value := measure(record)) is not None]
        for measure in (ttft_s, total_s, lambda record: record.tpot_s, lambda record: record.computed_tokens)
    )
    return [
        cell.text,
        str(len(turns)),
        f"{sum(record.prompt_tokens for record in turns):,}",
        f"{sum(computed):,.0f}",
        f"{done.local_hit_tokens:,}",
        f"{done.history_tokens:,}",
        f"{_milliseconds(median(ttfts_s))} ms" if ttfts_s else NOTHING,
        f"{_milliseconds(percentile(ttfts_s, 90))} ms" if ttfts_s else NOTHING,
        f"{_milliseconds(median(totals_s))} ms" if totals_s else NOTHING,
        f"{median(tpots_s) * 1000:.1f} ms" if tpots_s else NOTHING,
        f"{done.duration_s:.0f}",
        str(done.preemptions),
        f"{done.load_average:.1f}",
    ]


def _memory(results: TurnsResults) -> Section:
    rows = []
    for cell in results.cells:
        done, looks = results.done(cell), results.memory(cell)
        peak = peak_retained_blocks(looks, {cell.name})
        rows.append(
            [
                cell.text,
                *(_size(blocks, done.block_len_bytes) for blocks in (done.prefill_blocks, done.decode_blocks, peak)),
                f"{peak / done.decode_blocks:.0%}",
                f"{max((look.prefill_usage for look in looks), default=0.0):.0%}",
                f"{max((look.decode_usage for look in looks), default=0.0):.0%}",
            ]
        )
    text = (
        f"Blocks of {results.done(results.cells[0]).block_size_tokens} tokens. What D keeps is a part of its pool,"
        " which is the same in every cell, and gives way to requests."
    )
    if any(cell.prefill_cache is PrefillCache.LARGER for cell in results.cells):
        text += (
            " Where P's cache is larger, P has as many more blocks as D kept at most beside P's ordinary cache: the"
            " same memory, given to P, on top of D's."
        )
    if any(cell.system is TurnsSystem.UPSTREAM for cell in results.cells):
        text += (
            " With vLLM's connector it is pinned until it is read or its time is over, and gives way to nothing; shown"
            " is what the proxy remembers of it."
        )
    heads = ("Cell", "P's pool", "D's pool", "D kept at most", "… of its pool", "P in use at most", "D in use at most")
    return Section("Memory", text, heads, rows, charts=memory_charts(results), legend=legend(results))


def _kept_over_time(results: TurnsResults) -> Section | None:
    keeping = [cell for cell in results.cells if cell.is_reusing]
    if not keeping:
        return None
    tenths = (f"{100 * (index + 1) // _TIME_PARTS} %" for index in range(_TIME_PARTS))
    rows = [[cell.text, *map(_look, over_time(results.memory(cell), _TIME_PARTS))] for cell in keeping]
    return Section(
        "Kept over time", "Blocks that D kept, the most in each tenth of the cell's time.", ("Cell", *tenths), rows
    )


def _size(num_blocks: int, block_len_bytes: int) -> str:
    return f"{num_blocks:,} ({num_blocks * block_len_bytes / 2**20:,.0f} MiB)"


def _look(num_blocks: int) -> str:
    return NOTHING if num_blocks < 0 else f"{num_blocks:,}"


def _answers(results: TurnsResults) -> Section:
    first = results.cells[0]
    reference = results.turns(first)
    rows = []
    for cell in results.cells:
        turns = results.turns(cell)
        found = compared(turns, reference)
        counts = [found.num_equal, found.num_other, found.num_apart, sum(record.is_wrong for record in turns)]
        rows.append([cell.text, *map(str, counts), str(sum(bool(record.error) for record in turns))])
    return Section(
        "Answers",
        f"Beside those of the first cell ({first.text}), at temperature 0.",
        ("Cell", "Equal", "Other answer to the same prompt", "Prompts apart", "Wrong KV", "Failed"),
        rows,
    )


def _troubles(results: TurnsResults) -> Section | None:
    """What went wrong, and what the router repaired, by how often."""
    turns = [record for cell in results.cells for record in results.turns(cell)]
    errors = Counter((record.cell, record.error) for record in turns if record.error)
    repaired = Counter((record.cell, failure) for record in turns for failure in record.failures)
    rows = [[cell, str(count), error, "the conversation ended"] for (cell, error), count in sorted(errors.items())]
    rows += [[cell, str(count), failure, "another attempt"] for (cell, failure), count in sorted(repaired.items())]
    return Section("Troubles", "", ("Cell", "Times", "What", "Then"), rows) if rows else None
