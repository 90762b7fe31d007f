"""The holder's scheduler half of a push: joins readers' registrations with prefill requests, in either order.

A *registration* says where a reader wants the KV of a handle to be written; a *source* is the prefill request that
computes it. The workers write, this machine says what they may write and until when.

Two handshakes make the end of a registration certain, whatever the links between do to messages:

- A registration is written to only after the reader has said ``Proceed`` with the lease id that this machine made
  for it. A lease id is given out once, so a late ``Register`` opens nothing, and a reader that never had an answer
  has nothing to fear.
- ``Withdraw`` is answered yes only when every worker has done its ``Close`` and has nothing under way (``orders.py``),
  or never got an ``Open``. A registration is forgotten no sooner, so "unknown" means drained.

Invariants:

1. No worker gets an ``Open`` unless the source's chain equals the reader's to the last token.
2. From the moment a request ends, its blocks are kept, by a pin or a fence, while any registration of it may have a
   write under way. While it runs, vLLM keeps them, or takes them away and says so (``progress.py``).
3. Each registration ends: withdrawn, expired, or with its source; and gives back what it kept exactly once.
4. A handle whose source ended is spent: registrations that come later are declined at once.

Pure and single-threaded, like the ledger beside it: the caller holds one lock and passes the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.handoff.checks import check_duration, check_registration
from kvshuttle.handoff.holdings import Deadlines
from kvshuttle.handoff.ledger import MAX_LEASE_S
from kvshuttle.handoff.messages import (
    Declined,
    DeclineReason,
    Proceed,
    Proceeding,
    Register,
    Registered,
    Release,
    Withdraw,
    Withdrawn,
)
from kvshuttle.handoff.orders import Close, Open, OrderLog, Orders, OrdersTaken
from kvshuttle.handoff.registrations import Registration, RegistrationState, RegistrationTrigger
from kvshuttle.handoff.sources import Source, Sources

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvshuttle.blocks import TokenChain
    from kvshuttle.handoff.cards import EngineCard
    from kvshuttle.handoff.ledger import LeaseLedger
    from kvshuttle.ids import Handle, LeaseId


@dataclass(frozen=True, slots=True)
class Ending:
    """What became of a request's blocks. ``is_taken``: the ledger owns them now. ``is_held``: they can be acquired."""

    is_taken: bool
    is_held: bool


