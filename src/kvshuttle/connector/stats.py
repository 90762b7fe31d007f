"""Connector metrics: collected in the halves, carried by vLLM, shown at its ``/metrics``.

Series (all with vLLM's own ``model_name`` and ``engine`` labels), documented in ``docs/operations.md``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Series:
    """One metric: its Prometheus kind, extra labels, help text and, for histograms, bucket bounds."""

    kind: type[Counter | Gauge | Histogram]
    labels: tuple[str, ...]
    text: str
    buckets: tuple[float, ...] = ()


_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

SERIES: Mapping[str, Series] = {
    "transfers": Series(Counter, ("direction", "outcome"), "Hand-offs ended, by outcome; one for each request."),
    "transfer_tokens": Series(Counter, ("direction",), "Tokens whose KV was moved and used."),
    "local_hit_tokens": Series(Counter, ("leg",), "Prompt tokens that the local prefix cache already held."),
    "transfer_bytes": Series(Counter, ("direction",), "Bytes moved, summed over ranks."),
    "pushed_bytes": Series(Counter, ("when",), "Bytes written before (streamed) and after the prompt was computed."),
    "push_wait_seconds": Series(Histogram, (), "Time from reserving blocks to the last byte of a push.", _SECONDS),
    "transfer_failures": Series(
        Counter, ("direction", "reason"), "Reads and writes that failed in a worker; one for each rank."
    ),
    "transfer_descriptors": Series(
        Histogram, ("direction",), "Descriptors for each transfer.", (1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 30000)
    ),
    "transfer_post_seconds": Series(Histogram, ("direction",), "Time to prepare and post a transfer.", _SECONDS),
    "transfer_wire_seconds": Series(Histogram, ("direction",), "Time from post to completion.", _SECONDS),
    "acquire_seconds": Series(Histogram, (), "Time from asking a holder to its answer.", _SECONDS),
    "holdings": Series(Counter, ("outcome",), "What became of KV held for readers: granted, released, expired."),
    "leases": Series(Counter, ("outcome",), "What became of leases: acquired, renewed, released, expired, denied_*."),
    "leases_held": Series(Gauge, (), "Leases outstanding at the last step."),
    "held_blocks": Series(Gauge, (), "Blocks kept for readers at the last step."),
    "retentions": Series(
        Counter, ("outcome",), "KV of answered requests kept for a later turn, or why not, and how the keeping ended."
    ),
    "retained_handles": Series(Gauge, (), "What is kept for later turns at the last step."),
    "retained_blocks": Series(Gauge, (), "Blocks of all that; they are among those held, and give way when needed."),
    "recompute_threshold_tokens": Series(
        Gauge, ("peer",), "Fewest missing tokens of an earlier turn that are read from this engine and not computed."
    ),
    "rejected_params": Series(Counter, (), "Requests whose kv_transfer_params were malformed and ignored."),
    "internal_errors": Series(Counter, ("hook",), "Exceptions caught at the edge of a connector hook: bugs."),
    "quarantined_blocks": Series(Gauge, (), "Blocks kept back because a failed read may still write to them."),
}
"""Name (without the ``kvshuttle:`` prefix) to its declaration: the one list that code, docs and tests share."""

SEPARATOR = "|"


def series_key(name: str, *labels: str) -> str:
    """The flat key of a labelled series; stats cross processes as plain dicts."""
    return SEPARATOR.join((name, *labels))


@dataclass
class ShuttleStats(KVConnectorStats):
    """One interval's observations. ``data``: series key to a number (counter, gauge) or list (histogram)."""

    data: dict[str, Any] = field(default_factory=dict)
    _reported: dict[str, float] = field(default_factory=dict, repr=False, compare=False)

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Add to a counter."""
        if not by:
            return
        key = series_key(name, *labels)
        self.data[key] = self.data.get(key, 0) + by

    def observe(self, name: str, *labels: str, value: float) -> None:
        """Record one histogram observation."""
        self.data.setdefault(series_key(name, *labels), []).append(value)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge; a value that was reported before is not reported again, so that idle steps carry nothing."""
        key = series_key(name, *labels)
        if self._reported.get(key) != value:
            self._reported[key] = value
            self.data[key] = value

    def reset(self) -> None:
        """Forget everything recorded."""
        self.data = {}

    def take(self) -> ShuttleStats | None:
        """What was recorded since the last take; None when nothing was."""
        if not self.data:
            return None
        taken = ShuttleStats(data=self.data)
        self.data = {}
        return taken

    def aggregate(self, other: KVConnectorStats) -> ShuttleStats:
        """Merge another interval or rank into this one: counters add, lists join, gauges take the latest."""
        for key, value in other.data.items():
            if key not in self.data:
                self.data[key] = list(value) if isinstance(value, list) else value
            elif isinstance(value, list):
                self.data[key].extend(value)
            elif SERIES[key.split(SEPARATOR)[0]].kind is Gauge:
                self.data[key] = value
            else:
                self.data[key] += value
        return self

    def reduce(self) -> dict[str, int | float]:
        """One representative number a series for vLLM's log line: sums, and medians of histograms."""
        reduced: dict[str, int | float] = {}
        for key, value in self.data.items():
            if isinstance(value, list):
                ordered = sorted(value)
                reduced[f"{key} p50"] = round(ordered[len(ordered) // 2], 6)
            else:
                reduced[key] = value
        return reduced

    def is_empty(self) -> bool:
        """True when nothing was recorded."""
        return not self.data


class ShuttlePromMetrics(KVConnectorPromMetrics):
    """Registers ``SERIES`` with vLLM's registry and records stats to it; lives in the API server."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        self._children: dict[tuple[str, int], Any] = {}
        for name, series in SERIES.items():
            extra = {"buckets": series.buckets} if series.buckets else {}
            self._metrics[name] = metric_types[series.kind](
                name=f"kvshuttle:{name}", documentation=series.text, labelnames=[*labelnames, *series.labels], **extra
            )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval's stats for one engine."""
        for key, value in transfer_stats_data.items():
            name = key.split(SEPARATOR)[0]
            series = SERIES.get(name)
            if series is None:
                continue
            child = self._child(key, engine_idx)
            if series.kind is Histogram:
                for item in value:
                    child.observe(item)
            elif series.kind is Gauge:
                child.set(value)
            else:
                child.inc(value)

    def _child(self, key: str, engine_idx: int) -> Any:
        child = self._children.get((key, engine_idx))
        if child is None:
            name, *labels = key.split(SEPARATOR)
            child = self._metrics[name].labels(*self.per_engine_labelvalues[engine_idx], *labels)
            self._children[key, engine_idx] = child
        return child
