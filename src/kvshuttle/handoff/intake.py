"""The reader's machine for one request that is pushed: offer, reserve, receive; else read; else fail.

::

    NEW -> RECEIVING -> STOPPING -> QUARANTINED
      |      |    |       |    |        |  |
      |      |    v       v    v        |  |
      |      |  FALLING_BACK -> FAILING <  |
      v      v          v         v        v
      +----> ENDED <----+---------+--------+

It is driven as a ``Fetch`` is, and offers the engine the whole prompt without asking anybody: the blocks are reserved
while the holder still computes. What the engine waits for is *the load*, which the workers report once, good or bad;
whether anything may still be written is the ``Claim``'s business.

Invariants:

1. The engine gets its blocks back, or a fetch reads into them, only when the claim is safe; otherwise they are
   quarantined first, and stay so until it is.
2. A load that was admitted ends: by the workers' commits, by a fetch, or by being failed after a bounded time.
3. ``outcome`` is set exactly once, when the load has ended or there is none; ``offer`` is 0 once there was one.
4. Whatever a peer sends, ``on`` does not raise; what the driver does wrong raises ``LocalProtocolError``.
5. After ``RequestEnded`` every path leads to ENDED, through the workers if they have the load.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvshuttle.errors import LocalProtocolError
from kvshuttle.handoff import fetch_protocol as fp
from kvshuttle.handoff import intake_protocol as ip
from kvshuttle.handoff.block_plan import ReadReason, span_to_read
from kvshuttle.handoff.claim import Claim, registration
from kvshuttle.handoff.fallback import Fallback
from kvshuttle.handoff.intake_protocol import PushOutcome
from kvshuttle.handoff.intake_states import INTAKE_TRANSITIONS, IntakeState, IntakeTrigger
from kvshuttle.handoff.messages import Release

if TYPE_CHECKING:
    from kvshuttle.blocks import TokenChain
    from kvshuttle.handoff.cards import EngineCard
    from kvshuttle.handoff.params import Peer
    from kvshuttle.ids import Handle

Actions = tuple[ip.IntakeAction, ...]

_WORTH_READING = (
    PushOutcome.WENT_QUIET,
    PushOutcome.SOURCE_FAILED,
    PushOutcome.DECLINED_TOO_MANY,
    PushOutcome.DECLINED_UNKNOWN_REGISTRATION,
)
"""Failures of a push after which the holder may well have the prompt."""


class Intake:
    """One request's way to the KV that ``source`` computes under ``handle``. ``wanted``: the chain of its whole prompt.

    ``reader``: this engine. ``registration_id``: a fresh name for this attempt.
    """

    def __init__(
        self,
        *,
        handle: Handle,
        source: Peer,
        wanted: TokenChain,
        reader: EngineCard,
        registration_id: str,
        limits: ip.PushLimits,
    ) -> None:
        self.handle = handle
        self.source = source
        self.registration_id = registration_id
        self.state = IntakeState.NEW
        self.outcome: PushOutcome | fp.Outcome | None = None
        self.detail = ""
        self.claim: Claim | None = None
        self.fallback: Fallback | None = None
        self._wanted = wanted
        self._reader = reader
        self._limits = limits
        self._load: fp.LoadAdmitted | None = None
        self._destinations: tuple[int, ...] = ()
        self._confirm_by_s = math.inf
        self._is_request_over = False
        self._load_ended: fp.ReadEnded | None = None

    def on(self, fact: ip.IntakeFact, *, now_s: float) -> Actions:
        """Take in what happened; return what to do now.

        Raises ``LocalProtocolError`` for a fact that cannot be true here, never for anything a peer sent.
        """
        match fact:
            case fp.LoadAdmitted():
                return self._on_load_admitted(fact, now_s)
            case fp.NothingToRead():
                return self._on_nothing_to_read(fact)
            case fp.ReadEnded():
                return self._on_load_ended(fact, now_s)
            case fp.RequestEnded():
                return self._on_request_ended(now_s)
            case fp.AcquireAnswered() | fp.RenewAnswered() | fp.PeerFailed():
                return self._after_fallback(self.fallback.on(fact, now_s=now_s)) if self.fallback else ()
            case _:
                return self._after_claim(self.claim.on(fact, now_s=now_s), now_s) if self.claim else ()

    def tick(self, now_s: float) -> Actions:
        """Let deadlines pass."""
        actions: Actions = ()
        if self.claim is not None:
            actions += self._after_claim(self.claim.tick(now_s), now_s)
        if self.state is IntakeState.STOPPING and now_s >= self._confirm_by_s:
            self._move(IntakeTrigger.UNCONFIRMED)
            self._claim.lose_interest()
            actions += (ip.Quarantine(self._destinations), self._fail())
        if self.fallback is not None:
            actions += self._after_fallback(self.fallback.tick(now_s))
        return actions

    def offer(self, num_local_tokens: int) -> fp.Offer:
        """How many tokens behind ``num_local_tokens`` will be loaded: all of them, or none. Asking changes nothing."""
        if self.state is not IntakeState.NEW:
            return fp.Offer(0)
        decision = span_to_read(
            num_local_tokens=num_local_tokens,
            num_verified_tokens=self._wanted.num_tokens,
            num_prompt_tokens=self._wanted.num_tokens,
            block_size_tokens=self._wanted.block_size_tokens,
            recompute_threshold_tokens=self._limits.fetch.recompute_threshold_tokens,
        )
        return fp.Offer(decision.num_tokens, decision.reason)

    def next_deadline_at_s(self) -> float | None:
        """When ``tick`` next has something to do; None when only a fact can move this intake."""
        deadlines = [self._confirm_by_s if self.state is IntakeState.STOPPING else None]
        deadlines += [each.next_deadline_at_s() for each in (self.claim, self.fallback) if each is not None]
        return min((at_s for at_s in deadlines if at_s is not None), default=None)

    @property
    def is_drained(self) -> bool:
        """Nothing is waited for, kept back, lent or under way."""
        return self.state is IntakeState.ENDED and (self.fallback is None or self.fallback.fetch.is_drained)

    def __repr__(self) -> str:
        outcome = f" outcome={self.outcome}" if self.outcome else ""
        return f"<Intake {self.handle} {self.state.upper()}{outcome}>"

    # -- what the engine says ---------------------------------------------------------------------

    def _on_load_admitted(self, fact: fp.LoadAdmitted, now_s: float) -> Actions:
        if fact == self._load:
            return ()
        message = registration(
            self.registration_id,
            load=fact,
            handle=self.handle,
            holder=self.source,
            reader=self._reader,
            wanted=self._wanted,
            duration_s=self._limits.fetch.lease_s,
        )
        self._move(IntakeTrigger.LOAD_ADMITTED)
        self._load, self._destinations = fact, message.destination_block_ids
        self.claim = Claim(message, self._limits, now_s=now_s)
        return (ip.ExpectPush(self.registration_id, len(self._destinations)), *self.claim.start())

    def _on_nothing_to_read(self, fact: fp.NothingToRead) -> Actions:
        is_new = self.state is IntakeState.NEW
        self._move(IntakeTrigger.NOTHING_TO_READ)
        if not is_new:
            return ()
        is_declined = fact.reason in (None, ReadReason.READ)
        self.outcome = PushOutcome.ENGINE_DECLINED if is_declined else PushOutcome(str(fact.reason))
        return (self._release(),)

    def _on_load_ended(self, fact: fp.ReadEnded, now_s: float) -> Actions:
        if fact == self._load_ended:
            return ()
        if self._load is None or self._load_ended is not None:
            raise LocalProtocolError(f"{self!r} does not allow {fact}")
        self._load_ended = fact
        if self.fallback is not None:
            return self._on_fallback_ended(fact, self.fallback, now_s)
        return self._on_received(now_s) if fact.is_ok else self._on_load_failed(now_s)

    def _on_received(self, now_s: float) -> Actions:
        """Every worker has its commit, or had it before it was told to fail: nothing is under way."""
        was_quarantined = self.state is IntakeState.QUARANTINED
        self._move(IntakeTrigger.RECEIVED)
        self._conclude(PushOutcome.ABORTED if self._is_request_over else PushOutcome.RECEIVED)
        lifted: Actions = (ip.LiftQuarantine(),) if was_quarantined else ()
        return (*lifted, *self._claim.finish(now_s))

    def _on_load_failed(self, now_s: float) -> Actions:
        actions: Actions = ()
        if self.state is IntakeState.RECEIVING:
            # Nobody told the workers to fail it: one of them is broken, while the holder may be writing.
            actions += self._claim.give_up(PushOutcome.LOAD_FAILED, "", now_s=now_s, drop=self._is_request_over)
        assert self._claim.why is not None, self
        self._conclude(self._claim.why)
        if self._claim.is_safe:
            self._move(IntakeTrigger.LOAD_ENDED)
            return actions
        if self.state is not IntakeState.QUARANTINED:
            actions = (ip.Quarantine(self._destinations), *actions)
        self._move(IntakeTrigger.LOAD_FAILED)
        return actions

    def _on_fallback_ended(self, fact: fp.ReadEnded, fallback: Fallback, now_s: float) -> Actions:
        was_read, outcome = fallback.is_reading, fallback.outcome
        actions = fallback.end(is_ok=fact.is_ok, detail=fact.detail, now_s=now_s)
        is_received = fact.is_ok and not was_read
        self._move(IntakeTrigger.RECEIVED if is_received else IntakeTrigger.LOAD_ENDED)
        received = PushOutcome.ABORTED if self._is_request_over else PushOutcome.RECEIVED
        self._conclude(
            received if is_received else fallback.outcome if was_read else outcome or PushOutcome.LOAD_FAILED
        )
        return actions

    def _on_request_ended(self, now_s: float) -> Actions:
        was, self._is_request_over = self._is_request_over, True
        self._move(IntakeTrigger.REQUEST_ENDED)
        if was or self._load_ended is not None or self.outcome is not None:
            return ()
        if self.claim is None:
            self._conclude(PushOutcome.ABORTED)
            return (self._release(),)
        actions = self.claim.give_up(PushOutcome.ABORTED, "", now_s=now_s, drop=True)
        if self.fallback is not None:
            return (*actions, *self._after_fallback(self.fallback.on(fp.RequestEnded(), now_s=now_s)))
        return self._after_claim(actions, now_s)

    # -- what the claim and the fallback come to --------------------------------------------------

    def _after_claim(self, actions: Actions, now_s: float) -> Actions:
        """Follow the claim to where it stands now."""
        claim = self._claim
        has_failed = claim.why is not None and self.state in (IntakeState.RECEIVING, IntakeState.STOPPING)
        if has_failed and claim.is_safe:
            actions += self._after_push(now_s)
        elif has_failed and self.state is IntakeState.RECEIVING:
            self._move(IntakeTrigger.GIVEN_UP)
            self._confirm_by_s = now_s + self._limits.confirm_timeout_s
        elif self.state is IntakeState.QUARANTINED and claim.is_safe:
            self._move(IntakeTrigger.OVER_LATE if self._load_ended else IntakeTrigger.OVER_HOPELESS)
            actions += (ip.LiftQuarantine(),)
        return actions

    def _after_push(self, now_s: float) -> Actions:
        assert self._load is not None, self
        if self._is_request_over or self._claim.is_dead or self._claim.why not in _WORTH_READING:
            self._move(IntakeTrigger.OVER_HOPELESS)
            return (self._fail(),)
        self._move(IntakeTrigger.OVER_HOPEFUL)
        self.fallback = Fallback(
            self._load,
            handle=self.handle,
            source=self.source,
            wanted=self._wanted,
            reader=self._reader,
            limits=self._limits.fetch,
            now_s=now_s,
        )
        return self._after_fallback(self.fallback.start(now_s))

    def _after_fallback(self, actions: Actions) -> Actions:
        if self.state is IntakeState.FALLING_BACK and self.fallback is not None and self.fallback.is_hopeless:
            self._move(IntakeTrigger.FALLBACK_FAILED)
            return (*actions, self._fail())
        return actions

    def _release(self) -> fp.SendRelease:
        """Tell the holder that what it computes is not needed here."""
        return fp.SendRelease(Release(handles=(self.handle,)))

    def _fail(self) -> ip.FailPush:
        outcome = self.fallback.outcome if self.fallback else self._claim.why
        assert outcome is not None, self
        return ip.FailPush(outcome)

    def _conclude(self, outcome: PushOutcome | fp.Outcome | None) -> None:
        assert self.outcome is None, self
        self.outcome = outcome
        ended = self.fallback.fetch if self.fallback else self.claim
        self.detail = ended.detail if ended else ""

    def _move(self, trigger: IntakeTrigger) -> None:
        state = INTAKE_TRANSITIONS.get((self.state, trigger))
        if state is None:
            raise LocalProtocolError(f"{self!r} does not allow {trigger}")
        self.state = state

    @property
    def _claim(self) -> Claim:
        assert self.claim is not None, self
        return self.claim
