"""The reader's machine for one request: ``acquire -> read -> release``.

::

    NEW -> ACQUIRING -> LEASED -> READING -> ENDED
              |            |         |         ^
              v            |         v         |
          ABANDONED -------+----> DRAINING ----+

A driver tells it facts, does the actions it returns, and calls ``tick`` by ``next_deadline_at_s``. It reads no
clock and calls nothing.

Whose clock. The peer grants a *duration*, never an instant. The peer counts it from when it granted, this
machine from when it *sent* the request, which is earlier; and it counts a little less of it, since two monotonic
clocks may run at different rates. So this side always believes a lease to end before the peer does.

Invariants:

1. A read starts only with more than ``submit_margin_s`` of lease left, and gets a budget that ends before it.
2. A read counts as good only if it completed, and completed before the lease ended by this side's clock.
   Anything else is recomputed; the bytes that arrived are never used.
3. Every lease that ever reaches this machine is given back exactly once, also when its answer comes late, twice,
   or makes no sense; a lost release costs the peer one lease duration.
4. ``outcome`` is set exactly once. Once it is set, ``offer`` is 0 for ever.
5. Whatever a peer sends, ``on`` does not raise; what the driver does wrong raises ``LocalProtocolError``
   and changes nothing.
6. After ``RequestEnded`` every path leads to ENDED; during a read it first waits for the workers, because
   the destination blocks may still be written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from kvshuttle.blocks import TokenChain, num_blocks_for
from kvshuttle.errors import LocalProtocolError, RemoteProtocolError
from kvshuttle.handoff.block_plan import BlockPlan, ReadReason, plan_blocks, span_to_read
from kvshuttle.handoff.fetch_protocol import (
    PENDING,
    TRANSITIONS,
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
    State,
    Trigger,
)
from kvshuttle.handoff.messages import Acquire, Acquired, Denied, Fingerprint, Release
from kvshuttle.handoff.reader_lease import ReaderLease, check_grant

if TYPE_CHECKING:
    from kvshuttle.handoff.params import Peer
    from kvshuttle.ids import Handle

_WAITING = (State.ACQUIRING, State.ABANDONED)
_LOST_WHILE_OFFERED = (Outcome.LEASE_LOST, Outcome.WAITED_TOO_LONG)


class Fetch:
    """One request's way to the KV that ``source`` holds under ``handle``. ``wanted``: the chain of its whole prompt."""

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
    ) -> None:
        self.handle = handle
        self.source = source
        self.state = State.NEW
        self.outcome: Outcome | None = None
        self.detail = ""
        self._wanted = wanted
        self._fingerprint = fingerprint
        self._reader = reader
        self._limits = limits
        self._give_up_at_s = now_s + limits.total_wait_s
        self._acquire_sent_at_s = now_s
        self._is_request_over = False
        self._lease: ReaderLease | None = None
        self._given_back: set[str] = set()
        self._load: LoadAdmitted | None = None
        self._read_ends_at_s = now_s
        self._read_ended: ReadEnded | None = None

    def start(self, now_s: float) -> tuple[Action, ...]:
        """Send the acquire. Starting twice is harmless."""
        if self.state is not State.NEW:
            return ()
        self._move(Trigger.START)
        self._acquire_sent_at_s = now_s
        message = Acquire(
            handle=self.handle,
            reader=self._reader,
            incarnation=self.source.incarnation,
            fingerprint=self._fingerprint,
            block_size_tokens=self._wanted.block_size_tokens,
            num_tokens=self._wanted.num_tokens,
            links=self._wanted.links,
            tail=self._wanted.tail,
            duration_s=self._limits.lease_s,
        )
        return (SendAcquire(message, self._limits.acquire_timeout_s),)

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
        if self.state in _WAITING and now_s >= self._acquire_deadline_at_s:
            self._end(Trigger.ACQUIRE_TIMED_OUT, Outcome.ACQUIRE_TIMED_OUT)
            return ()
        if self.state is State.LEASED and now_s >= self._give_up_at_s:
            return self._end_and_release(Trigger.WAITED_TOO_LONG, Outcome.WAITED_TOO_LONG)
        if self.state is State.LEASED and not self._held.is_live(now_s):
            return self._end_and_release(Trigger.LEASE_LOST, Outcome.LEASE_LOST)
        renew_at_s = self._renew_at_s()
        return (self._held.renewal(now_s),) if renew_at_s is not None and now_s >= renew_at_s else ()

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
            return self._acquire_deadline_at_s
        if self.state is State.LEASED:
            return min(self._held.renew_at_s, self._held.ends_at_s, self._give_up_at_s)
        return self._renew_at_s()

    @property
    def is_drained(self) -> bool:
        """Nothing is held, lent, in flight or waiting."""
        return self.state is State.ENDED

    def __repr__(self) -> str:
        outcome = f" outcome={self.outcome}" if self.outcome else ""
        return f"<Fetch {self.handle} {self.state.upper()}{outcome}>"

    def _on_acquire_answered(self, answer: Acquired | Denied) -> tuple[Action, ...]:
        if self.state is State.NEW:
            raise LocalProtocolError(f"{self!r} asked for nothing and got {answer!r}")
        if isinstance(answer, Acquired):
            return self._on_acquired(answer)
        if self.state in _WAITING:
            self._end(Trigger.DENIED, Outcome(f"denied_{answer.reason}"), answer.detail)
        return ()

    def _on_acquired(self, answer: Acquired) -> tuple[Action, ...]:
        if self.state not in _WAITING:
            # Late or doubled: a lease that nobody asked for any more is given back.
            is_own = self._lease is not None and self._lease.lease_id == answer.lease_id
            return () if is_own else self._release(answer.lease_id, drop=self.state is State.ENDED)
        try:
            check_grant(answer, wanted=self._wanted, incarnation=self.source.incarnation)
        except RemoteProtocolError as error:
            self._end(Trigger.BAD_ANSWER, Outcome.BAD_ANSWER, str(error))
            return self._release(answer.lease_id, drop=True)
        self._move(Trigger.GRANTED)
        if self.state is State.ENDED:
            return self._release(answer.lease_id, drop=True)
        self._lease = ReaderLease.granted(answer, duration_s=self._limits.lease_s, sent_at_s=self._acquire_sent_at_s)
        return ()

    def _on_peer_failed(self, fact: PeerFailed) -> tuple[Action, ...]:
        if self.state in _WAITING:
            self._end(Trigger.PEER_FAILED, Outcome.PEER_FAILED, fact.detail)
        else:
            # A renewal failed; the next one is due before the lease ends.
            self._move(Trigger.PEER_FAILED)
        return ()

    def _on_renewed(self, fact: RenewAnswered) -> tuple[Action, ...]:
        self._next_state(Trigger.RENEWED)
        if self.state in (State.ENDED, State.DRAINING):
            return ()
        self._held.renew(fact)
        if self.state is State.LEASED and self._held.is_lost:
            return self._end_and_release(Trigger.LEASE_LOST, Outcome.LEASE_LOST)
        self._move(Trigger.LEASE_LOST if self._held.is_lost else Trigger.RENEWED)
        return ()

    def _on_load_admitted(self, fact: LoadAdmitted, now_s: float) -> tuple[Action, ...]:
        if fact == self._load:
            return ()
        if self.state is State.ENDED and self._load is None and self.outcome in _LOST_WHILE_OFFERED:
            # The engine took an offer that was withdrawn between its question and its answer.
            self._move(Trigger.LOAD_TOO_LATE)
            self._load = fact
            return (FailLoad(self.outcome),)
        self._next_state(Trigger.LOAD_ADMITTED)
        plan = self._plan(fact)
        budget_s = min(self._held.ends_at_s - self._limits.submit_margin_s - now_s, self._limits.read_timeout_s)
        self._load = fact
        if budget_s <= 0 or self._held.is_lost:
            actions = self._end_and_release(Trigger.LOAD_TOO_LATE, Outcome.LEASE_LOST)
            return (*actions, FailLoad(Outcome.LEASE_LOST))
        self._move(Trigger.LOAD_ADMITTED)
        self._read_ends_at_s = now_s + budget_s
        return (StartRead(plan, budget_s),)

    def _on_nothing_to_read(self, fact: NothingToRead) -> tuple[Action, ...]:
        is_declined = fact.reason in (None, ReadReason.READ)
        outcome = Outcome.ENGINE_DECLINED if is_declined else Outcome(str(fact.reason))
        if self.state is State.LEASED:
            return self._end_and_release(Trigger.NOTHING_TO_READ, outcome)
        self._end(Trigger.NOTHING_TO_READ, outcome)
        return ()

    def _on_read_ended(self, fact: ReadEnded, now_s: float) -> tuple[Action, ...]:
        if fact == self._read_ended:
            return ()
        if self.state is State.ENDED and self._load and self._read_ended is None and not fact.is_ok:
            # The driver confirms a FailLoad.
            self._read_ended = fact
            return ()
        self._next_state(Trigger.READ_ENDED)
        self._read_ended = fact
        if not fact.is_ok:
            outcome = Outcome.READ_FAILED
        else:
            outcome = Outcome.READ_OK if self.is_read_trustworthy(now_s) else Outcome.READ_TOO_LATE
        self.detail = self.detail or fact.detail
        return self._end_and_release(Trigger.READ_ENDED, outcome)

    def _on_request_ended(self) -> tuple[Action, ...]:
        if self._is_request_over:
            return ()
        self._is_request_over = True
        if self.state is State.LEASED:
            return self._end_and_release(Trigger.REQUEST_ENDED, Outcome.ABORTED)
        self._end(Trigger.REQUEST_ENDED, Outcome.ABORTED)
        return ()

    def _plan(self, fact: LoadAdmitted) -> BlockPlan:
        block_size_tokens = self._wanted.block_size_tokens
        first_index, rest = divmod(fact.num_local_tokens, block_size_tokens)
        end_tokens = fact.num_local_tokens + fact.num_external_tokens
        if rest or not fact.num_local_tokens < end_tokens <= self._held.num_verified_tokens:
            raise LocalProtocolError(
                f"{self!r}: tokens [{fact.num_local_tokens}, {end_tokens}) were never offered,"
                f" {self._held.num_verified_tokens} are verified"
            )
        return plan_blocks(
            source_block_ids=self._held.block_ids,
            destination_block_ids=fact.destination_block_ids,
            first_index=first_index,
            end_index=num_blocks_for(end_tokens, block_size_tokens),
        )

    def _next_state(self, trigger: Trigger) -> State:
        state = TRANSITIONS.get((self.state, trigger))
        if state is None:
            raise LocalProtocolError(f"{self!r} does not allow {trigger}")
        return state

    def _move(self, trigger: Trigger) -> None:
        self.state = self._next_state(trigger)

    def _end(self, trigger: Trigger, outcome: Outcome, detail: str = "") -> None:
        self._move(trigger)
        if self.outcome is None:
            self.outcome = outcome
            self.detail = detail or self.detail

    def _end_and_release(self, trigger: Trigger, outcome: Outcome) -> tuple[Action, ...]:
        self._end(trigger, outcome)
        return self._release(self._held.lease_id, drop=True)

    def _release(self, lease_id: str, *, drop: bool) -> tuple[Action, ...]:
        if lease_id in self._given_back:
            return ()
        self._given_back.add(lease_id)
        return (SendRelease(Release(lease_ids=(lease_id,), drop=drop)),)

    def _renew_at_s(self) -> float | None:
        """When to renew next; None when nothing more is gained by renewing."""
        if self.state is State.LEASED:
            end_s = self._held.ends_at_s
        elif self.state is State.READING:
            # A read that outlives its budget has failed: renewing for it would only pin the peer's memory.
            end_s = min(self._held.ends_at_s, self._read_ends_at_s)
        else:
            return None
        return self._held.renew_at_s if self._held.renew_at_s < end_s and not self._held.is_lost else None

    @property
    def _held(self) -> ReaderLease:
        assert self._lease is not None, f"{self!r} has no lease"
        return self._lease

    @property
    def _acquire_deadline_at_s(self) -> float:
        return self._acquire_sent_at_s + self._limits.acquire_timeout_s
