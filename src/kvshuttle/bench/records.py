"""What a benchmark of hand-offs writes down: hand-offs, measures of decode pace, finished cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvshuttle.bench.record_file import read_finished, resume_finished

if TYPE_CHECKING:
    from pathlib import Path


class _OfCell(msgspec.Struct, frozen=True):
    """Where in the grid it was measured."""

    system: str
    prompt_tokens: int
    concurrency: int
    background: int

    @property
    def cell_key(self) -> tuple[str, int, int, int]:
        """Names the cell."""
        return self.system, self.prompt_tokens, self.concurrency, self.background

    @property
    def ends_cell(self) -> bool:
        """Whether it says that the cell is whole."""
        return isinstance(self, CellDone)


class HandoffRecord(_OfCell, frozen=True, tag="handoff"):
    """One hand-off. Instants are seconds after ``sent``, on the host's monotonic clock; -1 for what did not happen."""

    round: int
    key: str
    prefill_start_s: float
    """Start of P's first forward pass for it."""
    prefill_end_s: float
    """End of P's last forward pass for it."""
    prefill_answered_s: float
    """P's HTTP answer was here."""
    decode_start_s: float
    """Start of D's first forward pass for it."""
    decode_end_s: float
    """End of that pass: the first token."""
    answered_s: float
    """D's whole HTTP answer was here."""
    decode_computed_tokens: int
    """Tokens of the prompt that D computed itself."""
    error: str = ""
    """Why it does not count; "" when it does."""

    @property
    def gap_s(self) -> float:
        """From the end of P's last forward pass to the start of D's first."""
        return self.decode_start_s - self.prefill_end_s


class PaceRecord(_OfCell, frozen=True, tag="pace"):
    """Seconds from one decode step on D to the next, for requests that decode all the while."""

    round: int
    condition: str
    """``idle``: nothing else runs. ``prefill``: P computes, nothing moves. ``transfer``: hand-offs are under way."""
    intervals_s: list[float]


class CellDone(_OfCell, frozen=True, tag="done"):
    """All rounds of a cell are written."""

    load_average: float = -1.0
    """The machine's, over the minute before the cell's end; -1 where it was not written down."""


Record = HandoffRecord | PaceRecord | CellDone

_DECODER: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def read_records(path: Path) -> list[Record]:
    """All records of finished cells in a run's file, or in the same one compressed."""
    return read_finished(path, _DECODER)


def resume_records(path: Path) -> list[Record]:
    """The same for a run that goes on: ``resume_finished``."""
    return resume_finished(path, _DECODER)
