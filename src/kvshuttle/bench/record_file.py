"""A run's records on disk: JSON lines, one whole cell after the other."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from pathlib import Path


class OfCell(Protocol):
    """A record, as far as the file knows it."""

    @property
    def cell_key(self) -> Hashable:
        """Names the cell that it belongs to."""

    @property
    def ends_cell(self) -> bool:
        """Whether it says that the cell is whole."""


R = TypeVar("R", bound=OfCell)

_ENCODER = msgspec.json.Encoder()


def append_records(path: Path, records: Sequence[OfCell]) -> None:
    """Append, all at once: a run that is cut off leaves whole cells or, at worst, one broken line at the end."""
    with path.open("ab") as file:
        file.write(b"".join(_ENCODER.encode(record) + b"\n" for record in records))


def read_finished(path: Path, decoder: msgspec.json.Decoder[R]) -> list[R]:
    """All records of finished cells; those of a cell that was cut off are left out, since it is run again.

    Published runs keep their records compressed: where ``path`` is not there, ``path.gz`` is read.
    """
    records = [decoder.decode(line) for line in read_whole_lines(path)]
    done = {record.cell_key for record in records if record.ends_cell}
    return [record for record in records if record.cell_key in done]


def read_whole_lines(path: Path) -> list[bytes]:
    """The lines of ``path``, or of ``path.gz`` where that is not there; a line that was cut off is left out."""
    packed = path.with_name(f"{path.name}.gz")
    if path.exists():
        data = path.read_bytes()
    elif packed.exists():
        data = gzip.decompress(packed.read_bytes())
    else:
        return []
    return data[: data.rfind(b"\n") + 1].splitlines()
