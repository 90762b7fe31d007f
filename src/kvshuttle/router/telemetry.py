"""What the router tells its operator: metrics by reason and one log line for each request.

Children of labelled metrics are made once, here: looking them up costs three times what counting does. Nothing in a
metric or a log line comes from a prompt or an answer.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvshuttle.policy import PlacementReason, Route, RouteReason
from kvshuttle.router.exchange import FailureReason
from kvshuttle.router.openai import Endpoint

if TYPE_CHECKING:
    from kvshuttle.router.registry import Engine, Registry

logger = logging.getLogger("kvshuttle.router.requests")

METRICS_CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Leg(StrEnum):
    """The HTTP calls of a request."""

    PREFILL = "prefill"
    DECODE = "decode"


class Window(StrEnum):
    """Where a request is; what a client's disconnect is counted under."""

    PREFILL = "prefill"
    """Waiting for the prefill leg's answer."""
    BETWEEN = "between"
    """Neither leg runs: choosing, or pausing before a retry."""
    DECODE = "decode"
    """Waiting for the decode leg's first data event."""
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


class Stage(StrEnum):
    """Parts of a request's time."""

    PREFILL = "prefill"
    """From sending the prefill leg to its answer."""
    GAP = "gap"
    """From that answer to sending the decode leg."""
    FIRST_BYTE = "first_byte"
    """From sending the decode leg to its first data event, or its whole answer when not streamed."""
    TOTAL = "total"


@dataclass(slots=True)
class Receipt:
    """What happened to one request, filled in as it goes. It is logged and never sent to the client."""

    request_id: str
    endpoint: Endpoint
    model: str = ""
    num_tokens_estimated: int = 0
    route: Route = Route.PAIR
    reason: RouteReason = RouteReason.DEFAULT
    window: Window = Window.BETWEEN
    outcome: Outcome = Outcome.OK
    status: int = 0
    num_held_tokens: int = 0
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
    """All metrics of one router, in a registry of its own."""

    def __init__(self, registry: Registry, *, is_logging_requests: bool) -> None:
        self._is_logging = is_logging_requests
        self._collectors = CollectorRegistry()
        self._requests = self._counter(
            "requests", "Requests by endpoint and outcome", endpoint=Endpoint, outcome=Outcome
        )
        self._decisions = self._counter("decisions", "Requests by way and reason", route=Route, reason=RouteReason)
        self._placements = self._counter("placements", "Engine choices by reason", leg=Leg, reason=PlacementReason)
        self._failures = self._counter("leg_failures", "Failed legs by reason", leg=Leg, reason=FailureReason)
        self._disconnects = self._counter("client_disconnects", "Clients that left, by where", window=Window)
        self._stages = {stage: child for (stage,), child in self._histograms().items()}
        self._retries = self._bare("retries", "Dispatches after the first of a request")
        self.not_held = self._bare("prefill_not_held", "Prefill answers that hold nothing for a decode engine")
        self.releases = self._bare("releases", "Handles given back because nobody will fetch them")
        self._bytes = self._bare("response_bytes", "Bytes of answers sent to clients")
        self._refused = Counter(
            "refused", "Requests refused before they were read", ["status"],
            namespace="kvshuttle_router", registry=self._collectors,
        )  # fmt: skip
        self._watch(registry)

    def finish(self, receipt: Receipt) -> None:
        """Count and log a request that is over."""
        self._requests[receipt.endpoint, receipt.outcome].inc()
        self._decisions[receipt.route, receipt.reason].inc()
        if receipt.outcome is Outcome.DISCONNECTED:
            self._disconnects[(receipt.window,)].inc()
        for stage, duration_s in receipt.stages_s.items():
            self._stages[stage].observe(duration_s)
        self._bytes.inc(receipt.num_bytes)
        if self._is_logging and logger.isEnabledFor(logging.INFO):
            logger.info(orjson.dumps(receipt.line()).decode())

    def placed(self, leg: Leg, reason: PlacementReason) -> None:
        """An engine was chosen, or none could be."""
        self._placements[leg, reason].inc()

    def failed(self, leg: Leg, reason: FailureReason) -> None:
        """A leg failed."""
        self._failures[leg, reason].inc()

    def retried(self) -> None:
        """A request is dispatched again."""
        self._retries.inc()

    def refused(self, status: int) -> None:
        """Something was refused before it became a request."""
        self._refused.labels(str(status)).inc()

    def exposition(self) -> bytes:
        """All metrics as Prometheus reads them."""
        return generate_latest(self._collectors)

    def _counter(self, name: str, text: str, **labels: type[StrEnum]) -> dict[tuple[StrEnum, ...], Counter]:
        counter = Counter(name, text, list(labels), namespace="kvshuttle_router", registry=self._collectors)
        combinations: list[tuple[StrEnum, ...]] = [()]
        for kind in labels.values():
            combinations = [(*head, value) for head in combinations for value in kind]
        return {values: counter.labels(*(_label(value) for value in values)) for values in combinations}

    def _bare(self, name: str, text: str) -> Counter:
        return Counter(name, text, namespace="kvshuttle_router", registry=self._collectors)

    def _histograms(self) -> dict[tuple[Stage, ...], Histogram]:
        histogram = Histogram(
            "stage_seconds", "Time by part of a request", ["stage"],
            buckets=_BUCKETS_S, namespace="kvshuttle_router", registry=self._collectors,
        )  # fmt: skip
        return {(stage,): histogram.labels(stage.value) for stage in Stage}

    def _watch(self, registry: Registry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, ["engine"], namespace="kvshuttle_router", registry=self._collectors)

        requests, tokens = gauge("outstanding_requests", "Sent, unanswered"), gauge("outstanding_tokens", "Estimated")
        up, pairs = (
            gauge("engine_up", "1 when its HTTP server answers"),
            gauge("engine_pairs", "Engines it can pair with"),
        )
        for engine in registry.engines.values():
            requests.labels(engine.name).set_function(partial(getattr, engine, "outstanding_requests"))
            tokens.labels(engine.name).set_function(partial(getattr, engine, "outstanding_tokens"))
            up.labels(engine.name).set_function(partial(getattr, engine, "is_up"))
            pairs.labels(engine.name).set_function(partial(_num_peers, engine))


def _num_peers(engine: Engine) -> float:
    return len(engine.peers)


def _label(value: StrEnum) -> str:
    return value.name.lower() if isinstance(value, Endpoint) else value.value
