"""What a load benchmark writes down: one JSON line for each cell of each system, with every request in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvshuttle.bench.grid_plan import GridCell
from kvshuttle.bench.record_file import read_all

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

NOT_KNOWN = -1.0
"""Stands for a duration that the traces do not tell."""


class Served(msgspec.Struct, frozen=True):
    """One request, at its client and in traces. Durations in seconds, ``NOT_KNOWN`` where nothing tells."""

    sent_s: float
    """After the first request of the cell was sent."""
    ttft_s: float
    latency_s: float
    """Until the last token."""
    num_output_tokens: int
    prefill: str = ""
    """The engine that computed the prompt; "" when nothing tells."""
    decode: str = ""
    """The engine that decoded, where that is another one."""
    queue_s: float = NOT_KNOWN
    """From sending to the start of the first forward pass for it."""
    prefill_s: float = NOT_KNOWN
    """From there to the end of the pass that computed the prompt's last token."""
    gap_s: float = NOT_KNOWN
    """From there to the start of the decode engine's first pass for it: the hand-off."""
    first_step_s: float = NOT_KNOWN
    """How long that pass took: its end is the first token."""
    num_recomputed_tokens: int = 0
    """Tokens of the prompt that the decode engine computed itself."""
    error: str = ""
    """Why it does not count; "" when it does."""

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first one."""
        return (self.latency_s - self.ttft_s) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else 0.0


class StepPace(msgspec.Struct, frozen=True):
    """Decode steps under one condition: how many, how long from start to start in all, how long by the profile."""

    num_steps: int = 0
    took_s: float = 0.0
    planned_s: float = 0.0

    @property
    def ratio(self) -> float:
        """How much longer they took than the profile says; 0 without any."""
        return self.took_s / self.planned_s if self.planned_s else 0.0


class CellRecord(msgspec.Struct, frozen=True):
    """One run of the load generator on one system."""

    system: str
    slots: int
    input_tokens: int
    output_tokens: int
    rate: float
    seed: int
    repeat: int
    requests: list[Served] = []
    duration_s: float = 0.0
    """From the first request sent to the last answer whole."""
    quiet: StepPace = StepPace()
    """Steps of decode engines while no prompt was on its way to them."""
    moving: StepPace = StepPace()
    """Steps while prompts were: from the start of the prefill engine's first pass to the decode engine's first pass."""
    num_preemptions: int = 0
    front_cpu_s: float = NOT_KNOWN
    """CPU time of the process in front of the engines."""
    prefill_cpu_s: float = NOT_KNOWN
    """CPU time of all processes of all prefill engines; "not known" where one engine does both."""
    decode_cpu_s: float = NOT_KNOWN
    """The same of the engines that decode."""
    busy_cores: float = NOT_KNOWN
    """Cores of the machine that were busy on average, whatever with."""
    load_average: float = NOT_KNOWN
    error: str = ""
    """Why the cell does not count; "" when it does."""

    @property
    def cell(self) -> GridCell:
        """Where in the plan it belongs."""
        return GridCell(self.slots, self.input_tokens, self.output_tokens, self.rate, self.seed, self.repeat)

    @property
    def served(self) -> list[Served]:
        """Requests that count."""
        return [] if self.error else [request for request in self.requests if not request.error]


_DECODER = msgspec.json.Decoder(CellRecord)


def read_cells(path: Path) -> list[CellRecord]:
    """All records, as ``read_all`` reads them; of a cell that was run again the last one."""
    records = read_all(path, _DECODER)
    return list({(record.system, record.cell): record for record in records}.values())


def requests_of(records: Iterable[CellRecord]) -> list[Served]:
    """Requests of several cells that count."""
    return [request for record in records for request in record.served]
