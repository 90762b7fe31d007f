"""What the router knows of its engines: who they are, how they are, and who can work with whom.

An engine is *up* when its HTTP server answers, and *paired* when its side channel has told its card as well. Only
engines that are up and whose fingerprints agree form pairs. All state is changed on the event loop, by ``Prober``
and by the requests that fail or succeed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import TYPE_CHECKING

from kvshuttle.config import EngineRole
from kvshuttle.handoff.params import Peer
from kvshuttle.policy import EngineView
from kvshuttle.router.exchange import Exchange, FailureReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvshuttle.config import EngineSpec, RouterConfig
    from kvshuttle.handoff.cards import EngineCard
    from kvshuttle.handoff.messages import StatusReport
    from kvshuttle.router.engine_client import EnginePool

logger = logging.getLogger(__name__)

_MAX_QUARANTINE_DOUBLINGS = 4
_NOT_PROBED = "not probed yet"
_GIVEN = itertools.count(1)
"""Numbers of the requests that engines are given; by them the longest ago is told."""


class Engine:
    """One engine: static spec, learned identity, health, and the router's own load on it."""

    def __init__(self, spec: EngineSpec, pool: EnginePool) -> None:
        self.spec = spec
        self.pool = pool
        self.name = spec.name
        self.card: EngineCard | None = None
        self.report: StatusReport | None = None
        self.models: frozenset[str] | None = None
        self.is_up = False
        self.why_down = _NOT_PROBED
        self.why_silent = ""
        self.peers: frozenset[str] = frozenset()
        self.outstanding_requests = 0
        self.outstanding_tokens = 0
        self.given_at = 0
        self.http_kick = asyncio.Event()
        self.side_kick = asyncio.Event()
        self._exchanges: set[Exchange] = set()
        self._num_failures = 0
        self._quarantined_until_s = 0.0
        self._view: EngineView | None = None

    def __repr__(self) -> str:
        state = "up" if self.is_up else "down"
        life = self.card.incarnation if self.card else "unknown"
        return f"<Engine {self.name} {state} incarnation={life} outstanding={self.outstanding_requests}>"

    def view(self, now_s: float) -> EngineView:
        """A frozen snapshot for placement."""
        is_quarantined = now_s < self._quarantined_until_s
        if self._view is None or self._view.is_quarantined != is_quarantined:
            self._view = self._snapshot(is_quarantined)
        return self._view

    def begin(self, exchange: Exchange) -> None:
        """An exchange is running; it fails when the engine is found dead."""
        self._exchanges.add(exchange)

    def end(self, exchange: Exchange) -> None:
        """It is over."""
        self._exchanges.discard(exchange)

    def add_load(self, num_requests: int, num_tokens: int) -> None:
        """Count what was dispatched (or, negative, answered)."""
        self.outstanding_requests += num_requests
        self.outstanding_tokens += num_tokens
        if num_requests > 0:
            self.given_at = next(_GIVEN)
        self._view = None

    def changed(self) -> None:
        """Something that the view shows has changed."""
        self._view = None

    def quarantine(self, now_s: float, quarantine_s: float) -> None:
        """Avoid the engine for a while that doubles with each failure in a row."""
        doublings = min(self._num_failures, _MAX_QUARANTINE_DOUBLINGS)
        self._quarantined_until_s = now_s + quarantine_s * 2**doublings
        self._num_failures += 1

    def absolve(self) -> None:
        """It served a request: failures before are forgotten."""
        if self._num_failures:
            self._num_failures = 0
            self._quarantined_until_s = 0.0

    def fail_exchanges(self) -> None:
        """The engine is dead: whoever waits for it should not."""
        for exchange in list(self._exchanges):
            exchange.fail(FailureReason.ENGINE_DOWN, f"{self.name} stopped answering")

    def _snapshot(self, is_quarantined: bool) -> EngineView:  # noqa: FBT001 - the one private caller names it
        report, card = self.report, self.card
        return EngineView(
            name=self.name,
            is_up=self.is_up,
            is_quarantined=is_quarantined,
            outstanding_requests=self.outstanding_requests,
            outstanding_tokens=self.outstanding_tokens,
            given_at=self.given_at,
            reported_requests=report.num_running + report.num_waiting if report else 0,
            num_queued=max(report.num_waiting - report.num_loading, 0) if report else 0,
            num_slots=report.num_slots if report else 0,
            num_blocks=report.num_blocks if report else 0,
            num_free_blocks=report.num_free_blocks if report else 0,
            block_size_tokens=card.fingerprint.block_size_tokens if card else 0,
            models=self.models,
            peers=self.peers,
        )


