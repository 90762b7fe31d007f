"""The reading side in the scheduler half: drives one ``Fetch`` for each decode leg.

The machine decides; this file sends what it wants sent, and turns vLLM's hooks and the peers' answers into facts.
Every method takes the half's lock or is called under it; answers arrive in the side channel's thread.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.clock import now_s
from kvshuttle.connector.step_metadata import ReadOrder, StepMetadata
from kvshuttle.errors import KvshuttleError, TransportError
from kvshuttle.handoff.block_plan import BlockPlan, BlockRun, ReadReason
from kvshuttle.handoff.fetch import Fetch
from kvshuttle.handoff.fetch_protocol import (
    AcquireAnswered,
    Action,
    Fact,
    FailLoad,
    FetchLimits,
    LoadAdmitted,
    NothingToRead,
    Outcome,
    PeerFailed,
    ReadEnded,
    RenewAnswered,
    RequestEnded,
    SendAcquire,
    SendRelease,
    SendRenew,
    StartRead,
)
from kvshuttle.handoff.messages import (
    PROTOCOL_VERSION,
    Acquired,
    Denied,
    DenyReason,
    EngineCard,
    Hello,
    HelloAck,
    Message,
    Renewed,
)
from kvshuttle.ids import Handle

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from kvshuttle.blocks import TokenChain
    from kvshuttle.config import ConnectorConfig
    from kvshuttle.connector.stats import ShuttleStats
    from kvshuttle.handoff.params import DecodeLeg
    from kvshuttle.transport.endpoint import Endpoint, OnReply
    from kvshuttle.transport.side_channel import SideChannelThread

logger = logging.getLogger(__name__)

_RELEASE_TIMEOUT_S = 2.0
_SERVED = {Outcome.READ_OK, Outcome.FULL_LOCAL_HIT, Outcome.LOCAL_COVERS_VERIFIED, Outcome.BELOW_THRESHOLD}
"""Outcomes that are as planned; every other one means that the prompt is recomputed, which is worth a line."""


@dataclass(slots=True)
class _Reading:
    """One decode leg under way. ``num_local_tokens`` and ``offer_reason`` are the last question's."""

    request_id: str
    fetch: Fetch
    num_local_tokens: int = 0
    offer_reason: ReadReason | None = None
    num_external_tokens: int = 0
    destination: tuple[int, ...] = ()
    is_awaiting_workers: bool = False
    is_counted: bool = False
    is_request_over: bool = False
    failure: str = ""