class PushSource:
    """All pushes out of one engine. ``card``: this engine. ``mint`` makes lease ids that no other incarnation makes."""

    def __init__(
        self, ledger: LeaseLedger, *, card: EngineCard, mint: Callable[[], LeaseId], max_registrations: int = 4096
    ) -> None:
        self._ledger = ledger
        self._card = card
        self._mint = mint
        self._max_registrations = max_registrations
        self._sources = Sources(ledger)
        self._registrations: dict[str, Registration] = {}
        self._logs = [OrderLog() for _ in card.workers]
        self._deadlines: Deadlines[Registration] = Deadlines()

    # -- what readers ask -------------------------------------------------------------------------

    def register(self, message: Register, *, now_s: float) -> Registered | Declined:
        """Note where a reader wants to be written to. Raises ``RemoteProtocolError`` for what contradicts itself."""
        chain = check_registration(message)
        duration_s = min(check_duration(message.duration_s), MAX_LEASE_S)
        self.tick(now_s)
        refusal = self._refusal(message)
        if refusal is not None:
            return refusal
        source = self._sources.match(message.handle, chain)
        if source is None and self._sources.is_known(message.handle):
            return Declined(DeclineReason.OTHER_TOKENS)
        registration = Registration(
            self._mint(), message, chain, now_s + duration_s, undrained_ranks=set(range(len(self._logs)))
        )
        if source is not None and not self._attach(registration, source):
            return Declined(DeclineReason.UNKNOWN_HANDLE)
        self._registrations[registration.lease_id] = registration
        self._deadlines.watch(registration)
        return Registered(registration.lease_id, self._card.incarnation, duration_s)

    def proceed(self, message: Proceed, *, now_s: float) -> Proceeding | Declined:
        """The reader may be written to from now on, and is alive."""
        duration_s = min(check_duration(message.duration_s), MAX_LEASE_S)
        self.tick(now_s)
        if message.incarnation != self._card.incarnation:
            return self._other_incarnation()
        registration = self._registrations.get(message.lease_id)
        if registration is None:
            return Declined(DeclineReason.UNKNOWN_REGISTRATION)
        if registration.state is RegistrationState.CLOSING:
            return Declined(registration.why_closing)
        registration.ends_at_s = max(registration.ends_at_s, now_s + duration_s)
        if registration.state is not RegistrationState.REGISTERED:
            registration.move(RegistrationTrigger.PROCEEDED)
        elif registration.source is None:
            registration.move(RegistrationTrigger.CLEARED)
        else:
            self._open(registration)
        return Proceeding(registration.ends_at_s - now_s, registration.stage)

    def withdraw(self, message: Withdraw, *, now_s: float) -> Withdrawn | Declined:
        """Stop writing to a reader; the answer is yes when nothing is under way or ever will be."""
        self.tick(now_s)
        if message.incarnation != self._card.incarnation:
            return self._other_incarnation()
        registration = self._registrations.get(message.lease_id)
        if registration is None:
            return Withdrawn(is_drained=True)
        registration.is_drop_wanted |= message.drop
        if message.drop:
            self._sources.spend(registration.message.handle, DeclineReason.UNKNOWN_HANDLE)
        self._stop(registration, RegistrationTrigger.WITHDRAWN, "", now_s)
        return Withdrawn(is_drained=registration.state is RegistrationState.ENDED)

    def release(self, handle: str) -> None:
        """What this handle names is not needed, whether it is here, being computed, or still to come."""
        self._sources.spend(handle, DeclineReason.UNKNOWN_HANDLE)

    # -- what the engine does ---------------------------------------------------------------------

    def begin(self, source_id: str, handle: Handle, chain: TokenChain, *, now_s: float) -> None:
        """A prefill request arrived that readers may want to be written from while it computes."""
        source = Source(source_id, handle, chain)
        self._sources.add(source)
        waiting = [each for each in self._registrations.values() if each.source is None]
        for registration in waiting:
            if registration.message.handle != handle:
                continue
            if registration.chain != chain:
                self._stop(registration, RegistrationTrigger.SOURCE_LOST, DeclineReason.OTHER_TOKENS, now_s)
                continue
            self._attach(registration, source)
            if registration.state is RegistrationState.CLEARED:
                self._open(registration)

    def finish(
        self, source_id: str, block_ids: tuple[int, ...], *, is_computed: bool, duration_s: float, now_s: float
    ) -> Ending:
        """The request ended and still owns ``block_ids``. ``is_computed``: they hold the whole prompt.

        Where the ledger takes the blocks, it owns them from here on, as after its ``hold``.
        """
        source = self._sources[source_id]
        if is_computed and not self._ledger.is_full:
            ending = self._keep(source, block_ids, duration_s, now_s)
        else:
            ending = self._abandon(source, block_ids, now_s)
        self._sources.end(source)
        return ending

    def take_sources_over(self) -> tuple[str, ...]:
        """Sources that no worker will be asked about any more, each once."""
        return self._sources.take_over()

    # -- what the workers say ---------------------------------------------------------------------

    def take_orders(self, rank: int, now_s: float) -> Orders | None:
        """What to send to a worker now, if anything."""
        return self._logs[rank].due(now_s)

    def on_orders_taken(self, rank: int, message: OrdersTaken, *, now_s: float) -> None:
        """A worker's answer."""
        for lease_id in self._logs[rank].on_taken(message):
            registration = self._registrations[lease_id]
            registration.undrained_ranks.discard(rank)
            if not registration.undrained_ranks:
                registration.move(RegistrationTrigger.DRAINED)
                self._end(registration, now_s)

    # -- time -------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Let leases end."""
        while (registration := self._deadlines.pop_ended(now_s)) is not None:
            self._stop(registration, RegistrationTrigger.EXPIRED, "lease_expired", now_s)
        self._sources.review_all()

    def next_deadline_at_s(self) -> float | None:
        """When ``tick`` or ``take_orders`` next has something to do; None when only a message can move anything."""
        deadlines = [self._deadlines.next_at_s(), *(log.next_due_at_s() for log in self._logs)]
        return min((at_s for at_s in deadlines if at_s is not None), default=None)

    @property
    def is_drained(self) -> bool:
        """No registration, no source, and every worker has done and drained everything."""
        return not (self._registrations or len(self._sources)) and all(log.is_drained for log in self._logs)

    def __repr__(self) -> str:
        return f"<PushSource sources={len(self._sources)} registrations={len(self._registrations)}>"

    def _refusal(self, message: Register) -> Declined | None:
        if message.incarnation and message.incarnation != self._card.incarnation:
            return self._other_incarnation()
        differences = self._card.fingerprint.differences(message.fingerprint)
        ours, theirs = ([(w.rank, w.device) for w in workers] for workers in (self._card.workers, message.workers))
        if ours != theirs:
            differences.append(f"workers: {ours} != {theirs}")
        if differences:
            return Declined(DeclineReason.INCOMPATIBLE, "; ".join(differences))
        spent = self._sources.why_spent(message.handle)
        if spent is not None:
            return Declined(spent)
        if len(self._registrations) >= self._max_registrations:
            return Declined(DeclineReason.TOO_MANY, f"{self._max_registrations} registrations")
        return None

    def _other_incarnation(self) -> Declined:
        return Declined(DeclineReason.OTHER_INCARNATION, f"this is {self._card.incarnation}")

    def _attach(self, registration: Registration, source: Source) -> bool:
        """Join the two; False when the source's blocks have been let go of meanwhile."""
        if source.block_ids is not None:
            registration.pin = self._ledger.pin(source.handle, source.block_ids)
            if registration.pin is None:
                return False
        registration.source = source
        source.registrations[registration.lease_id] = registration
        return True

    def _open(self, registration: Registration) -> None:
        assert registration.source is not None, registration
        registration.move(RegistrationTrigger.OPENED)
        message = registration.message
        for log, worker in zip(self._logs, message.workers, strict=True):
            log.append(
                Open(
                    lease_id=registration.lease_id,
                    registration_id=message.registration_id,
                    source_id=registration.source.source_id,
                    first_index=message.first_index,
                    destination_block_ids=message.destination_block_ids,
                    worker=worker,
                )
            )

    def _stop(self, registration: Registration, trigger: RegistrationTrigger, reason: str, now_s: float) -> None:
        was_open = registration.state is RegistrationState.OPEN
        registration.move(trigger)
        if was_open:
            for log in self._logs:
                log.append(Close(registration.lease_id, reason))
        if registration.state is RegistrationState.ENDED:
            self._end(registration, now_s)

    def _keep(self, source: Source, block_ids: tuple[int, ...], duration_s: float, now_s: float) -> Ending:
        """The prompt is computed: hold it, and pin it for those that are written to."""
        is_wanted = self._sources.why_spent(source.handle) is None
        if not (is_wanted or source.registrations):
            return Ending(is_taken=False, is_held=False)
        source.block_ids = block_ids
        self._ledger.hold(source.handle, block_ids=block_ids, chain=source.chain, duration_s=duration_s, now_s=now_s)
        for registration in source.registrations.values():
            registration.pin = self._ledger.pin(source.handle, block_ids)
        if not is_wanted:
            self._ledger.release(Release(handles=(source.handle,)), now_s=now_s)
        return Ending(is_taken=True, is_held=is_wanted)

    def _abandon(self, source: Source, block_ids: tuple[int, ...], now_s: float) -> Ending:
        """The prompt will not be had from this request."""
        self._sources.spend(source.handle, DeclineReason.PREFILL_ENDED)
        for registration in tuple(source.registrations.values()):
            registration.why_closing = DeclineReason.PREFILL_ENDED
            self._stop(registration, RegistrationTrigger.SOURCE_LOST, DeclineReason.PREFILL_ENDED, now_s)
        if source.registrations and block_ids:
            source.fence = self._ledger.keep(block_ids)
            return Ending(is_taken=True, is_held=False)
        return Ending(is_taken=False, is_held=False)

    def _end(self, registration: Registration, now_s: float) -> None:
        del self._registrations[registration.lease_id]
        if registration.pin is not None:
            self._ledger.release(Release((registration.pin,), drop=registration.is_drop_wanted), now_s=now_s)
        source = registration.source
        if source is None:
            return
        del source.registrations[registration.lease_id]
        if source.fence is not None and not source.registrations:
            self._ledger.release(Release((source.fence,)), now_s=now_s)
        self._sources.review(source)
