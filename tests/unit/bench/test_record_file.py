"""Records on disk: a run that goes on loses nothing of what it had, also where that was published."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvshuttle.bench.record_file import append_records, read_all, resume_finished
from kvshuttle.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


class Line(msgspec.Struct, frozen=True):
    cell: str
    ends_cell: bool = True

    @property
    def cell_key(self) -> str:
        return self.cell


DECODER = msgspec.json.Decoder(Line)
FIRST, SECOND, CUT_OFF = Line("a"), Line("b"), Line("c", ends_cell=False)


def pack(path: Path, *records: Line) -> None:
    """Records as they are published."""
    lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(lines))


def test_a_published_run_that_goes_on_keeps_what_it_had(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    pack(path, FIRST, CUT_OFF, SECOND)
    assert resume_finished(path, DECODER) == [FIRST, SECOND]
    append_records(path, [Line("d")])
    assert read_all(path, DECODER) == [FIRST, SECOND, Line("d")]


def test_records_are_appended_to_those_that_are_published(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    pack(path, FIRST)
    append_records(path, [SECOND])
    append_records(path, [Line("d")])
    assert read_all(path, DECODER) == [FIRST, SECOND, Line("d")]
    assert [each.name for each in sorted(tmp_path.iterdir())] == ["cells.jsonl", "cells.jsonl.gz"]


def test_a_line_that_is_no_record_is_told_with_the_file_that_it_stands_in(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.with_name("records.jsonl.gz").write_bytes(gzip.compress(b'{"cell":"a"}\n7\n'))
    with pytest.raises(ConfigError, match=r"--out: \S*records\.jsonl\.gz, line 2: "):
        read_all(path, DECODER)


@pytest.mark.parametrize("data", [b"no gzip", gzip.compress(b"x" * 100)[:20]])
def test_records_that_cannot_be_unpacked_are_not_written_over(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.with_name("records.jsonl.gz").write_bytes(data)
    with pytest.raises(ConfigError, match=r"--out: the records of .* cannot be read"):
        append_records(path, [FIRST])
    with pytest.raises(ConfigError, match=r"--out: the records of .* cannot be read"):
        resume_finished(path, DECODER)
    assert not path.exists()
