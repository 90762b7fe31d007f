"""The reading side in the scheduler half: drives one ``Fetch`` or, for a push, one ``Intake`` for each decode leg.

The machine decides; this file orders what it wants from the workers, and turns vLLM's hooks into facts. What it wants
from holders is ``Asking``'s business. Every method is called under the half's lock.

Three tables, each with its own end of life. A *reading* lives as long as its request, so that a preempted request
is not fetched again. It is *unsettled* until its fetch is drained, which may be after the request. A *load* lives from
vLLM's admission until every worker has reported, which is exactly when vLLM may hear of it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from kvshuttle.blocks import num_blocks_for
from kvshuttle.clock import now_s
from kvshuttle.connector.asking import Asked, Asking
from kvshuttle.connector.load_orders import order, order_failure, order_push_failure
from kvshuttle.connector.outcomes import LOADED, tell_outcome
from kvshuttle.connector.readings import INTERNAL_ERROR, Load, Reading, direction_of
from kvshuttle.connector.step_metadata import StepMetadata
from kvshuttle.handoff.fetch import Fetch
from kvshuttle.handoff.fetch_protocol import (
    FetchLimits,
    LoadAdmitted,
    NothingToRead,
    Outcome,
    ReadEnded,
    RequestEnded,
)
from kvshuttle.handoff.intake import Intake
from kvshuttle.handoff.intake_protocol import (
    BlocksArrived,
    LiftQuarantine,
    PushLimits,
    Quarantine,
    SourceFailed,
)
from kvshuttle.handoff.params import DecodeLeg, History, Mode
from kvshuttle.ids import Handle, mint

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Container

    from kvshuttle.blocks import TokenChain
    from kvshuttle.config import ConnectorConfig
    from kvshuttle.connector.asking import Subject
    from kvshuttle.connector.holder import Holder
    from kvshuttle.connector.pace import Pace
    from kvshuttle.connector.readings import Actions, EngineClock
    from kvshuttle.connector.stats import ShuttleStats
    from kvshuttle.handoff.cards import EngineCard
    from kvshuttle.handoff.intake_protocol import IntakeFact
    from kvshuttle.handoff.messages import Message
    from kvshuttle.transport.side_channel import SideChannelThread

logger = logging.getLogger(__name__)


class Reader:
    """All fetches of one engine. ``lock`` is the scheduler half's."""

    def __init__(
        self,
        config: ConnectorConfig,
        *,
        card: EngineCard,
        clock: EngineClock,
        holder: Holder,
        side: SideChannelThread[Message],
        stats: ShuttleStats,
        lock: threading.RLock,
        pace: Pace,
    ) -> None:
        self._card = card
        self._pace = pace
        self._clock = clock
        self._holder = holder
        self._stats = stats
        self._limits = FetchLimits(
            acquire_timeout_s=config.acquire_timeout_s,
            lease_s=config.lease_s,
            read_timeout_s=config.read_timeout_s,
            submit_margin_s=config.submit_margin_s,
            total_wait_s=config.total_wait_s,
            recompute_threshold_tokens=config.recompute_threshold_tokens,
        )
        self._push_limits = PushLimits(
            fetch=self._limits,
            push_timeout_s=config.push_timeout_s,
            confirm_timeout_s=config.confirm_timeout_s,
        )
        self._readings: dict[str, Reading] = {}
        self._unsettled: dict[str, Reading] = {}
        self._loads: dict[str, Load] = {}
        self.step = StepMetadata()
        self._asking = Asking(self, card=card, side=side, stats=stats, lock=lock)

    def __repr__(self) -> str:
        return (
            f"<Reader readings={len(self._readings)} unsettled={len(self._unsettled)} loads={len(self._loads)}"
            f" peers={len(self._asking.peers)}>"
        )

    # -- what the hooks call, under the lock ------------------------------------------------------

    def begin(self, request_id: str, leg: DecodeLeg | History, chain: TokenChain | None) -> None:
        """A request arrived: ask its source at once, so that the answer is here when the engine asks.

        A push asks nobody: its blocks are reserved while the source still computes. ``chain``: the whole prompt's, None
        for one that is not made of tokens.
        """
        if chain is None:
            self._stats.count("transfers", direction_of(leg), "prompt_without_tokens")
            return
        reading = Reading(request_id, self._machine(leg, chain), direction_of(leg))
        self._readings[request_id] = self._unsettled[request_id] = reading
        fetch = reading.fetch
        if isinstance(fetch, Fetch):
            self._drive(reading, lambda: fetch.start(now_s()), "start")

    def _machine(self, leg: DecodeLeg | History, chain: TokenChain) -> Fetch | Intake:
        limits = self._limits
        if isinstance(leg, History):
            threshold_tokens = self._pace.threshold_tokens(leg.source.engine_id, now_s())
            limits = replace(limits, recompute_threshold_tokens=threshold_tokens)
        elif leg.mode is Mode.PUSH:
            return Intake(
                handle=Handle(leg.transfer_id),
                source=leg.source,
                wanted=chain,
                reader=self._card,
                registration_id=mint("reg"),
                limits=self._push_limits,
            )
        return Fetch(
            handle=Handle(leg.handle if isinstance(leg, History) else leg.transfer_id),
            source=leg.source,
            wanted=chain,
            fingerprint=self._card.fingerprint,
            reader=self._card.engine_id,
            limits=limits,
            now_s=now_s(),
            is_read_once=isinstance(leg, DecodeLeg),
        )

    def offer(self, request_id: str, num_local_tokens: int) -> int | None:
        """Tokens that can be loaded behind the local prefix; None to be asked again. Changes nothing that matters."""
        reading = self._readings.get(request_id)
        if reading is None:
            return 0
        # The request's deadline holds also when the side channel's thread is late.
        self._tick_one(reading, now_s())
        if reading.is_broken:
            return 0
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
        load = self._loads[request_id] = Load(reading, num_tokens, destination, now_s())
        if reading.is_broken:
            # By the side channel's thread, since the offer was made.
            order_failure(self.step, load, INTERNAL_ERROR)
        self._tell_at(reading, LoadAdmitted(reading.num_local_tokens, num_tokens, block_ids), now_s())

    def decline(self, request_id: str) -> None:
        """vLLM admitted the request without a load, for the first or the n-th time."""
        reading = self._readings.get(request_id)
        if reading is None or request_id in self._loads or reading.fetch.outcome is not None:
            return
        self.tell(reading, NothingToRead(reading.offer_reason))

    def is_loading(self, request_id: str) -> bool:
        """Whether vLLM waits for this request's load."""
        return request_id in self._loads

    @property
    def num_loading(self) -> int:
        """Requests whose loads vLLM waits for."""
        return len(self._loads)

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
                self._asking.peers.forget(load.reading.source.incarnation, self.step)

    def note_pushes(self, arriving: set[str], failed: dict[str, str]) -> None:
        """What the workers have heard from the holders' workers."""
        for request_id in arriving & self._loads.keys():
            self.tell(self._loads[request_id].reading, BlocksArrived())
        for request_id in failed.keys() & self._loads.keys():
            self.tell(self._loads[request_id].reading, SourceFailed(failed[request_id]))

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
        if not (reading.fetch.is_drained or reading.is_broken):
            # Workers call a read good only when they saw it complete within its budget, by the same clock; hence the
            # time that passed until this step, which may be long, says nothing.
            is_timed = self._clock.is_shared and load.is_read
            judged_at_s = min(now_s(), load.read_ends_at_s) if is_timed else now_s()
            if not self._tell_at(reading, ReadEnded(is_ok, load.failure), judged_at_s) and not is_ok:
                self._keep_out_of_use(load)
        if reading.is_broken:
            self._unsettled.pop(request_id, None)
            if is_ok and not load.is_read:
                # Every worker has its commit: the holder writes no more.
                self._holder.lift_soon(request_id)
        outcome = INTERNAL_ERROR if reading.is_broken else reading.fetch.outcome
        if is_ok and outcome in LOADED:
            self._note_loaded(reading, load, is_read=outcome is Outcome.READ_OK)
        elif is_ok and not reading.is_request_over:
            self._loads[request_id] = load
            order_failure(self.step, load, str(outcome))
            return False
        return True

    def end(self, request_id: str) -> None:
        """The request finished or was aborted."""
        reading = self._readings.pop(request_id, None)
        if reading is not None:
            reading.is_request_over = True
            self.tell(reading, RequestEnded())

    def take_step(self) -> StepMetadata:
        """Orders collected since the last step."""
        step, self.step = self.step, StepMetadata()
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

    def _note_loaded(self, reading: Reading, load: Load, *, is_read: bool) -> None:
        # A push that failed may have been read in the end.
        is_read_instead = is_read and reading.direction == "push"
        self._stats.count("transfer_tokens", "read" if is_read_instead else reading.direction, by=load.num_tokens)
        if is_read:
            now = now_s()
            self._pace.note_read(reading.source.engine_id, load.num_tokens, now - load.admitted_at_s, now)

    # -- doing ------------------------------------------------------------------------------------

    def _tick_one(self, reading: Reading, now: float) -> float | None:
        deadline_at_s = self._next_deadline_at_s(reading)
        if deadline_at_s is None or deadline_at_s > now:
            return deadline_at_s
        self._drive(reading, lambda: reading.fetch.tick(now), "tick")
        return self._next_deadline_at_s(reading)

    def _next_deadline_at_s(self, reading: Reading) -> float | None:
        if reading.is_broken:
            return None
        try:
            return reading.fetch.next_deadline_at_s()
        except Exception:  # noqa: BLE001 - logged there
            self._give_up_on(reading, "tick")
            return None

    def incarnations_in_use(self) -> Container[str]:
        """Peers that something is being got from."""
        return {each.source.incarnation for each in self._unsettled.values()}

    def tell(self, subject: Subject, fact: IntakeFact) -> None:
        """What happened to a reading."""
        assert isinstance(subject, Reading), subject
        self._tell_at(subject, fact, now_s())

    def _tell_at(self, reading: Reading, fact: IntakeFact, at_s: float) -> bool:
        return self._drive(reading, lambda: reading.on(fact, at_s), type(fact).__name__)

    def _drive(self, reading: Reading, move: Callable[[], Actions], name: str) -> bool:
        """Have a machine move, and do what it wants. One that raises is a bug: it is left alone from then on.

        Whatever calls this goes on, since it has other requests to look after. Returns whether the machine is well.
        """
        if reading.is_broken:
            return False
        try:
            self._do(reading, move())
        except Exception:  # noqa: BLE001 - logged there
            self._give_up_on(reading, name)
        return not reading.is_broken

    def _give_up_on(self, reading: Reading, name: str) -> None:
        """What vLLM waits for fails. What is lent ends by its lease, since nobody renews it. Called where it raised."""
        logger.exception("kvshuttle: %s: %r was not expected by %r", reading.request_id, name, reading.fetch)
        self._stats.count("internal_errors", name)
        reading.is_broken = True
        tell_outcome(reading, self._stats)
        claim = reading.fetch.claim if isinstance(reading.fetch, Intake) else None
        load = self._loads.get(reading.request_id)
        if claim is not None and claim.is_safe:
            # It may have raised before it said so.
            self._holder.lift_soon(reading.request_id)
        if load is None:
            self._unsettled.pop(reading.request_id, None)
        elif load.is_read:
            pass  # The workers read, and say when they are done.
        elif claim is not None:
            self._keep_out_of_use(load)
            order_push_failure(self.step, load, INTERNAL_ERROR)
        elif not load.failure:
            order_failure(self.step, load, INTERNAL_ERROR)

    def _keep_out_of_use(self, load: Load) -> None:
        """Nobody will get to know when a push's holder has stopped writing to these blocks, so for good.

        Before ``Proceed`` it does not write, and a machine that is left alone will not say it.
        """
        intake = load.reading.fetch
        if isinstance(intake, Intake) and intake.claim is not None and not intake.claim.is_safe:
            self._holder.quarantine_soon(load.reading.request_id, load.destination)

    def _do(self, reading: Reading, actions: Actions) -> None:
        for action in actions:
            if isinstance(action, Asked):
                self._asking.ask(reading, action)
            elif isinstance(action, Quarantine):
                self._holder.quarantine_soon(reading.request_id, action.block_ids)
            elif isinstance(action, LiftQuarantine):
                self._holder.lift_soon(reading.request_id)
            else:
                order(self.step, self._loads[reading.request_id], action, host_id=self._clock.host_id)
        tell_outcome(reading, self._stats)
        if reading.fetch.is_drained:
            self._unsettled.pop(reading.request_id, None)
