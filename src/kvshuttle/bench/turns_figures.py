"""From records of conversations to figures, pure."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from kvshuttle.bench.turns_plan import PrefillCache, TurnsSystem
from kvshuttle.bench.turns_records import MemoryRecord, Record, TurnRecord, TurnsCellDone

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvshuttle.bench.turns_plan import TurnsCell, TurnsPlan

    Measure = Callable[[TurnRecord], float | None]


@dataclass(frozen=True, slots=True)
class TurnsResults:
    """A run: what was asked for, on what it ran, what came of it."""

    plan: TurnsPlan
    facts: Mapping[str, Any]
    records: Sequence[Record]

    @property
    def cells(self) -> list[TurnsCell]:
        """Those that were measured, in the order of measuring."""
        measured = {record.cell for record in self.records}
        return [cell for cell in self.plan.cells if cell.name in measured]

    def turns(self, cell: TurnsCell) -> list[TurnRecord]:
        """All turns of a cell that were tried."""
        return [r for r in self.records if isinstance(r, TurnRecord) and r.cell == cell.name]

    def memory(self, cell: TurnsCell) -> list[MemoryRecord]:
        """Looks at the engines' memory, in the order of time."""
        return [r for r in self.records if isinstance(r, MemoryRecord) and r.cell == cell.name]

    def done(self, cell: TurnsCell) -> TurnsCellDone:
        """What was written down at the cell's end."""
        return next(r for r in self.records if isinstance(r, TurnsCellDone) and r.cell == cell.name)

    def values(self, cell: TurnsCell, turn: int, measure: Measure) -> list[float]:
        """``measure`` of one turn of all conversations, where it went well and there is anything to measure."""
        found = [measure(r) for r in self.turns(cell) if r.turn == turn and not r.error]
        return [value for value in found if value is not None]

    def history_tokens(self, cell: TurnsCell, turn: int) -> float:
        """Tokens of the turn before with its answer, the median of all conversations; 0 for a first one."""
        values = self.values(cell, turn - 1, lambda r: r.prompt_tokens + r.answer_tokens)
        return median(values) if values else 0.0

    def excess_tokens(self, cell: TurnsCell) -> list[int]:
        """For each later turn that P was asked about: what it computed beyond the tokens that are new in it."""
        turns = {(record.conversation, record.turn): record for record in self.turns(cell) if not record.error}
        excess = []
        for (conversation, turn), record in turns.items():
            before = turns.get((conversation, turn - 1))
            if before is not None and record.computed_tokens is not None:
                num_new = record.prompt_tokens - before.prompt_tokens - before.answer_tokens
                excess.append(record.computed_tokens - num_new)
        return excess

    def ratio(self, cell: TurnsCell, other: TurnsCell, turn: int, measure: Measure) -> float | None:
        """How many times as much ``measure`` is in ``cell`` as in ``other``, by their medians."""
        mine, others = self.values(cell, turn, measure), self.values(other, turn, measure)
        return median(mine) / median(others) if mine and others and median(others) > 0 else None


def ttft_s(record: TurnRecord) -> float | None:
    """Time to the first text, where the client could see it."""
    return record.ttft_s if record.ttft_s >= 0 else None


def total_s(record: TurnRecord) -> float | None:
    """Time to the end of the answer."""
    return record.total_s


def prefill_s(record: TurnRecord) -> float | None:
    """Time of the prefill leg, where it was answered in time."""
    return record.prefill_s if record.prefill_s >= 0 else None


def peak_retained_blocks(records: Sequence[Record], cell_names: set[str]) -> int:
    """The most that D was seen to keep in any of the cells."""
    looks = [r.retained_blocks for r in records if isinstance(r, MemoryRecord) and r.cell in cell_names]
    return max(looks, default=0)


def kept_beside_cache(plan: TurnsPlan, records: Sequence[Record]) -> int:
    """Blocks that D kept at most where P's prefix cache was on: what P gets instead where it gets more memory."""
    names = {
        cell.name
        for cell in plan.cells
        if cell.is_reusing and cell.prefill_cache is PrefillCache.ON and cell.system is TurnsSystem.SHUTTLE
    }
    return peak_retained_blocks(records, names)


def looks_since(looks: Sequence[MemoryRecord], start_s: float) -> list[MemoryRecord]:
    """Looks dated from ``start_s`` on; those before it are left out."""
    return [msgspec.structs.replace(look, at_s=look.at_s - start_s) for look in looks if look.at_s >= start_s]


def over_time(looks: Sequence[MemoryRecord], num_parts: int) -> list[int]:
    """The most that D was seen to keep in each of ``num_parts`` equal parts of the time; -1 where nobody looked."""
    end_s = max((look.at_s for look in looks), default=0.0)
    parts = [-1] * num_parts
    for look in looks:
        index = min(int(look.at_s / end_s * num_parts), num_parts - 1) if end_s > 0 else 0
        parts[index] = max(parts[index], look.retained_blocks)
    return parts


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many answers of a cell are those of the first one.

    ``num_other``: another answer to the same prompt. ``num_apart``: the prompts differ already, after such an answer.
    """

    num_equal: int
    num_other: int
    num_apart: int


def compared(turns: Sequence[TurnRecord], reference: Sequence[TurnRecord]) -> Comparison:
    """``turns`` beside those of ``reference`` that went well."""
    known = {(r.conversation, r.turn): r for r in reference if not r.error}
    matches = [(r, known[r.conversation, r.turn]) for r in turns if not r.error and (r.conversation, r.turn) in known]
    same_prompt = [(mine, its) for mine, its in matches if mine.prompt_digest == its.prompt_digest]
    num_equal = sum(mine.answer_digest == its.answer_digest for mine, its in same_prompt)
    return Comparison(num_equal, len(same_prompt) - num_equal, len(matches) - len(same_prompt))
