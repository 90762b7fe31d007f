"""What an engine answers on its side channel: who it is, how it is, and loans of what it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvshuttle.clock import now_s
from kvshuttle.handoff.messages import (
    PROTOCOL_VERSION,
    Acquire,
    Hello,
    HelloAck,
    Message,
    Proceed,
    Refused,
    Register,
    Release,
    Renew,
    Status,
    StatusReport,
    Withdraw,
)

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from kvshuttle.connector.holder import Holder
    from kvshuttle.connector.pusher import Pusher
    from kvshuttle.connector.stats import ShuttleStats
    from kvshuttle.handoff.cards import EngineCard


class Load(NamedTuple):
    """How much of an engine is in use, as its scheduler half sees it."""

    num_running: int
    num_waiting: int
    num_loading: int
    num_slots: int
    num_blocks: int
    num_free_blocks: int


class SideChannelService:
    """Answers peers and routers. ``answer`` runs in the side channel's thread."""

    def __init__(
        self, card: EngineCard, holder: Holder, pusher: Pusher, *, lock: threading.RLock, load: Callable[[], Load]
    ) -> None:
        self._card = card
        self._pusher = pusher
        self._holder = holder
        self._ledger = holder.ledger
        self._lock = lock
        self._load = load
        self._counted: dict[tuple[str, str], int] = {}

    def answer(self, message: Message) -> Message | None:
        """The reply to one request; unknown requests are refused."""
        if isinstance(message, Hello):
            if message.protocol_version != PROTOCOL_VERSION:
                return Refused(reason=f"protocol version {message.protocol_version} != {PROTOCOL_VERSION}")
            return HelloAck(card=self._card)
        with self._lock:
            return self._answer_locked(message)

    def _answer_locked(self, message: Message) -> Message:
        match message:
            case Acquire():
                return self._ledger.acquire(message, now_s=now_s())
            case Renew():
                return self._ledger.renew(message, now_s=now_s())
            case Release():
                if message.drop:
                    self._pusher.release(message.handles)
                return self._ledger.release(message, now_s=now_s())
            case Register() | Proceed() | Withdraw():
                return self._pusher.answer(message)
            case Status():
                return self._status()
        return Refused(reason=f"an engine does not answer {type(message).__name__}")

    def count_changes(self, stats: ShuttleStats) -> None:
        """Add what the ledger counted since the last call to ``stats``."""
        counters = self._ledger.counters
        totals = {
            ("holdings", "granted"): counters.granted,
            ("holdings", "fenced"): counters.kept,
            ("holdings", "refused_full"): counters.refused_full,
            ("holdings", "released"): counters.holding_dropped,
            ("holdings", "expired"): counters.holding_expired,
            ("leases", "acquired"): counters.acquired,
            ("leases", "renewed"): counters.renewed,
            ("leases", "released"): counters.released,
            ("leases", "expired"): counters.lease_expired,
            **{("leases", f"denied_{reason}"): count for reason, count in counters.denied.items()},
        }
        for (name, outcome), total in totals.items():
            change = total - self._counted.get((name, outcome), 0)
            if change:
                stats.count(name, outcome, by=change)
                self._counted[name, outcome] = total

    def _status(self) -> StatusReport:
        # An idle engine runs no hook, so what has ended by now would still look held.
        self._holder.expire(now_s())
        load = self._load()
        return StatusReport(
            engine_id=self._card.engine_id,
            incarnation=self._card.incarnation,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_blocks=load.num_blocks,
            num_free_blocks=load.num_free_blocks + self._holder.num_returnable_blocks(),
            num_held_blocks=self._ledger.num_held_blocks,
            num_holdings=self._ledger.num_holdings,
            num_leases=self._ledger.num_leases,
            num_loading=load.num_loading,
            num_slots=load.num_slots,
        )
