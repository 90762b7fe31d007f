"""What engines count themselves: kept beside a run's records, for a look behind its figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.launcher.chat import fetch_metrics
from kvshuttle.launcher.metrics import total_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvshuttle.launcher.plan import ProcessPlan

_KEPT = ("kvshuttle:", "vllm:nixl", "vllm:corrupted", "vllm:num_preemptions")


def save_metrics(directory: Path, label: str, engines: Sequence[ProcessPlan]) -> None:
    """Write what the engines' connectors counted, a file for each engine. Raises ``PeerUnreachable``."""
    directory.mkdir(exist_ok=True)
    for engine in engines:
        lines = [line for line in fetch_metrics(engine.url).splitlines() if line.startswith(_KEPT)]
        (directory / f"{label}-{engine.name}.txt").write_text("\n".join(lines) + "\n")


def total_over(engines: Sequence[ProcessPlan], series: str) -> float:
    """The sum of a series over all engines. Raises ``PeerUnreachable``."""
    return sum(total_of(fetch_metrics(engine.url), series) for engine in engines)
