"""The reading side in the scheduler half: drives one ``Fetch`` for each decode leg.

The machine decides; this file sends what it wants sent, and turns vLLM's hooks and the peers' answers into facts.
Every method takes the half's lock or is called under it; answers arrive in the side channel's thread.

Three tables, each with its own end of life. A *reading* lives as long as its request, so that a preempted request
is not fetched again. It is *unsettled* until its fetch is drained, which may be after the request. A *load* lives from
vLLM's admission until every worker has reported, which is exactly when vLLM may hear of it.
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.blocks import num_blocks_for
from kvshuttle.clock import now_s
from kvshuttle.connector.peers import Peers
from kvshuttle.connector.step_metadata import FailedLoad, ReadOrder, StepMetadata
from kvshuttle.errors import KvshuttleError, TransportError
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
from kvshuttle.handoff.messages import PROTOCOL_VERSION, Acquired, Denied, Hello, HelloAck, Message, Renewed
from kvshuttle.ids import Handle

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from kvshuttle.blocks import TokenChain
    from kvshuttle.config import ConnectorConfig
    from kvshuttle.connector.stats import ShuttleStats
    from kvshuttle.handoff.block_plan import ReadReason
    from kvshuttle.handoff.cards import EngineCard
    from kvshuttle.handoff.params import DecodeLeg
    from kvshuttle.transport.endpoint import Endpoint, OnReply
    from kvshuttle.transport.side_channel import SideChannelThread

logger = logging.getLogger(__name__)

_RELEASE_TIMEOUT_S = 2.0
_LATE_ANSWER_S = 5.0
"""An answer that comes so much after the acquire timed out is still taken in, to give back the lease in it."""
_SERVED = {Outcome.READ_OK, Outcome.FULL_LOCAL_HIT, Outcome.LOCAL_COVERS_VERIFIED, Outcome.BELOW_THRESHOLD}
"""Outcomes that are as planned; every other one means that the prompt is recomputed, which is worth a line."""


@dataclass(frozen=True, slots=True)
class EngineClock:
    """``host_id``: names the monotonic clock of the scheduler half. ``is_shared``: its workers live by it too."""

    host_id: str
    is_shared: bool


@dataclass(slots=True, eq=False)
class _Reading:
    """One decode leg. ``num_local_tokens`` and ``offer_reason`` are those of the engine's last question."""

    request_id: str
    fetch: Fetch
    num_local_tokens: int = 0
    offer_reason: ReadReason | None = None
    is_counted: bool = False
    is_request_over: bool = False
    is_broken: bool = False
    """The machine and vLLM disagree, which is a bug: nothing is offered any more."""


@dataclass(slots=True, eq=False)
class _Load:
    """What vLLM waits for. ``destination``: blocks that the read may write to. ``failure``: a rank's, or ""."""

    reading: _Reading
    num_tokens: int
    destination: tuple[int, ...]
    read_ends_at_s: float = -math.inf
    failure: str = ""


