"""The files in a run's directory: their names, and how those are written that a run cannot go on without."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PLAN_FILE = "plan.json"
RECORDS_FILE = "records.jsonl"
FACTS_FILE = "facts.json"
REPORT_FILE = "report.md"
CELLS_FILE = "cells.jsonl"
PAGE_FILE = "report.html"
TOKENIZER_DIR = "tokenizer"


def write_whole(path: Path, data: bytes) -> None:
    """All of it or nothing, whatever happens meanwhile."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(data)
    part.replace(path)
