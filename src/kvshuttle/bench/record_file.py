"""A run's records on disk: JSON lines, whatever the benchmark."""

from __future__ import annotations

import gzip
import os
import zlib
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeVar

import msgspec

from kvshuttle.bench.run_files import write_whole
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


def has_records(path: Path) -> bool:
    """Whether a run has written there, or was published from there."""
    return path.exists() or _packed(path).exists()


def append_records(path: Path, records: Sequence[Any]) -> None:
    """Append, all at once: a run that is cut off leaves one broken line at worst, which the next call takes away.

    A published run that goes on is unpacked first. Raises ``ConfigError`` where that cannot be.
    """
    if not path.exists() and (packed := _packed(path)).exists():
        write_whole(path, _data_of(packed))
    with path.open("ab+") as file:
        _cut_broken_line(file)
        file.write(_lines_of(records))


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
    if has_records(path):
        write_whole(path, _lines_of(finished))
    return finished


def read_all(path: Path, decoder: msgspec.json.Decoder[V]) -> list[V]:
    """The records in ``path``, or in ``path.gz`` where that is not there; a last line that was cut off is left out.

    Raises ``ConfigError`` naming the file, and the line that is no record.
    """
    found = next((each for each in (path, _packed(path)) if each.exists()), None)
    data = _data_of(found) if found else b""
    records = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            records.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--out: {found}, line {number}: {error}; take that line out") from error
    return records


def there_must_be(records: Sequence[V], directory: Path) -> Sequence[V]:
    """``records`` of a run, for a report. Raises ``ConfigError`` where there are none."""
    if not records:
        raise ConfigError(
            f"--out: {directory} holds a plan, and nothing is measured yet; measure first, or give another directory"
        )
    return records


def _packed(path: Path) -> Path:
    return path.with_name(f"{path.name}.gz")


def _data_of(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"--out: the records of {path.parent} cannot be read: {error}") from error


def _lines_of(records: Sequence[Any]) -> bytes:
    return b"".join(_ENCODER.encode(record) + b"\n" for record in records)


def _cut_broken_line(file: BinaryIO) -> None:
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return
    file.seek(size - 1)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
    file.seek(0, os.SEEK_END)
