"""What the router tells its operator: metrics by reason and one log line for each request.

Counting is plain integers: everything happens on one event loop, so the locks of ``prometheus_client``'s own counters
would buy nothing, and its part is only to write them down. No metric or log line holds anything of a prompt
or an answer.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, product
from typing import TYPE_CHECKING, Literal

import orjson
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from kvshuttle.handoff.params import Mode
from kvshuttle.policy import DropReason, Following, ModeReason, PlacementReason, Route, RouteReason
from kvshuttle.router.exchange import FailureReason
from kvshuttle.router.openai import Endpoint
from kvshuttle.router.turns import HistoryResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import Metric

    from kvshuttle.policy import ConversationTable
    from kvshuttle.router.registry import Engine, Registry

logger = logging.getLogger("kvshuttle.router.requests")

METRICS_CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_PREFIX = "kvshuttle_router_"
_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


Counts = dict[tuple[str, ...], int]


class Plain(StrEnum):
    """Counters without labels."""

    PREFILL_NOT_HELD = "prefill_not_held"
    RELEASES = "releases"
    RESPONSE_BYTES = "response_bytes"


_PLAIN_TEXTS = {
    Plain.PREFILL_NOT_HELD: "Prefill answers that hold nothing for a decode engine",
    Plain.RELEASES: "Handles given back because nobody will fetch them",
    Plain.RESPONSE_BYTES: "Bytes of answers to inference requests",
}


class Leg(StrEnum):
    """The HTTP calls of a request."""

    PREFILL = "prefill"
    DECODE = "decode"


class Window(StrEnum):
    """Where a request is; what a client's disconnect is counted under."""

    PREFILL = "prefill"
    """Waiting for the prefill leg's answer; in a push, for the decode leg's as well."""
    BETWEEN = "between"
    """Neither leg runs: choosing, or pausing before a retry."""
    DECODE = "decode"
    """Waiting for the decode leg's first data event only."""
    STREAMING = "streaming"


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    """4xx, ours or an engine's."""
    UNAVAILABLE = "unavailable"
    """5xx: no engine could serve it."""
    BROKEN_STREAM = "broken_stream"
    """The engine failed after the first data event."""
    DISCONNECTED = "disconnected"
    STOPPED = "stopped"
    """The router stopped before it had answered."""


class Stage(StrEnum):
    """Parts of a request's time."""

    PREFILL = "prefill"
    """From sending the prefill leg to its answer."""
    GAP = "gap"
    """Pull: from that answer to sending the decode leg."""
    FIRST_BYTE = "first_byte"
    """From sending the decode leg to its first data event, or its whole answer when not streamed."""
    HANDOFF = "handoff"
    """From the prefill leg's answer to the decode leg's first data event; 0 when that came first."""
    TOTAL = "total"


