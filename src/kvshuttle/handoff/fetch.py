"""The reader's machine for one request: ``acquire -> read -> release``.

::

    NEW -> ACQUIRING -> LEASED -> READING -> ENDED
              |            |         |         ^
              v            |         v         |
          ABANDONED -------+----> DRAINING ----+

A driver tells it facts, does the actions it returns, and calls ``tick`` by ``next_deadline_at_s``.

Whose clock. The peer grants a *duration*, never an instant. The peer counts it from when it granted, this
machine from when it *sent* the request, which is earlier; and it counts a little less of it, since two monotonic
clocks may run at different rates. So this side always believes a lease to end before the peer does.

Invariants:

1. A read starts only with more than ``submit_margin_s`` of lease left, and is submitted before that or never.
2. A read counts as good only if it completed, and completed before the lease ended by this side's clock.
   Anything else is recomputed; the bytes that arrived are never used.
3. Every lease that ever reaches this machine is given back exactly once, also when its answer comes late, twice,
   or makes no sense; a lost release costs the peer one lease duration.
4. ``outcome`` is set exactly once. Once it is set, ``offer`` is 0 for ever.
5. ``on`` never raises for what a peer sent; a driver's mistake raises ``LocalProtocolError`` and changes nothing.
6. After ``RequestEnded`` every path leads to ENDED; during a read once the workers are done, who may still write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from kvshuttle.errors import LocalProtocolError, RemoteProtocolError
from kvshuttle.handoff.block_plan import ReadReason, span_to_read
from kvshuttle.handoff.checks import check_grant
from kvshuttle.handoff.fetch_protocol import (
    PENDING,
    AcquireAnswered,
    Action,
    Fact,
    FailLoad,
    FetchLimits,
    LoadAdmitted,
    NothingToRead,
    Offer,
    Outcome,
    PeerFailed,
    ReadEnded,
    RenewAnswered,
    RequestEnded,
    SendAcquire,
    SendRelease,
    StartRead,
)
from kvshuttle.handoff.fetch_states import TRANSITIONS, State, Trigger
from kvshuttle.handoff.messages import Acquire, Acquired, Denied, Release
from kvshuttle.handoff.reader_lease import ReaderLease

if TYPE_CHECKING:
    from kvshuttle.blocks import TokenChain
    from kvshuttle.handoff.cards import Fingerprint
    from kvshuttle.handoff.params import Peer
    from kvshuttle.ids import Handle

_WAITING = (State.ACQUIRING, State.ABANDONED)
_LOST_WHILE_OFFERED = (Outcome.LEASE_LOST, Outcome.WAITED_TOO_LONG)


class Fetch:
    """One request's way to what ``source`` holds under ``handle``, which others need too unless ``is_read_once``.
    ``wanted``: the chain of its whole prompt.
    """

    def __init__(
        self,
        *,
        handle: Handle,
        source: Peer,
        wanted: TokenChain,
        fingerprint: Fingerprint,
        reader: str,
        limits: FetchLimits,
        now_s: float,
        is_read_once: bool = True,
    ) -> None:
        self.handle = handle
        self.source = source
        self.state = State.NEW
        self.outcome: Outcome | None = None
        self.detail = ""
        self._wanted = wanted
        self._limits = limits
        self._message = Acquire(
            handle=handle,
            reader=reader,
            incarnation=source.incarnation,
            fingerprint=fingerprint,
            block_size_tokens=wanted.block_size_tokens,
            num_tokens=wanted.num_tokens,
            links=wanted.links,
            tail=wanted.tail,
            duration_s=limits.lease_s,
        )
        self._give_up_at_s = now_s + limits.total_wait_s
        self._acquire_sent_at_s = now_s
        self._is_read_once = is_read_once
        self._is_request_over = False
        self._lease: ReaderLease | None = None
        self._given_back: set[str] = set()
        self._load: LoadAdmitted | None = None
        self._read_ended: ReadEnded | None = None

    def start(self, now_s: float) -> tuple[Action, ...]:
        """Send the acquire. Starting twice is harmless."""
        if self.state is not State.NEW:
            return ()
        self._move(Trigger.START)
        self._acquire_sent_at_s = now_s
        return (SendAcquire(self._message, self._limits.acquire_timeout_s),)

    def on(self, fact: Fact, *, now_s: float) -> tuple[Action, ...]:
        """Take in what happened; return what to do now.

        Raises ``LocalProtocolError`` for a fact that cannot be true here, never for anything a peer sent.
        """
        match fact:
            case AcquireAnswered():
                actions = self._on_acquire_answered(fact.answer)
            case PeerFailed():
                actions = self._on_peer_failed(fact)
            case RenewAnswered():
                actions = self._on_renewed(fact)
            case LoadAdmitted():
                actions = self._on_load_admitted(fact, now_s)
            case NothingToRead():
                actions = self._on_nothing_to_read(fact)
            case ReadEnded():
                actions = self._on_read_ended(fact, now_s)
            case RequestEnded():
                actions = self._on_request_ended()
            case _:
                assert_never(fact)
        return actions

    def tick(self, now_s: float) -> tuple[Action, ...]:
        """Let deadlines pass: time out the acquire, renew the lease or notice its end."""
        due_at_s = self.next_deadline_at_s()
        if due_at_s is None or now_s < due_at_s:
            return ()
        if self.state in _WAITING:
            return self._end(Trigger.ACQUIRE_TIMED_OUT, Outcome.ACQUIRE_TIMED_OUT)
        if self.state is State.LEASED and now_s >= self._give_up_at_s:
            return self._end(Trigger.WAITED_TOO_LONG, Outcome.WAITED_TOO_LONG)
        if self.state is State.LEASED and now_s >= self._held.last_submit_at_s:
            return self._end(Trigger.LEASE_LOST, Outcome.LEASE_LOST)
        return (self._held.start_renewal(now_s),)

    def offer(self, num_local_tokens: int) -> Offer:
        """How many tokens behind ``num_local_tokens`` can be loaded now. Asking changes nothing.

        An answer that no grant could change (a full local hit, say) does not wait for the grant.
        """
        if self.outcome is not None or self._load is not None:
            return Offer(0)
        decision = span_to_read(
            num_local_tokens=num_local_tokens,
            num_verified_tokens=self._lease.num_verified_tokens if self._lease else self._wanted.num_tokens,
            num_prompt_tokens=self._wanted.num_tokens,
            block_size_tokens=self._wanted.block_size_tokens,
            recompute_threshold_tokens=self._limits.recompute_threshold_tokens,
        )
        if self._lease is None and decision.reason is ReadReason.READ:
            return PENDING
        return Offer(decision.num_tokens, decision.reason)

    def is_read_trustworthy(self, now_s: float) -> bool:
        """Whether bytes whose read completes now are still the verified ones."""
        return self._lease is not None and self._lease.is_live(now_s)

    def next_deadline_at_s(self) -> float | None:
        """When ``tick`` next has something to do; None when only a fact can move this fetch."""
        if self.state in _WAITING:
            return self._acquire_sent_at_s + self._limits.acquire_timeout_s
        if self.state is State.LEASED:
            return min(self._held.renew_at_s, self._held.last_submit_at_s, self._give_up_at_s)
        return self._held.next_renewal_at_s if self.state is State.READING else None

    @property
    def is_drained(self) -> bool:
        """Nothing is held, lent, in flight or waiting."""
        return self.state is State.ENDED

    def __repr__(self) -> str:
        return f"<Fetch {self.handle} {self.state.upper()}{f' outcome={self.outcome}' if self.outcome else ''}>"

    def _on_acquire_answered(self, answer: Acquired | Denied) -> tuple[Action, ...]:
        if self.state not in _WAITING:
            return self._on_surplus_answer(answer)
        if isinstance(answer, Denied):
            return self._end(Trigger.DENIED, Outcome(f"denied_{answer.reason}"), answer.detail)
        try:
            check_grant(answer, wanted=self._wanted, incarnation=self.source.incarnation)
        except RemoteProtocolError as error:
            self._end(Trigger.BAD_ANSWER, Outcome.BAD_ANSWER, str(error))
            return self._release(answer.lease_id)
        self._move(Trigger.GRANTED)
        if self.state is State.ENDED:
            return self._release(answer.lease_id)
        self._lease = ReaderLease.granted(answer, limits=self._limits, sent_at_s=self._acquire_sent_at_s)
        return ()

    def _on_surplus_answer(self, answer: Acquired | Denied) -> tuple[Action, ...]:
        self._move(Trigger.DENIED if isinstance(answer, Denied) else Trigger.GRANTED)
        if isinstance(answer, Denied) or (self._lease is not None and self._lease.lease_id == answer.lease_id):
            return ()
        return self._release(answer.lease_id)

    def _on_peer_failed(self, fact: PeerFailed) -> tuple[Action, ...]:
        if self.state in _WAITING:
            return self._end(Trigger.PEER_FAILED, Outcome.PEER_FAILED, fact.detail)
        self._move(Trigger.PEER_FAILED)
        return ()

    def _on_renewed(self, fact: RenewAnswered) -> tuple[Action, ...]:
        self._move(Trigger.RENEWED)
        if self.state not in (State.LEASED, State.READING):
            return ()
        self._held.take_renewal(fact)
        if not self._held.is_lost:
            return ()
        if self.state is State.LEASED:
            return self._end(Trigger.LEASE_LOST, Outcome.LEASE_LOST)
        self._move(Trigger.LEASE_LOST)
        return ()

    def _on_load_admitted(self, fact: LoadAdmitted, now_s: float) -> tuple[Action, ...]:
        if fact == self._load:
            return ()
        if self.outcome in _LOST_WHILE_OFFERED and not (self._load or self._is_request_over):
            # The lease went between the engine's question and its answer.
            self._move(Trigger.LOAD_TOO_LATE)
            self._load = fact
            return (FailLoad(self.outcome),)
        self._next_state(Trigger.LOAD_ADMITTED)
        plan = self._held.plan(fact, self._wanted.block_size_tokens)
        submit_within_s = self._held.start_read(now_s, self._limits.read_timeout_s)
        self._load = fact
        if submit_within_s <= 0:
            return (*self._end(Trigger.LOAD_TOO_LATE, Outcome.LEASE_LOST), FailLoad(Outcome.LEASE_LOST))
        self._move(Trigger.LOAD_ADMITTED)
        return (StartRead(plan, self._limits.read_timeout_s, submit_within_s),)

    def _on_nothing_to_read(self, fact: NothingToRead) -> tuple[Action, ...]:
        is_declined = fact.reason in (None, ReadReason.READ)
        outcome = Outcome.ENGINE_DECLINED if is_declined else Outcome(str(fact.reason))
        return self._end(Trigger.NOTHING_TO_READ, outcome)

    def _on_read_ended(self, fact: ReadEnded, now_s: float) -> tuple[Action, ...]:
        if fact == self._read_ended:
            return ()
        if self.state is State.ENDED and self._load and self._read_ended is None and not fact.is_ok:
            self._move(Trigger.LOAD_FAILED)
            self._read_ended = fact
            return ()
        self._next_state(Trigger.READ_ENDED)
        self._read_ended = fact
        in_time = Outcome.READ_OK if self.is_read_trustworthy(now_s) else Outcome.READ_TOO_LATE
        return self._end(Trigger.READ_ENDED, in_time if fact.is_ok else Outcome.READ_FAILED, fact.detail)

    def _on_request_ended(self) -> tuple[Action, ...]:
        self._is_request_over = True
        return self._end(Trigger.REQUEST_ENDED, Outcome.ABORTED)

    def _next_state(self, trigger: Trigger) -> State:
        state = TRANSITIONS.get((self.state, trigger))
        if state is None:
            raise LocalProtocolError(f"{self!r} does not allow {trigger}")
        return state

    def _move(self, trigger: Trigger) -> None:
        self.state = self._next_state(trigger)

    def _end(self, trigger: Trigger, outcome: Outcome, detail: str = "") -> tuple[Action, ...]:
        """Settle the outcome unless it is; give the lease back unless workers still read."""
        self._move(trigger)
        if self.outcome is None:
            self.outcome, self.detail = outcome, detail
        return self._release(self._held.lease_id) if self._lease and self.state is State.ENDED else ()

    def _release(self, lease_id: str) -> tuple[Action, ...]:
        if not lease_id or lease_id in self._given_back:
            return ()
        self._given_back.add(lease_id)
        # The holding may only be dropped when this fetch does not read it under its own lease.
        drop = self._is_read_once and self.state is State.ENDED
        return (SendRelease(Release(lease_ids=(lease_id,), drop=drop)),)

    @property
    def _held(self) -> ReaderLease:
        assert self._lease is not None, f"{self!r} has no lease"
        return self._lease
