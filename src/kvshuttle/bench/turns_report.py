"""The report of a benchmark of conversations. Pure but for ``turns_markdown``."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from kvshuttle.bench.figures import percentile
from kvshuttle.bench.markdown import NOTHING, machine_rows, pairs, table
from kvshuttle.bench.plan_file import command_of, read_plan
from kvshuttle.bench.run_files import FACTS_FILE, RECORDS_FILE
from kvshuttle.bench.turns_figures import TurnsResults, compared, over_time, peak_retained_blocks, prefill_s
from kvshuttle.bench.turns_plan import BLOCK_SIZE_TOKENS, PrefillCache, TurnsPlan
from kvshuttle.bench.turns_records import read_turn_records
from kvshuttle.config import ConnectorConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvshuttle.bench.turns_figures import Measure
    from kvshuttle.bench.turns_plan import TurnsCell
    from kvshuttle.bench.turns_records import TurnRecord

AIM_FASTER = 10.0
"""With P's cache off, the prefill leg so many times faster with reuse, from ``AIM_FROM_TOKENS`` of history on."""
AIM_FROM_TOKENS = 6000
_THRESHOLD_TOKENS = int(ConnectorConfig().kv_recompute_threshold)
_TIME_PARTS = 10


def turns_markdown(directory: Path) -> str:
    """The report of a run's directory. Raises ``OSError`` when it is none, ``ConfigError`` when its plan is bad."""
    facts = json.loads((directory / FACTS_FILE).read_text())
    records = read_turn_records(directory / RECORDS_FILE)
    return markdown(TurnsResults(read_plan(TurnsPlan, directory), facts, records))


