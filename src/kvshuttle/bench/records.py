"""What a run writes down, one JSON line each: hand-offs, measures of decode pace, finished cells."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class HandoffRecord(msgspec.Struct, frozen=True, tag="handoff"):
    """One hand-off. Instants are seconds after ``sent``, on the host's monotonic clock; -1 for what did not happen."""

    system: str
    prompt_tokens: int
    concurrency: int
    background: int
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


class PaceRecord(msgspec.Struct, frozen=True, tag="pace"):
    """Seconds from one decode step on D to the next, for requests that decode all the while."""

    system: str
    prompt_tokens: int
    concurrency: int
    background: int
    round: int
    condition: str
    """``idle``: nothing else runs. ``prefill``: P computes, nothing moves. ``transfer``: hand-offs are under way."""
    intervals_s: list[float]


class CellDone(msgspec.Struct, frozen=True, tag="done"):
    """All rounds of a cell are written."""

    system: str
    prompt_tokens: int
    concurrency: int
    background: int
    load_average: float = -1.0
    """The machine's, over the minute before the cell's end; -1 where it was not written down."""


Record = HandoffRecord | PaceRecord | CellDone

_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def append_records(path: Path, records: Sequence[Record]) -> None:
    """Append, all at once: a run that is cut off leaves whole cells or, at worst, one broken line at the end."""
    with path.open("ab") as file:
        file.write(b"".join(_ENCODER.encode(record) + b"\n" for record in records))


def read_records(path: Path) -> list[Record]:
    """All records of finished cells; those of a cell that was cut off are left out, since it is run again.

    Published runs keep their records compressed: where ``path`` is not there, ``path.gz`` is read.
    """
    packed = path.with_name(f"{path.name}.gz")
    if path.exists():
        data = path.read_bytes()
    elif packed.exists():
        data = gzip.decompress(packed.read_bytes())
    else:
        return []
    records = [_DECODER.decode(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
    done = {_cell_of(record) for record in records if isinstance(record, CellDone)}
    return [record for record in records if _cell_of(record) in done]


def _cell_of(record: Record) -> tuple[str, int, int, int]:
    return record.system, record.prompt_tokens, record.concurrency, record.background