class Reader:
    """All fetches of one engine. ``lock`` is the scheduler half's."""

    def __init__(
        self,
        config: ConnectorConfig,
        *,
        card: EngineCard,
        clock: EngineClock,
        side: SideChannelThread[Message],
        stats: ShuttleStats,
        lock: threading.RLock,
    ) -> None:
        self._card = card
        self._clock = clock
        self._side = side
        self._stats = stats
        self._lock = lock
        self._limits = FetchLimits(
            acquire_timeout_s=config.acquire_timeout_s,
            lease_s=config.lease_s,
            read_timeout_s=config.read_timeout_s,
            submit_margin_s=config.submit_margin_s,
            total_wait_s=config.total_wait_s,
            recompute_threshold_tokens=config.recompute_threshold_tokens,
        )
        self._readings: dict[str, _Reading] = {}
        self._unsettled: dict[str, _Reading] = {}
        self._loads: dict[str, _Load] = {}
        self._peers = Peers(card)
        self._step = StepMetadata()

    def __repr__(self) -> str:
        return (
            f"<Reader readings={len(self._readings)} unsettled={len(self._unsettled)} loads={len(self._loads)}"
            f" peers={len(self._peers)}>"
        )

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
        reading = self._readings[request_id] = self._unsettled[request_id] = _Reading(request_id, fetch)
        self._do(reading, fetch.start(now_s()))

    def offer(self, request_id: str, num_local_tokens: int) -> int | None:
        """Tokens that can be loaded behind the local prefix; None to be asked again. Changes nothing that matters."""
        reading = self._readings.get(request_id)
        if reading is None or reading.is_broken:
            return 0
        # The request's deadline holds also when the side channel's thread is late.
        self._tick_one(reading, now_s())
        offer = reading.fetch.offer(num_local_tokens)
        reading.num_local_tokens = num_local_tokens
        reading.offer_reason = offer.reason
        return offer.num_tokens

    def admit(self, request_id: str, num_tokens: int, block_ids: tuple[int, ...]) -> None:
        """vLLM took the offer and allocated the request's whole block table: order the read.

        vLLM waits from here on, so whatever goes wrong becomes a failed load.
        """
        reading = self._readings[request_id]
        block_size_tokens = self._card.fingerprint.block_size_tokens
        end = num_blocks_for(reading.num_local_tokens + num_tokens, block_size_tokens)
        destination = block_ids[reading.num_local_tokens // block_size_tokens : end]
        load = self._loads[request_id] = _Load(reading, num_tokens, destination)
        if not self._try_tell(reading, LoadAdmitted(reading.num_local_tokens, num_tokens, block_ids), at_s=now_s()):
            self._fail(load, "internal_error")

    def decline(self, request_id: str) -> None:
        """vLLM admitted the request without a load, for the first or the n-th time."""
        reading = self._readings.get(request_id)
        if reading is None or request_id in self._loads or reading.fetch.outcome is not None:
            return
        self._stats.count("local_hit_tokens", by=reading.num_local_tokens)
        self._tell(reading, NothingToRead(reading.offer_reason))

    def is_loading(self, request_id: str) -> bool:
        """Whether vLLM waits for this request's load."""
        return request_id in self._loads

    def has_failed(self, request_id: str) -> bool:
        """Whether a worker reported this load as failed."""
        load = self._loads.get(request_id)
        return load is not None and bool(load.failure)

    def note_failures(self, failed: dict[str, str]) -> None:
        """Some ranks' reads failed; the load's end is judged by it once all ranks are done."""
        for request_id, reason in failed.items():
            load = self._loads.get(request_id)
            if load is None:
                continue
            load.failure = load.failure or reason
            if reason == "peer_unknown":
                self._peers.forget(load.reading.fetch.source.incarnation, self._step)

    def destination(self, request_id: str) -> tuple[int, ...]:
        """Blocks that a read of this request may write to."""
        load = self._loads.get(request_id)
        return load.destination if load is not None else ()

    def settle(self, request_id: str) -> bool:
        """All workers are done with a load. False: vLLM must not see it, or not yet.

        A good read may still be unfit for use, when the lease turns out to be lost. vLLM took its failures in before
        this, so the request waits one more step for the workers to report one.
        """
        load = self._loads.pop(request_id, None)
        if load is None:
            return False
        reading, is_ok = load.reading, not load.failure
        if not reading.fetch.is_drained:
            # Workers call a read good only when they saw it complete within its budget, by the same clock; hence the
            # time that passed until this step, which may be long, says nothing.
            judged_at_s = min(now_s(), load.read_ends_at_s) if self._clock.is_shared else now_s()
            self._try_tell(reading, ReadEnded(is_ok, load.failure), at_s=judged_at_s)
        outcome = reading.fetch.outcome
        if is_ok and outcome is Outcome.READ_OK:
            self._stats.count("transfer_tokens", "read", by=load.num_tokens)
            self._stats.count("local_hit_tokens", by=reading.num_local_tokens)
        elif is_ok and not reading.is_request_over:
            self._loads[request_id] = load
            self._fail(load, str(outcome))
            return False
        return True

    def end(self, request_id: str) -> None:
        """The request finished or was aborted."""
        reading = self._readings.pop(request_id, None)
        if reading is not None:
            reading.is_request_over = True
            self._tell(reading, RequestEnded())

    def take_step(self) -> StepMetadata:
        """Orders collected since the last step."""
        step, self._step = self._step, StepMetadata()
        return step

    # -- what the side channel's thread calls -----------------------------------------------------

    def tick(self, now: float) -> float | None:
        """Let deadlines pass; the next one, or None."""
        next_at_s: float | None = None
        for reading in tuple(self._unsettled.values()):
            deadline_at_s = self._tick_one(reading, now)
            if deadline_at_s is not None:
                next_at_s = deadline_at_s if next_at_s is None else min(next_at_s, deadline_at_s)
        return next_at_s

    # -- doing ------------------------------------------------------------------------------------

    def _tick_one(self, reading: _Reading, now: float) -> float | None:
        deadline_at_s = reading.fetch.next_deadline_at_s()
        if deadline_at_s is None or deadline_at_s > now:
            return deadline_at_s
        self._do(reading, reading.fetch.tick(now))
        return reading.fetch.next_deadline_at_s()

    def _try_tell(self, reading: _Reading, fact: Fact, *, at_s: float) -> bool:
        try:
            self._do(reading, reading.fetch.on(fact, now_s=at_s))
        except Exception:
            logger.exception("kvshuttle: %s: %r was not expected by %r", reading.request_id, fact, reading.fetch)
            self._stats.count("internal_errors", type(fact).__name__)
            reading.is_broken = True
        return not reading.is_broken

    def _tell(self, reading: _Reading, fact: Fact) -> None:
        self._do(reading, reading.fetch.on(fact, now_s=now_s()))

    def _do(self, reading: _Reading, actions: tuple[Action, ...]) -> None:
        for action in actions:
            match action:
                case SendAcquire():
                    self._send(functools.partial(self._acquire, reading=reading, action=action))
                case SendRenew():
                    on_reply = functools.partial(self._on_renewed, reading, action.ordinal)
                    self._request(reading, action.message, action.timeout_s, on_reply)
                case SendRelease():
                    self._request(reading, action.message, _RELEASE_TIMEOUT_S, lambda _reply: None)
                case StartRead():
                    self._order(reading, action)
                case FailLoad():
                    self._fail(self._loads[reading.request_id], str(action.outcome))
        self._count_outcome(reading)
        if reading.fetch.is_drained:
            self._unsettled.pop(reading.request_id, None)

    def _order(self, reading: _Reading, action: StartRead) -> None:
        issued_at_s = now_s()
        self._loads[reading.request_id].read_ends_at_s = issued_at_s + action.budget_s
        self._step.reads.append(
            ReadOrder(
                request_id=reading.request_id,
                incarnation=reading.fetch.source.incarnation,
                plan=action.plan,
                budget_s=action.budget_s,
                issued_at_s=issued_at_s,
                host=self._clock.host_id,
            )
        )

    def _fail(self, load: _Load, reason: str) -> None:
        load.failure = load.failure or reason
        self._step.failed_loads.append(FailedLoad(load.reading.request_id, reason, load.destination))

    def _count_outcome(self, reading: _Reading) -> None:
        outcome = reading.fetch.outcome
        if outcome is None or reading.is_counted:
            return
        reading.is_counted = True
        self._stats.count("transfers", "read", str(outcome))
        if outcome not in _SERVED and outcome is not Outcome.ABORTED:
            logger.warning("kvshuttle: %s is recomputed: %s %s", reading.request_id, outcome, reading.fetch.detail)

    def _send(self, function: Callable[[Endpoint[Message]], None]) -> None:
        try:
            self._side.submit(function)
        except TransportError as error:
            # Stopping, or far behind: the machine's own deadlines end what waits for this.
            logger.warning("kvshuttle: not sent: %s", error)

    def _request(self, reading: _Reading, message: Message, timeout_s: float, on_reply: OnReply[Message]) -> None:
        address = reading.fetch.source.address
        self._send(lambda side: side.request(address, message, timeout_s=timeout_s, on_reply=on_reply))

    def _acquire(self, side: Endpoint[Message], *, reading: _Reading, action: SendAcquire) -> None:
        source = reading.fetch.source
        with self._lock:
            is_known = self._peers.is_known(source.address, source.incarnation, now_s=now_s())
        message: Message = action.message
        on_reply: OnReply[Message] = functools.partial(self._on_acquire_reply, reading, now_s())
        if not is_known:
            message = Hello(protocol_version=PROTOCOL_VERSION, sender=self._card.engine_id)
            on_reply = functools.partial(self._on_hello_reply, side, reading, action)
        side.request(source.address, message, timeout_s=action.timeout_s + _LATE_ANSWER_S, on_reply=on_reply)

    def _on_hello_reply(
        self, side: Endpoint[Message], reading: _Reading, action: SendAcquire, reply: Message | KvshuttleError
    ) -> None:
        if not isinstance(reply, HelloAck):
            self._fact(reading, PeerFailed(f"hello: {reply}"))
            return
        source = reading.fetch.source
        refusal = self._peers.refusal(reply.card, source.incarnation)
        if refusal is not None:
            self._fact(reading, AcquireAnswered(refusal))
            return
        with self._lock:
            in_use = {each.fetch.source.incarnation for each in self._unsettled.values()}
            self._peers.meet(source.address, reply.card, self._step, in_use=in_use, now_s=now_s())
            # The reading side may have given up while the hello was on its way.
            is_wanted = not reading.fetch.is_drained
        if is_wanted:
            self._acquire(side, reading=reading, action=action)

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