def markdown(results: TurnsResults) -> str:
    """The whole report."""
    parts = ["# Conversations, with and without reuse of history", _explanation(results)]
    if not results.cells:
        return "\n\n".join([*parts, "Nothing is measured yet."]) + "\n"
    parts += [
        "*Anew*: the whole prompt goes to P as if it were the first. *Reused*: D keeps each turn, and P reads it back."
        " Figures are medians over conversations, with the 10th to the 90th percentile where there are several.",
        "## Time to the first token",
        "From sending a turn to its first text at the client. Milliseconds.",
        _by_turn(results, lambda record: record.ttft_s, _milliseconds),
        "## Prefill leg",
        "From sending it to its answer, by the router's log: P's queue, its read of the history, and its computing."
        " Milliseconds.",
        _by_turn(results, prefill_s, _milliseconds),
        _aim(results),
        "## Tokens that P computed",
        "Of the prompt, for this request; the rest it had itself or got from D.",
        _by_turn(results, lambda record: record.computed_tokens, _count, is_compared=False),
        _excess(results),
        "## The cells",
        _cells(results),
        "## Memory",
        _memory(results),
        "## Answers",
        _answers(results),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _explanation(results: TurnsResults) -> str:
    plan, facts = results.plan, results.facts
    rows = [*machine_rows(facts), ("Model", _model(results))]
    if results.cells:
        done = results.done(results.cells[0])
        rows.append(("KV cache", f"{done.block_len_bytes // done.block_size_tokens:,} bytes a token"))
    rows += [
        (
            "Engines",
            f"1 P, 1 D, chunks of {plan.chunk_tokens} tokens, D's prefix cache on, a router; fresh ones for each"
            " setting of P, and no cell finds what an earlier one has left in a cache (each has its own cache salt)",
        ),
        (
            "Load",
            f"{plan.conversations} at a time x {plan.turns} turns, closed loop, {plan.think_s:g} s between an answer"
            f" and the next turn; about {plan.first_tokens} new tokens first, then {plan.turn_tokens}; answers of up to"
            f" {plan.output_tokens}; seed {plan.seed}; streamed by the OpenAI client, which names no conversation",
        ),
        ("Command", f"`{command_of(plan)}`"),
    ]
    return pairs(rows)


def _model(results: TurnsResults) -> str:
    plan, profile = results.plan, results.facts.get("profile")
    if profile is None:
        return f"{plan.model}, {plan.dtype}, real"
    geometry = profile["geometry"]
    return (
        f"emulated: {profile['name']}, every duration times {plan.time_scale:g};"
        f" {geometry['num_layers']} layers, {geometry['num_kv_heads']} KV heads x {geometry['head_dim']},"
        f" {geometry['dtype']}: {plan.bytes_scale:g} of the profile's bytes"
    )


# --- by turn ----------------------------------------------------------------------------------------


def _by_turn(
    results: TurnsResults, measure: Measure, text_of: Callable[[float], str], *, is_compared: bool = True
) -> str:
    """A table for each mode: a row for each turn, a column for each cell, and how many times reuse is faster."""
    tables = []
    modes = dict.fromkeys(cell.mode for cell in results.cells)
    for mode in modes:
        cells = [cell for cell in results.cells if cell.mode is mode]
        columns = _columns(cells, is_compared=is_compared)
        rows = []
        for turn in range(1, results.plan.turns + 1):
            prompts = results.values(cells[0], turn, lambda record: record.prompt_tokens)
            texts = [
                _spread(results.values(cell, turn, measure), text_of)
                if anew is None
                else _times(results.ratio(anew, cell, turn, measure))
                for cell, anew in columns.values()
            ]
            rows.append([str(turn), _spread(prompts, _count), *texts])
        if len(modes) > 1:
            tables.append(f"### {str(mode).capitalize()}")
        tables.append(table(["Turn", "Prompt", *columns], rows))
    return "\n\n".join(tables)


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


def _milliseconds(value_s: float) -> str:
    return f"{value_s * 1000:,.0f}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _times(ratio: float | None) -> str:
    return NOTHING if ratio is None else f"{ratio:.1f}x"


def _aim(results: TurnsResults) -> str:
    lines = []
    for cell in results.cells:
        anew = _without_reuse(cell, results.cells)
        if anew is None or cell.prefill_cache is not PrefillCache.OFF:
            continue
        for turn in range(1, results.plan.turns + 1):
            history = results.history_tokens(cell, turn)
            ratio = results.ratio(anew, cell, turn, prefill_s)
            if history >= AIM_FROM_TOKENS and ratio is not None:
                verdict = "met" if ratio >= AIM_FASTER else "missed"
                lines.append(f"- {cell.mode}, turn {turn}, {history:,.0f} tokens of history: {ratio:.1f}x, {verdict}")
    if not lines:
        return ""
    aim = f"at least {AIM_FASTER:g} times faster from {AIM_FROM_TOKENS:,} tokens of history on"
    return "\n".join([f"With P's cache off, the aim is a prefill leg {aim}:", "", *lines])


def _excess(results: TurnsResults) -> str:
    limit = BLOCK_SIZE_TOKENS + _THRESHOLD_TOKENS
    lines = []
    for cell in results.cells:
        excess = results.excess_tokens(cell)
        if cell.is_reusing and excess:
            num_within = sum(value <= limit for value in excess)
            lines.append(f"- {cell.text}: {num_within} of {len(excess)} later turns, at most {max(excess):,} more")
    if not lines:
        return ""
    allowed = f"a block ({BLOCK_SIZE_TOKENS}) and the threshold of a read ({_THRESHOLD_TOKENS})"
    return "\n".join([f"With reuse, no more than what is new, {allowed}:", "", *lines])


# --- by cell ----------------------------------------------------------------------------------------


def _cells(results: TurnsResults) -> str:
    heads = [
        "Cell",
        "Turns",
        "Prompt tokens",
        "P computed",
        "P had",
        "P got from D",
        "TTFT p50",
        "TTFT p90",
        "TPOT p50",
    ]
    heads += ["Seconds", "Preemptions", "Load"]
    rows = []
    for cell in results.cells:
        done, turns = results.done(cell), [r for r in results.turns(cell) if not r.error]
        ttfts_s = [record.ttft_s for record in turns]
        tpots_s = [record.tpot_s for record in turns if record.tpot_s is not None]
        computed = [record.computed_tokens for record in turns if record.computed_tokens is not None]
        rows.append(
            [
                cell.text,
                str(len(turns)),
                f"{sum(record.prompt_tokens for record in turns):,}",
                f"{sum(computed):,}",
                f"{done.local_hit_tokens:,}",
                f"{done.history_tokens:,}",
                f"{_milliseconds(median(ttfts_s))} ms" if ttfts_s else NOTHING,
                f"{_milliseconds(percentile(ttfts_s, 90))} ms" if ttfts_s else NOTHING,
                f"{median(tpots_s) * 1000:.1f} ms" if tpots_s else NOTHING,
                f"{done.duration_s:.0f}",
                str(done.preemptions),
                f"{done.load_average:.1f}",
            ]
        )
    return table(heads, rows)


def _memory(results: TurnsResults) -> str:
    heads = ["Cell", "P's pool", "D's pool", "D kept at most", "… of its pool", "P in use at most"]
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
            ]
        )
    parts = [
        f"Blocks of {results.done(results.cells[0]).block_size_tokens} tokens. What D keeps is a part of its pool,"
        " which is the same in every cell, and gives way to requests.",
    ]
    if any(cell.prefill_cache is PrefillCache.LARGER for cell in results.cells):
        parts[0] += (
            " Where P's cache is *larger*, P has as many more blocks as D kept at most beside P's ordinary cache: the"
            " same memory, given to P, on top of D's."
        )
    parts.append(table(heads, rows))
    keeping = [cell for cell in results.cells if cell.is_reusing]
    if keeping:
        tenths = [f"{100 * (index + 1) // _TIME_PARTS} %" for index in range(_TIME_PARTS)]
        parts += ["Blocks that D kept, the most in each tenth of the cell's time:"]
        kept = [[_look(value) for value in over_time(results.memory(cell), _TIME_PARTS)] for cell in keeping]
        parts.append(table(["Cell", *tenths], [[cell.text, *row] for cell, row in zip(keeping, kept, strict=True)]))
    return "\n\n".join(parts)


