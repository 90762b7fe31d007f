"""A load benchmark's directory as a report looks at it: points of the plan, and what each system did there. Pure."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from kvshuttle.bench.grid_plan import GridPlan, GridSystem
from kvshuttle.bench.grid_records import NOT_KNOWN, CellRecord, Served, read_cells, requests_of
from kvshuttle.bench.machine_facts import read_facts
from kvshuttle.bench.plan_file import read_plan
from kvshuttle.bench.record_file import there_must_be
from kvshuttle.bench.run_files import CELLS_FILE, FACTS_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class Shape(NamedTuple):
    """What one chart shows at all rates."""

    slots: int
    input_tokens: int
    output_tokens: int

    @property
    def text(self) -> str:
        """For headings."""
        return f"{self.input_tokens:,} in, {self.output_tokens} out, {self.slots} slots"


class Point(NamedTuple):
    """A shape at one rate; all seeds and repeats of it belong together."""

    shape: Shape
    rate: float


@dataclass(frozen=True, slots=True)
class GridResults:
    """A run: what was asked for, on what it ran, what came of it."""

    plan: GridPlan
    facts: Mapping[str, Any]
    records: Sequence[CellRecord]

    @property
    def systems(self) -> list[GridSystem]:
        """Those with any records, in the order of the plan."""
        measured = {record.system for record in self.records}
        return [GridSystem(name) for name in self.plan.systems if name in measured]

    @property
    def shapes(self) -> list[Shape]:
        """In the order of the plan."""
        plan = self.plan
        return [Shape(*place) for place in itertools.product(plan.decode_slots, plan.input_tokens, plan.output_tokens)]

    @property
    def points(self) -> list[Point]:
        """In the order of the plan."""
        return [Point(shape, rate) for shape in self.shapes for rate in self.plan.rates]

    def runs(self, system: str, point: Point) -> list[CellRecord]:
        """Cells that count, one for each seed and repeat."""
        return [
            record
            for record in self.records
            if record.system == system and point_of(record) == point and not record.error
        ]

    def served(self, system: str, point: Point) -> list[Served]:
        """Requests that count, of all runs."""
        return requests_of(self.runs(system, point))

    def gaps_s(self, system: str, points: Sequence[Point]) -> list[float]:
        """Hand-off gaps of all requests that count and were handed off."""
        requests = [request for point in points for request in self.served(system, point)]
        return [request.gap_s for request in requests if request.gap_s != NOT_KNOWN]


def point_of(record: CellRecord) -> Point:
    """Where a record belongs."""
    return Point(Shape(record.slots, record.input_tokens, record.output_tokens), record.rate)


def load_grid(directory: Path) -> GridResults:
    """A run's directory. Raises ``OSError`` when it is not one, ``ConfigError`` when its plan cannot be read."""
    plan = read_plan(GridPlan, directory)
    facts = read_facts(directory / FACTS_FILE, is_emulated=True)
    return GridResults(plan, facts, there_must_be(read_cells(directory / CELLS_FILE), directory))