class Registry:
    """All engines and the pairs they form."""

    def __init__(self, config: RouterConfig, engines: Iterable[Engine], now_s: Callable[[], float]) -> None:
        self.engines = {engine.name: engine for engine in engines}
        self.prefills = [engine for engine in self.engines.values() if engine.spec.role is EngineRole.PREFILL]
        self.decodes = [engine for engine in self.engines.values() if engine.spec.role is EngineRole.DECODE]
        self._config = config
        self._now_s = now_s
        self._differences: dict[tuple[str, str], list[str]] = {}
        self._served_models: frozenset[str] | None = None
        # Once for each verdict, not at every restart of an engine.
        self._logged: dict[tuple[str, str], list[str]] = {}

    def __repr__(self) -> str:
        return f"<Registry prefills={self.prefills} decodes={self.decodes}>"

    def prefill_views(self) -> list[EngineView]:
        """Snapshots of the prefill engines."""
        now_s = self._now_s()
        return [engine.view(now_s) for engine in self.prefills]

    def decode_views(self) -> list[EngineView]:
        """Snapshots of the decode engines."""
        now_s = self._now_s()
        return [engine.view(now_s) for engine in self.decodes]

    def served_models(self) -> frozenset[str] | None:
        """Names that some decode engine serves; None when any engine's names are unknown."""
        return self._served_models

    def num_pairs(self) -> int:
        """Pairs that could serve a request now."""
        return sum(len(engine.peers) for engine in self.prefills if engine.is_up)

    def incompatible_pairs(self) -> dict[tuple[str, str], list[str]]:
        """Pairs that are never used, with the fields that differ."""
        return {pair: list(fields) for pair, fields in self._differences.items()}

    def report_failure(self, engine: Engine, reason: FailureReason) -> None:
        """A request failed on this engine: avoid it for a while, and look at it now."""
        engine.quarantine(self._now_s(), self._config.quarantine_s)
        if reason is FailureReason.CONNECT:
            self.set_up(engine, is_up=False, why="a connection was refused")
        if reason in (FailureReason.CONNECT, FailureReason.RESET):
            # Its other idle connections lead to the same dead process.
            engine.pool.close_idle()
        engine.http_kick.set()
        engine.side_kick.set()

    def set_up(self, engine: Engine, *, is_up: bool, why: str) -> None:
        """Record whether the engine's HTTP server answers. Going down forgets who it was."""
        is_first, is_change = engine.why_down == _NOT_PROBED, engine.is_up != is_up
        engine.why_down = "" if is_up else why
        if not (is_change or is_first):
            return
        engine.is_up = is_up
        logger.log(logging.INFO if is_up else logging.WARNING, "%s is %s: %s", engine.name, _up(is_up=is_up), why)
        if not is_change:
            return  # an engine that never came up has nothing to forget
        if not is_up:
            engine.card = engine.report = None
            engine.pool.close_idle()
        self._pair_up()

    def set_card(self, engine: Engine, card: EngineCard | None) -> None:
        """Record who the engine is; a new incarnation is a new peer."""
        if card is not None and (engine.card is None or engine.card.incarnation != card.incarnation):
            logger.info("%s is engine %s, incarnation %s", engine.name, card.engine_id, card.incarnation)
            engine.models = None
            engine.absolve()
        engine.card = card
        self._pair_up()

    def set_report(self, engine: Engine, report: StatusReport) -> None:
        """Record its load."""
        engine.report = report
        engine.changed()

    def set_models(self, engine: Engine, models: frozenset[str] | None) -> None:
        """Record the model names it serves."""
        if engine.models == models:
            return
        engine.models = models
        engine.changed()
        self._gather_models()
        for prefill in self.prefills:
            for decode in self.decodes:
                if prefill.models and decode.models and (lacking := decode.models - prefill.models):
                    names = ", ".join(sorted(lacking))
                    logger.warning("%s lacks models that %s serves: %s", prefill.name, decode.name, names)

    def _pair_up(self) -> None:
        differences = {}
        peers: dict[str, set[str]] = {name: set() for name in self.engines}
        for prefill in self.prefills:
            for decode in self.decodes:
                if prefill.card is None or decode.card is None:
                    continue
                fields = prefill.card.fingerprint.differences(decode.card.fingerprint)
                if fields:
                    differences[prefill.name, decode.name] = fields
                elif prefill.is_up and decode.is_up:
                    peers[prefill.name].add(decode.name)
                    peers[decode.name].add(prefill.name)
        for pair, fields in differences.items():
            if self._logged.get(pair) != fields:
                self._logged[pair] = fields
                logger.error("%s and %s cannot exchange KV and will not be paired: %s", *pair, "; ".join(fields))
        self._differences = differences
        for engine in self.engines.values():
            engine.peers = frozenset(peers[engine.name])
            engine.changed()
        self._gather_models()

    def _gather_models(self) -> None:
        known = [engine.models for engine in self.decodes if engine.is_up]
        is_known = bool(known) and None not in known
        self._served_models = frozenset().union(*(models for models in known if models)) if is_known else None


def peer_of(engine: Engine) -> Peer:
    """An engine as the other one finds it."""
    card = engine.card
    assert card is not None, "only engines with a card have peers"
    return Peer(engine.spec.side_address, card.engine_id, card.incarnation)


def _up(*, is_up: bool) -> str:
    return "up" if is_up else "down"