def _size(num_blocks: int, block_len_bytes: int) -> str:
    return f"{num_blocks:,} ({num_blocks * block_len_bytes / 2**20:,.0f} MiB)"


def _look(num_blocks: int) -> str:
    return NOTHING if num_blocks < 0 else f"{num_blocks:,}"


def _answers(results: TurnsResults) -> str:
    first, *others = results.cells
    reference = results.turns(first)
    heads = ["Cell", "Equal", "Other answer to the same prompt", "Prompts apart", "Wrong KV", "Failed"]
    rows = []
    for cell in (first, *others):
        turns = results.turns(cell)
        found = compared(turns, reference)
        counts = [found.num_equal, found.num_other, found.num_apart, sum(record.is_wrong for record in turns)]
        rows.append([cell.text, *map(str, counts), str(sum(bool(record.error) for record in turns))])
    lines = [
        f"Beside those of the first cell ({first.text}), at temperature 0.",
        "",
        table(heads, rows),
        *_troubles([record for cell in results.cells for record in results.turns(cell)]),
    ]
    return "\n".join(lines)


def _troubles(turns: Sequence[TurnRecord]) -> list[str]:
    """What went wrong, and what the router repaired, by how often."""
    errors = Counter((record.cell, record.error) for record in turns if record.error)
    repaired = Counter((record.cell, failure) for record in turns for failure in record.failures)
    lines = [f"- {cell}: {count} x {error}" for (cell, error), count in sorted(errors.items())]
    lines += [f"- {cell}: {count} x {failure}, another attempt" for (cell, failure), count in sorted(repaired.items())]
    return ["", *lines] if lines else []
