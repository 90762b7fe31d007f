"""A run's records on disk: JSON lines, whatever the benchmark."""

from __future__ import annotations

import gzip
import os
import zlib
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeVar

import msgspec

from kvshuttle.errors import ConfigError

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
V = TypeVar("V")

_ENCODER = msgspec.json.Encoder()


def append_records(path: Path, records: Sequence[Any]) -> None:
    """Append, all at once: a run that is cut off leaves one broken line at worst, which the next call takes away."""
    with path.open("ab+") as file:
        _cut_broken_line(file)
        file.write(b"".join(_ENCODER.encode(record) + b"\n" for record in records))


def read_finished(path: Path, decoder: msgspec.json.Decoder[R]) -> list[R]:
    """All records of finished cells; those of a cell that was cut off are left out, since it is run again.

    Published runs keep their records compressed: where ``path`` is not there, ``path.gz`` is read. Raises
    ``ConfigError`` as ``read_all`` does.
    """
    records = read_all(path, decoder)
    done = {record.cell_key for record in records if record.ends_cell}
    return [record for record in records if record.cell_key in done]


def resume_finished(path: Path, decoder: msgspec.json.Decoder[R]) -> list[R]:
    """The same for a run that goes on, which takes the others out of the file: their cells are written again."""
    finished = read_finished(path, decoder)
    if path.exists():
        kept = path.with_name(f"{path.name}.part")
        kept.unlink(missing_ok=True)
        append_records(kept, finished)
        kept.replace(path)
    return finished


def read_all(path: Path, decoder: msgspec.json.Decoder[V]) -> list[V]:
    """The records in ``path``, or in ``path.gz`` where that is not there; a last line that was cut off is left out.

    Raises ``ConfigError`` naming the file, and the line that is no record.
    """
    records = []
    for number, line in enumerate(_whole_lines(path), start=1):
        try:
            records.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--out: {path}, line {number}: {error}; take that line out") from error
    return records


def there_must_be(records: Sequence[V], directory: Path) -> Sequence[V]:
    """``records`` of a run, for a report. Raises ``ConfigError`` where there are none."""
    if not records:
        raise ConfigError(
            f"--out: {directory} holds a plan, and nothing is measured yet; measure first, or give another directory"
        )
    return records


def _whole_lines(path: Path) -> list[bytes]:
    packed = path.with_name(f"{path.name}.gz")
    try:
        if path.exists():
            data = path.read_bytes()
        elif packed.exists():
            data = gzip.decompress(packed.read_bytes())
        else:
            return []
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"--out: the records of {path.parent} cannot be read: {error}") from error
    return data[: data.rfind(b"\n") + 1].splitlines()


def _cut_broken_line(file: BinaryIO) -> None:
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return
    file.seek(size - 1)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
    file.seek(0, os.SEEK_END)
