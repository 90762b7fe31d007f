"""What a run of overload and churn writes down: JSON lines, in the order in which things ended."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from kvshuttle.bench.record_file import append_records, read_all

if TYPE_CHECKING:
    from pathlib import Path

BUG_COUNTERS = ("internal_errors", "corrupted")
"""Gauges of looks that must stay 0."""
DIED = "died"
"""Kind of an outage that nobody here brought about."""
NOT_OVER = -1.0
"""Stands for the end of what had not ended."""


class Client(StrEnum):
    """Who asks."""

    LOAD = "load"
    """``vllm bench serve``."""
    TALK = "talk"
    """The OpenAI client, in conversations."""
    LAST = "last"
    """The requests at the end, when everything is at rest."""


class How(StrEnum):
    """What became of a request."""

    RIGHT = "right"
    LEFT = "left"
    """Its client left, and what had come until then was right."""
    WRONG = "wrong"
    REFUSED = "refused"
    """Nobody took the connection, or it ended before there was any answer."""
    ERROR = "error"
    """An HTTP status that says so."""
    CUT = "cut"
    """A stream that ended early, and what had come until then was right."""
    SILENT = "silent"
    """The client's patience ended."""


class AskRecord(msgspec.Struct, frozen=True, tag="ask", kw_only=True):
    """One request. Instants are seconds after the first request; ``mode``: what its header asked for."""

    client: Client
    request_id: str
    sent_s: float
    ended_s: float
    how: How
    mode: str
    is_streamed: bool = True
    turn: int = 1
    status: int = 0
    num_tokens: int = 0
    """Words that came."""
    detail: str = ""


class RoutedRecord(msgspec.Struct, frozen=True, tag="routed", kw_only=True):
    """What the router's log says of a request that failed."""

    request_id: str
    outcome: str = ""
    status: int = 0
    failures: list[str] = []
    total_s: float = 0.0
    """From its arrival to its end."""


class WindowRecord(msgspec.Struct, frozen=True, tag="window", kw_only=True):
    """One run of the load generator. ``rate``: requests sent per second; 0 for all at once."""

    name: str
    began_s: float
    ended_s: float
    rate: float
    num_requests: int
    num_right: int
    error: str = ""


class OutageRecord(msgspec.Struct, frozen=True, tag="outage", kw_only=True):
    """A process that was killed, stopped or restarted, or that died by itself; written at its begin and at its end.

    It ends when the process is healthy again.
    """

    number: int
    name: str
    kind: str
    began_s: float
    ended_s: float = NOT_OVER
    detail: str = ""


class LookRecord(msgspec.Struct, frozen=True, tag="look", kw_only=True):
    """A process at one time. ``life``: how often it was started. Sums are over all processes of its group."""

    name: str
    life: int
    at_s: float
    is_healthy: bool
    rss_mib: float
    num_fds: int
    num_threads: int
    gauges: dict[str, float] = {}
    """Of its metrics, where it answered."""


class RestRecord(msgspec.Struct, frozen=True, tag="rest", kw_only=True):
    """Coming to rest. ``left``: what was still there at the end, by process; empty when nothing was."""

    began_s: float
    took_s: float
    bound_s: float
    left: dict[str, dict[str, float]]


class EndRecord(msgspec.Struct, frozen=True, tag="end", kw_only=True):
    """The last line of a run that came to its end."""

    num_wrong_kv_lines: int
    """Of the engines' logs."""
    bugs: dict[str, float] = {}
    """Counters of bugs that are not 0, by process."""
    log_troubles: list[str] = []
    """Tracebacks and the like in logs, the first few."""


Record = AskRecord | RoutedRecord | WindowRecord | OutageRecord | LookRecord | RestRecord | EndRecord

_DECODER: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


@dataclass(slots=True)
class Journal:
    """Appends records to a file; any thread may."""

    path: Path
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def write(self, *records: Record) -> None:
        """Append, whole lines at once."""
        with self._lock:
            append_records(self.path, records)


def read_churn_records(path: Path) -> list[Record]:
    """All records, as ``read_all`` reads them."""
    return read_all(path, _DECODER)