@dataclass(slots=True)
class Receipt:
    """What happened to one request, filled in as it goes. It is logged and never sent to the client."""

    request_id: str
    endpoint: Endpoint
    model: str = ""
    num_tokens_estimated: int = 0
    route: Route | Literal[""] = ""
    """Empty, like ``reason``, when the request was refused before one was chosen."""
    reason: RouteReason | Literal[""] = ""
    mode: Mode | Literal[""] = ""
    """How KV was handed off; empty, like ``mode_reason``, when it was not."""
    mode_reason: ModeReason | Literal[""] = ""
    window: Window = Window.BETWEEN
    outcome: Outcome = Outcome.OK
    status: int = 0
    conversation: str = ""
    """Our name for it; a client's own is not logged."""
    history: HistoryResult | Literal[""] = ""
    following: Following | Literal[""] = ""
    """Whether it was decoded where its history is kept; empty when that is nowhere."""
    num_held_tokens: int = 0
    num_cached_tokens: int = 0
    """Of the prompt, what the prefill engine did not compute for this request."""
    num_bytes: int = 0
    prefill_engine: str = ""
    decode_engine: str = ""
    failures: list[str] = field(default_factory=list)
    stages_s: dict[Stage, float] = field(default_factory=dict)

    def line(self) -> dict[str, object]:
        """As it is logged."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        fields["stages_s"] = {stage.value: round(duration_s, 6) for stage, duration_s in self.stages_s.items()}
        return fields


class Telemetry:
    """All metrics of one router. It belongs to the event loop, like everything that it counts."""

    def __init__(self, registry: Registry, table: ConversationTable, *, is_logging_requests: bool) -> None:
        self._is_logging = is_logging_requests
        self._table = table
        self._registry = registry
        self._requests = _zeros(Endpoint, Outcome)
        self._decisions = _zeros(Route, RouteReason)
        self._modes = _zeros(Mode, ModeReason)
        self._histories = _zeros(HistoryResult)
        self._followings = _zeros(Following)
        self._retries = _zeros(Leg)
        self._placements = _zeros(Leg, PlacementReason)
        self._failures = _zeros(Leg, FailureReason)
        self._disconnects = _zeros(Window)
        self._refused: Counts = {}
        self._plain = dict.fromkeys(Plain, 0)
        self._stages = {(mode, stage): Durations() for mode, stage in product((*Mode, ""), Stage)}
        self._collectors = CollectorRegistry()
        self._collectors.register(self)

    def finish(self, receipt: Receipt) -> None:
        """Count and log a request that is over."""
        self._requests[receipt.endpoint, receipt.outcome] += 1
        if receipt.route:
            self._decisions[receipt.route, receipt.reason] += 1
        if receipt.mode:
            self._modes[receipt.mode, receipt.mode_reason] += 1
        if receipt.history:
            self._histories[(receipt.history,)] += 1
        if receipt.following:
            self._followings[(receipt.following,)] += 1
        if receipt.outcome is Outcome.DISCONNECTED:
            self._disconnects[(receipt.window,)] += 1
        for stage, duration_s in receipt.stages_s.items():
            self.took(receipt.mode, stage, duration_s)
        self._plain[Plain.RESPONSE_BYTES] += receipt.num_bytes
        if self._is_logging and logger.isEnabledFor(logging.INFO):
            logger.info(orjson.dumps(receipt.line()).decode())

    def placed(self, leg: Leg, reason: PlacementReason) -> None:
        """An engine was chosen, or none could be."""
        self._placements[leg, reason] += 1

    def failed(self, leg: Leg, reason: FailureReason) -> None:
        """A leg failed."""
        self._failures[leg, reason] += 1

    def retried(self, leg: Leg) -> None:
        """A leg's failure costs the request another attempt."""
        self._retries[(leg,)] += 1

    def took(self, mode: Mode | Literal[""], stage: Stage, duration_s: float) -> None:
        """A part of a request is over."""
        self._stages[mode, stage].add(duration_s)

    def count(self, what: Plain) -> None:
        """One more of something that has no labels."""
        self._plain[what] += 1

    def refused(self, status: int) -> None:
        """Something was refused before it became a request."""
        self._refused[(str(status),)] = self._refused.get((str(status),), 0) + 1

    def exposition(self) -> bytes:
        """All metrics as Prometheus reads them."""
        return generate_latest(self._collectors)

    def collect(self) -> Iterator[Metric]:
        """For ``prometheus_client``: everything as it is now."""
        yield _counter("requests", "Requests by endpoint and outcome", ["endpoint", "outcome"], self._requests)
        yield _counter("decisions", "Requests by way and reason", ["route", "reason"], self._decisions)
        yield _counter("modes", "Requests through a pair by mode and reason", ["mode", "reason"], self._modes)
        yield _counter("placements", "Engine choices by reason", ["leg", "reason"], self._placements)
        yield _counter("leg_failures", "Failed legs by reason", ["leg", "reason"], self._failures)
        yield _counter("retries", "Further attempts by the leg that failed", ["leg"], self._retries)
        yield _counter("client_disconnects", "Clients that left, by where", ["window"], self._disconnects)
        yield _counter("refused", "Refused before they became requests", ["status"], self._refused)
        for what, value in self._plain.items():
            yield CounterMetricFamily(_PREFIX + what, _PLAIN_TEXTS[what], value=value)
        stages = HistogramMetricFamily(_PREFIX + "stage_seconds", "Time by part of a request", labels=["mode", "stage"])
        for (mode, stage), durations in self._stages.items():
            stages.add_metric([mode or "none", stage.value], durations.buckets(), durations.sum_s)
        yield stages
        yield from self._history()
        yield from self._engine_gauges()

    def _history(self) -> Iterator[Metric]:
        drops: Counts = {(reason,): self._table.drops[reason] for reason in DropReason}
        yield _counter("histories", "Requests by what became of their history", ["result"], self._histories)
        yield _counter("history_placements", "Turns by where they were decoded", ["outcome"], self._followings)
        yield _counter("turns_dropped", "Turns that left the conversation table", ["reason"], drops)
        entered = CounterMetricFamily(_PREFIX + "turns_entered", "Turns that entered the conversation table")
        entered.add_metric([], self._table.num_entered)
        yield entered
        size = GaugeMetricFamily(_PREFIX + "turns", "Turns in the conversation table")
        size.add_metric([], len(self._table))
        yield size

    def _engine_gauges(self) -> Iterator[Metric]:
        engines = self._registry.engines.values()
        values: dict[str, tuple[str, Callable[[Engine], float]]] = {
            "outstanding_requests": ("Sent and unanswered", lambda engine: engine.outstanding_requests),
            "outstanding_tokens": ("Estimated prompt tokens of them", lambda engine: engine.outstanding_tokens),
            "engine_up": ("1 when its HTTP server answers", lambda engine: engine.is_up),
            "engine_pairs": ("Engines that it can pair with now", lambda engine: len(engine.peers)),
        }
        for name, (text, value) in values.items():
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=["engine"])
            for engine in engines:
                gauge.add_metric([engine.name], float(value(engine)))
            yield gauge


class Durations:
    """A histogram of seconds."""

    __slots__ = ("_counts", "sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(_BUCKETS_S) + 1)
        self.sum_s = 0.0

    def add(self, duration_s: float) -> None:
        """One more."""
        self._counts[bisect_left(_BUCKETS_S, duration_s)] += 1
        self.sum_s += duration_s

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and cumulative count of each bucket."""
        bounds = [*(str(bound) for bound in _BUCKETS_S), "+Inf"]
        return list(zip(bounds, accumulate(self._counts), strict=True))


def _zeros(*kinds: type[StrEnum]) -> Counts:
    """A count of zero for every combination, so that a rate is known from the first scrape on."""
    return dict.fromkeys(product(*kinds), 0)


def _counter(name: str, text: str, labels: list[str], counts: Counts) -> CounterMetricFamily:
    family = CounterMetricFamily(_PREFIX + name, text, labels=labels)
    for values, count in counts.items():
        family.add_metric([_label(value) for value in values], count)
    return family


def _label(value: str) -> str:
    return value.name.lower() if isinstance(value, Endpoint) else str(value)
