"""`kvshuttle bench report`: a run's records as Markdown, whichever benchmark they are of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.bench.grid_report import write_grid_report
from kvshuttle.bench.handoff_report import handoff_markdown
from kvshuttle.bench.plan_file import Benchmark, benchmark_in
from kvshuttle.bench.run_files import REPORT_FILE
from kvshuttle.bench.turns_report import turns_markdown

if TYPE_CHECKING:
    from pathlib import Path


def write_report(directory: Path) -> Path:
    """Write the report beside the records and return its path: of loads, that of the page, which Markdown lies beside.

    Raises ``OSError`` when there are none, ``ConfigError`` when the run's plan cannot be read.
    """
    benchmark = benchmark_in(directory)
    if benchmark is Benchmark.RUN:
        return write_grid_report(directory)
    path = directory / REPORT_FILE
    path.write_text(handoff_markdown(directory) if benchmark is Benchmark.HANDOFF else turns_markdown(directory))
    return path