class Reader:
    """All fetches of one engine. ``lock`` is the scheduler half's."""

    def __init__(
        self,
        config: ConnectorConfig,
        *,
        card: EngineCard,
        side: SideChannelThread[Message],
        stats: ShuttleStats,
        lock: threading.RLock,
        host_id: str,
    ) -> None:
        self._card = card
        self._side = side
        self._stats = stats
        self._lock = lock
        self._host_id = host_id
        self._limits = FetchLimits(
            acquire_timeout_s=config.acquire_timeout_s,
            lease_s=config.lease_s,
            read_timeout_s=config.read_timeout_s,
            submit_margin_s=config.submit_margin_s,
            total_wait_s=config.total_wait_s,
            recompute_threshold_tokens=config.recompute_threshold_tokens,
        )
        self._readings: dict[str, _Reading] = {}
        self._peers: dict[str, EngineCard] = {}
        self._step = StepMetadata()

    # -- what the hooks call, under the lock ------------------------------------------------------

    def begin(self, request_id: str, leg: DecodeLeg, chain: TokenChain) -> None:
        """A decode leg arrived: ask its source at once, so that the answer is here when the engine asks."""
        fetch = Fetch(
            handle=Handle(leg.transfer_id),
            source=leg.source,
            wanted=chain,
            fingerprint=self._card.fingerprint,
            reader=self._card.engine_id,
            limits=self._limits,
            now_s=now_s(),
        )
        reading = _Reading(request_id, fetch)
        self._readings[request_id] = reading
        self._do(reading, fetch.start(now_s()))

    def offer(self, request_id: str, num_local_tokens: int) -> int | None:
        """Tokens that can be loaded behind the local prefix; None to be asked again. Changes nothing that matters."""
        reading = self._readings.get(request_id)
        if reading is None:
            return 0
        offer = reading.fetch.offer(num_local_tokens)
        reading.num_local_tokens = num_local_tokens
        reading.offer_reason = offer.reason
        return offer.num_tokens

    def admit(self, request_id: str, num_external_tokens: int, block_ids: tuple[int, ...]) -> None:
        """vLLM took the offer and allocated the request's whole block table: order the read."""
        reading = self._readings[request_id]
        reading.num_external_tokens = num_external_tokens
        reading.destination = block_ids
        reading.is_awaiting_workers = True
        self._tell(reading, LoadAdmitted(reading.num_local_tokens, num_external_tokens, block_ids))

    def decline(self, request_id: str) -> None:
        """vLLM admitted the request without a load, for the first or the n-th time."""
        reading = self._readings.get(request_id)
        if reading is None or reading.is_awaiting_workers or reading.fetch.is_drained:
            return
        self._stats.count("local_hit_tokens", by=reading.num_local_tokens)
        self._tell(reading, NothingToRead(reading.offer_reason))

    def settle(self, request_id: str) -> bool:
        """All workers are done with a request's read. False: none was expected, vLLM must not see the id."""
        reading = self._readings.get(request_id)
        if reading is None or not reading.is_awaiting_workers:
            return False
        reading.is_awaiting_workers = False
        is_ok = not reading.failure
        if is_ok:
            self._stats.count("transfer_tokens", "read", by=reading.num_external_tokens)
            self._stats.count("local_hit_tokens", by=reading.num_local_tokens)
        if not reading.fetch.is_drained:
            self._tell(reading, ReadEnded(is_ok, reading.failure))
        self._forget_if_over(reading)
        return True

    def note_failures(self, failed: dict[str, str]) -> None:
        """Some ranks' reads failed; the request's end is judged by it once all ranks are done."""
        for request_id, reason in failed.items():
            reading = self._readings.get(request_id)
            if reading is not None:
                reading.failure = reason

    def destination(self, request_id: str) -> tuple[int, ...]:
        """Blocks that a read of this request may write to."""
        reading = self._readings.get(request_id)
        if reading is None or not reading.destination:
            return ()
        block_size_tokens = self._card.fingerprint.block_size_tokens
        first = reading.num_local_tokens // block_size_tokens
        end = -(-(reading.num_local_tokens + reading.num_external_tokens) // block_size_tokens)
        return reading.destination[first:end]

    def end(self, request_id: str) -> None:
        """The request finished or was aborted."""
        reading = self._readings.get(request_id)
        if reading is None:
            return
        self._tell(reading, RequestEnded())
        self._forget_if_over(reading, is_request_over=True)

    def take_step(self) -> StepMetadata:
        """Orders collected since the last step."""
        step, self._step = self._step, StepMetadata()
        return step

    # -- what the side channel's thread calls -----------------------------------------------------

    def tick(self, now: float) -> float | None:
        """Let deadlines pass; the next one, or None."""
        next_at_s: float | None = None
        for reading in list(self._readings.values()):
            deadline_at_s = reading.fetch.next_deadline_at_s()
            if deadline_at_s is not None and deadline_at_s <= now:
                self._do(reading, reading.fetch.tick(now))
                deadline_at_s = reading.fetch.next_deadline_at_s()
            if deadline_at_s is not None:
                next_at_s = deadline_at_s if next_at_s is None else min(next_at_s, deadline_at_s)
        return next_at_s

    # -- doing ------------------------------------------------------------------------------------

    def _tell(self, reading: _Reading, fact: Fact) -> None:
        self._do(reading, reading.fetch.on(fact, now_s=now_s()))

    def _do(self, reading: _Reading, actions: tuple[Action, ...]) -> None:
        for action in actions:
            match action:
                case SendAcquire():
                    self._send(lambda side, a=action: self._acquire(side, reading, a))
                case SendRenew():
                    on_reply = functools.partial(self._on_renewed, reading, action.ordinal)
                    self._request(reading, action.message, action.timeout_s, on_reply)
                case SendRelease():
                    self._request(reading, action.message, _RELEASE_TIMEOUT_S, lambda _reply: None)
                case StartRead():
                    self._order(reading, action.plan, action.budget_s)
                case FailLoad():
                    # An order without time is reported as failed by the workers, which is vLLM's only way in.
                    reading.failure = str(action.outcome)
                    self._order(reading, _unread_plan(self.destination(reading.request_id)), 0.0)
        self._count_outcome(reading)

    def _order(self, reading: _Reading, plan: BlockPlan, budget_s: float) -> None:
        self._step.reads.append(
            ReadOrder(
                request_id=reading.request_id,
                incarnation=reading.fetch.source.incarnation,
                plan=plan,
                budget_s=budget_s,
                issued_at_s=now_s(),
                host=self._host_id,
            )
        )

    def _count_outcome(self, reading: _Reading) -> None:
        outcome = reading.fetch.outcome
        if outcome is None or reading.is_counted:
            return
        reading.is_counted = True
        self._stats.count("transfers", "read", str(outcome))
        if outcome not in _SERVED and outcome is not Outcome.ABORTED:
            logger.warning("kvshuttle: %s is recomputed: %s %s", reading.request_id, outcome, reading.fetch.detail)

    def _forget_if_over(self, reading: _Reading, *, is_request_over: bool = False) -> None:
        # A request that is still alive keeps its entry, so that a preemption does not fetch again.
        if is_request_over:
            reading.is_request_over = True
        if reading.is_request_over and not reading.is_awaiting_workers:
            self._readings.pop(reading.request_id, None)

    def _send(self, function: Callable[[Endpoint[Message]], None]) -> None:
        try:
            self._side.submit(function)
        except TransportError as error:
            # Stopping, or far behind: the machine's own deadlines end what waits for this.
            logger.warning("kvshuttle: not sent: %s", error)

    def _request(self, reading: _Reading, message: Message, timeout_s: float, on_reply: OnReply[Message]) -> None:
        address = reading.fetch.source.address
        self._send(lambda side: side.request(address, message, timeout_s=timeout_s, on_reply=on_reply))

    def _acquire(self, side: Endpoint[Message], reading: _Reading, action: SendAcquire) -> None:
        source = reading.fetch.source
        started_at_s = now_s()
        with self._lock:
            known = self._peers.get(source.address)
        if known is not None and known.incarnation == source.incarnation:
            on_reply = functools.partial(self._on_acquire_reply, reading, started_at_s)
            side.request(source.address, action.message, timeout_s=action.timeout_s, on_reply=on_reply)
            return
        hello = Hello(protocol_version=PROTOCOL_VERSION, sender=self._card.engine_id)
        side.request(
            source.address,
            hello,
            timeout_s=action.timeout_s,
            on_reply=lambda reply: self._on_hello_reply(side, reading, action, reply),
        )

    def _on_hello_reply(
        self, side: Endpoint[Message], reading: _Reading, action: SendAcquire, reply: Message | KvshuttleError
    ) -> None:
        if not isinstance(reply, HelloAck):
            self._fact(reading, PeerFailed(f"hello: {reply}"))
            return
        denied = self._check_card(reply.card, reading.fetch.source.incarnation)
        if denied is not None:
            self._fact(reading, AcquireAnswered(denied))
            return
        with self._lock:
            self._meet(reading.fetch.source.address, reply.card)
            # The reading side may have given up while the hello was on its way.
            is_wanted = not reading.fetch.is_drained
        if is_wanted:
            self._acquire(side, reading, action)

    def _check_card(self, card: EngineCard, wanted_incarnation: str) -> Denied | None:
        if card.incarnation != wanted_incarnation:
            return Denied(DenyReason.OTHER_INCARNATION, f"{card.engine_id} is {card.incarnation} by now")
        differences = self._card.fingerprint.differences(card.fingerprint)
        if card.protocol_version != PROTOCOL_VERSION:
            differences.insert(0, f"protocol_version: {PROTOCOL_VERSION} != {card.protocol_version}")
        if differences:
            return Denied(DenyReason.INCOMPATIBLE, "; ".join(differences))
        return None

    def _meet(self, address: str, card: EngineCard) -> None:
        before = self._peers.get(address)
        if before is not None and before.incarnation != card.incarnation:
            self._step.gone.append(before.incarnation)
        if before is None or before.incarnation != card.incarnation:
            self._step.peers[card.incarnation] = card.workers
        self._peers[address] = card

    def _on_acquire_reply(self, reading: _Reading, started_at_s: float, reply: Message | KvshuttleError) -> None:
        with self._lock:
            self._stats.observe("acquire_seconds", value=now_s() - started_at_s)
        if isinstance(reply, Acquired | Denied):
            self._fact(reading, AcquireAnswered(reply))
        else:
            self._fact(reading, PeerFailed(f"acquire: {reply}"))

    def _on_renewed(self, reading: _Reading, ordinal: int, reply: Message | KvshuttleError) -> None:
        if isinstance(reply, Renewed):
            self._fact(reading, RenewAnswered(ordinal, reply))
        else:
            self._fact(reading, PeerFailed(f"renew: {reply}"))

    def _fact(self, reading: _Reading, fact: Fact) -> None:
        with self._lock:
            self._tell(reading, fact)


def _unread_plan(destination: tuple[int, ...]) -> BlockPlan:
    runs = tuple(BlockRun(source_first=0, destination_first=block_id, num_blocks=1) for block_id in destination)
    return BlockPlan(first_index=0, num_blocks=len(runs), runs=runs)
