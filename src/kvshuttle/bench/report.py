"""`kvshuttle bench report`: a run's records as Markdown, whichever benchmark they are of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.bench.handoff_report import handoff_markdown
from kvshuttle.bench.plan_file import Benchmark, benchmark_in
from kvshuttle.bench.run_files import REPORT_FILE
from kvshuttle.bench.turns_report import turns_markdown

if TYPE_CHECKING:
    from pathlib import Path


def write_report(directory: Path) -> Path:
    """Write the report beside the records and return its path.

    Raises ``OSError`` when there are none, ``ConfigError`` when the run's plan cannot be read.
    """
    path = directory / REPORT_FILE
    is_handoff = benchmark_in(directory) is Benchmark.HANDOFF
    path.write_text(handoff_markdown(directory) if is_handoff else turns_markdown(directory))
    return path
