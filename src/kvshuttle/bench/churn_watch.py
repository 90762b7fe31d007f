"""Looks at all processes of a fleet now and then: memory, files, threads, and what their metrics show."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvshuttle.bench.churn_records import LookRecord
from kvshuttle.bench.machine_load import group_of
from kvshuttle.clock import now_s
from kvshuttle.errors import PeerUnreachable
from kvshuttle.launcher.chat import fetch_metrics
from kvshuttle.launcher.metrics import samples_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvshuttle.bench.churn_outages import Running
    from kvshuttle.bench.churn_records import Journal
    from kvshuttle.launcher.plan import ProcessPlan

EVERY_S = 5.0
_METRICS_TIMEOUT_S = 3.0
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20
SERIES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "usage",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:corrupted_requests_total": "corrupted",
    "kvshuttle:held_blocks": "held_blocks",
    "kvshuttle:leases_held": "leases_held",
    "kvshuttle:retained_blocks": "retained_blocks",
    "kvshuttle:quarantined_blocks": "quarantined_blocks",
    "kvshuttle:internal_errors_total": "internal_errors",
    "kvshuttle_router_outstanding_requests": "outstanding",
    "kvshuttle_router_turns": "turns",
}
"""What of the metrics is written down, summed over labels, and how it is called."""
_BY_OUTCOME = "kvshuttle:transfers_total"


def gauges_of(text: str) -> dict[str, float]:
    """What is written down of a ``/metrics``."""
    gauges: dict[str, float] = {}
    for series, labels, value in samples_of(text):
        name = SERIES.get(series)
        if series == _BY_OUTCOME:
            name = f"{labels.get('direction')} {labels.get('outcome')}"
        if name is not None:
            gauges[name] = gauges.get(name, 0.0) + value
    return gauges


def usage_of(pids: Sequence[int]) -> tuple[float, int, int]:
    """Resident memory in MiB, open files and threads of processes, together; those that are gone count nothing."""
    rss_mib, num_fds, num_threads = 0.0, 0, 0
    for pid in pids:
        with contextlib.suppress(OSError):
            rss_mib += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_MIB
            num_fds += len(list(Path(f"/proc/{pid}/fd").iterdir()))
            num_threads += len(list(Path(f"/proc/{pid}/task").iterdir()))
    return rss_mib, num_fds, num_threads


@dataclass(slots=True)
class Watch:
    """Looks every few seconds in a thread of its own. ``healthy``: names of those that are worth asking."""

    processes: Sequence[ProcessPlan]
    running: Callable[[], Sequence[Running]]
    healthy: Callable[[], list[str]]
    journal: Journal
    began_at_s: float
    _is_over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="churn-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        assert self._thread is not None
        self._thread.join()

    def look(self) -> list[LookRecord]:
        """One look at everything, which is written down too."""
        healthy = set(self.healthy())
        urls = {process.name: process.url for process in self.processes}
        with ThreadPoolExecutor(len(urls)) as executor:
            texts = dict(
                zip(urls, executor.map(lambda name: self._metrics(name, urls[name], healthy), urls), strict=True)
            )
        records = []
        for process in self.running():
            rss_mib, num_fds, num_threads = usage_of(group_of(process.pid))
            if not num_threads:
                continue  # it is dead, and not started again yet
            records.append(
                LookRecord(
                    name=process.name,
                    life=process.life,
                    at_s=now_s() - self.began_at_s,
                    is_healthy=process.name in healthy,
                    rss_mib=round(rss_mib, 1),
                    num_fds=num_fds,
                    num_threads=num_threads,
                    gauges=gauges_of(texts[process.name]),
                )
            )
        self.journal.write(*records)
        return records

    def _run(self) -> None:
        while not self._is_over.wait(EVERY_S):
            self.look()

    def _metrics(self, name: str, url: str, healthy: set[str]) -> str:
        if name not in healthy:
            return ""
        try:
            return fetch_metrics(url, timeout_s=_METRICS_TIMEOUT_S)
        except PeerUnreachable:
            return ""  # it was killed just now, or is too busy; there is another look
