"""`kvshuttle bench report`: a run's records as Markdown, whichever benchmark they are of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.bench.churn_report import write_churn_report
from kvshuttle.bench.grid_report import write_grid_report
from kvshuttle.bench.handoff_report import handoff_markdown
from kvshuttle.bench.plan_file import Benchmark, benchmark_in
from kvshuttle.bench.run_files import REPORT_FILE
from kvshuttle.bench.turns_report import write_turns_report

if TYPE_CHECKING:
    from pathlib import Path


def write_report(directory: Path) -> Path:
    """Write the report beside the records and return its path: that of the page where there is one beside the Markdown.

    Raises ``OSError`` when there are none, ``ConfigError`` when the run's plan cannot be read.
    """
    benchmark = benchmark_in(directory)
    if benchmark is Benchmark.RUN:
        return write_grid_report(directory)
    if benchmark is Benchmark.CHURN:
        return write_churn_report(directory)
    if benchmark is Benchmark.TURNS:
        return write_turns_report(directory)
    path = directory / REPORT_FILE
    path.write_text(handoff_markdown(directory))
    return path
