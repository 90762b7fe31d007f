"""A registration as its reader keeps it: when anything may be written under it, and when certainly nothing is.

::

    REGISTERING -> STANDING -> WITHDRAWING -> OVER
         |             |                       ^
         +-------------+-----------------------+

The reader's blocks are fenced by confirmation, not by time: no clock of a holder that was stopped can be trusted. A
write may land from the moment that ``Proceed`` is sent until the holder says that none is under way or will be, or
every worker of the reader has its commit, after which the holder writes no more, or the holder's life that was meant
is known to be over.

Invariants:

1. ``is_safe`` is true exactly while nothing can be written: before the first ``Proceed``, and once OVER.
2. Every lease that reaches this machine is withdrawn, also when its answer comes late, twice or makes no sense; a lost
   message costs the holder one lease duration.
3. Withdrawing goes on until it is confirmed: it has no deadline of its own.
4. Whatever a peer sends, nothing here raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from kvshuttle.blocks import num_blocks_for
from kvshuttle.errors import LocalProtocolError
from kvshuttle.handoff.claim_states import CLAIM_TRANSITIONS, ClaimState, ClaimTrigger
from kvshuttle.handoff.intake_protocol import (
    BlocksArrived,
    ProceedAnswered,
    PushOutcome,
    RegisterAnswered,
    RegisterFailed,
    SendProceed,
    SendRegister,
    SendWithdraw,
    SourceDead,
    SourceFailed,
    WithdrawAnswered,
)
from kvshuttle.handoff.messages import (
    Declined,
    DeclineReason,
    Proceed,
    Proceeding,
    Register,
    Registered,
    Stage,
    Withdraw,
    Withdrawn,
)
from kvshuttle.handoff.reader_lease import RENEWALS_PER_LEASE

if TYPE_CHECKING:
    from kvshuttle.blocks import TokenChain
    from kvshuttle.handoff.cards import EngineCard
    from kvshuttle.handoff.fetch_protocol import LoadAdmitted
    from kvshuttle.handoff.intake_protocol import ClaimFact, IntakeAction, PushLimits
    from kvshuttle.handoff.params import Peer
    from kvshuttle.ids import Handle

PROCEED_INTERVAL_S = 1.0
"""How often a reader says that it still waits, where the lease is long: the answers say how far the holder is."""
FIRST_WITHDRAW_S = 0.02
"""How soon a withdrawal is repeated, doubled each time: mostly the holder's workers are done within milliseconds."""
SLOWEST_WITHDRAW_S = 2.0

Actions = tuple["IntakeAction", ...]


def registration(
    registration_id: str,
    *,
    load: LoadAdmitted,
    handle: Handle,
    holder: Peer,
    reader: EngineCard,
    wanted: TokenChain,
    duration_s: float,
) -> Register:
    """What a claim asks ``holder`` for, on behalf of the engine ``reader`` that has reserved blocks for ``load``.

    Raises ``LocalProtocolError`` unless the load is the whole rest of what is wanted.
    """
    first_index, rest = divmod(load.num_local_tokens, wanted.block_size_tokens)
    end_index = num_blocks_for(wanted.num_tokens, wanted.block_size_tokens)
    is_whole = load.num_local_tokens + load.num_external_tokens == wanted.num_tokens
    if rest or not is_whole or not first_index < end_index <= len(load.destination_block_ids):
        raise LocalProtocolError(f"{wanted.num_tokens} tokens were offered, all but the local ones, not {load}")
    return Register(
        registration_id=registration_id,
        handle=handle,
        reader=reader.engine_id,
        incarnation=holder.incarnation,
        fingerprint=reader.fingerprint,
        block_size_tokens=wanted.block_size_tokens,
        num_tokens=wanted.num_tokens,
        links=wanted.links,
        tail=wanted.tail,
        first_index=first_index,
        destination_block_ids=load.destination_block_ids[first_index:end_index],
        workers=reader.workers,
        duration_s=duration_s,
    )


class Claim:
    """Made when the engine has reserved blocks. ``why``: how it failed, None while it has not."""

    def __init__(self, message: Register, limits: PushLimits, *, now_s: float) -> None:
        self.state = ClaimState.REGISTERING
        self.why: PushOutcome | None = None
        self.detail = ""
        self.is_dead = False
        self._message = message
        self._limits = limits
        self._register_by_s = now_s + limits.fetch.acquire_timeout_s
        self._give_up_at_s = now_s + limits.fetch.total_wait_s
        self._alive_at_s = now_s
        self._lease_id, self._incarnation = "", ""
        self._surplus: set[str] = set()
        self._proceed_at_s = 0.0
        self._withdraw_at_s = 0.0
        self._withdraw_again_s = FIRST_WITHDRAW_S
        self._is_drop_wanted = False

    def __repr__(self) -> str:
        return f"<Claim {self._message.registration_id} {self.state.upper()}{f' why={self.why}' if self.why else ''}>"

    @property
    def is_safe(self) -> bool:
        """Nothing can be written to the blocks now or later."""
        return self.state in (ClaimState.REGISTERING, ClaimState.OVER)

    def start(self) -> Actions:
        """Ask the holder."""
        return (SendRegister(self._message, self._limits.fetch.acquire_timeout_s),)

    def tick(self, now_s: float) -> Actions:
        """Let deadlines pass."""
        due_at_s = self.next_deadline_at_s()
        if due_at_s is None or now_s < due_at_s:
            return ()
        if self.state is ClaimState.REGISTERING:
            self._refuse(PushOutcome.REGISTER_TIMED_OUT, "")
            return ()
        if self.state is ClaimState.WITHDRAWING:
            return self._withdraw(now_s)
        if now_s >= self._give_up_at_s:
            return self.give_up(PushOutcome.WAITED_TOO_LONG, "", now_s=now_s, drop=True)
        if now_s >= self._alive_at_s + self._limits.push_timeout_s:
            return self.give_up(PushOutcome.WENT_QUIET, "", now_s=now_s)
        return self._proceed(now_s)

    def next_deadline_at_s(self) -> float | None:
        """When ``tick`` next has something to do; None when it never has."""
        match self.state:
            case ClaimState.REGISTERING:
                return self._register_by_s
            case ClaimState.STANDING:
                return min(self._proceed_at_s, self._give_up_at_s, self._alive_at_s + self._limits.push_timeout_s)
            case ClaimState.WITHDRAWING:
                return self._withdraw_at_s
            case ClaimState.OVER:
                return None

    # -- what the holder says ---------------------------------------------------------------------

    def on(self, fact: ClaimFact, *, now_s: float) -> Actions:
        """Take in what the holder said, or what is known of it."""
        actions: Actions = ()
        match fact:
            case RegisterAnswered():
                actions = self._on_register_answered(fact.answer, now_s)
            case RegisterFailed():
                self._refuse(PushOutcome.REGISTER_FAILED, fact.detail)
            case ProceedAnswered():
                actions = self._on_proceed_answered(fact.answer, now_s)
            case WithdrawAnswered():
                self._on_withdraw_answered(fact)
            case BlocksArrived():
                self._alive_at_s = max(self._alive_at_s, now_s)
            case SourceFailed():
                actions = self.give_up(PushOutcome.SOURCE_FAILED, fact.reason, now_s=now_s)
            case SourceDead():
                self._on_dead(fact.detail)
            case _:
                assert_never(fact)
        return actions

    def _on_register_answered(self, answer: Registered | Declined, now_s: float) -> Actions:
        if isinstance(answer, Declined):
            self._refuse(PushOutcome(f"declined_{answer.reason}"), answer.detail)
            return ()
        if self.state is not ClaimState.REGISTERING:
            return self._give_back(answer)
        if not answer.lease_id or self._message.incarnation not in ("", answer.incarnation):
            self._refuse(PushOutcome.BAD_ANSWER, f"{answer}")
            return self._give_back(answer)
        self._move(ClaimTrigger.GRANTED)
        self._lease_id, self._incarnation = answer.lease_id, answer.incarnation
        self._alive_at_s = now_s
        return self._proceed(now_s)

    def _on_proceed_answered(self, answer: Proceeding | Declined, now_s: float) -> Actions:
        if self.state is not ClaimState.STANDING:
            return ()
        if isinstance(answer, Proceeding):
            self._move(ClaimTrigger.PROCEEDING)
            # While a prompt waits for its request, or is computed already, that the holder answers promises nothing.
            if answer.stage is Stage.COMPUTING:
                self._alive_at_s = max(self._alive_at_s, now_s)
            return ()
        if answer.reason is DeclineReason.OTHER_INCARNATION:
            self._on_dead(answer.detail)
            return ()
        return self.give_up(PushOutcome(f"declined_{answer.reason}"), answer.detail, now_s=now_s)

    def _on_withdraw_answered(self, fact: WithdrawAnswered) -> None:
        if self.state is not ClaimState.WITHDRAWING or fact.lease_id != self._lease_id:
            return
        if isinstance(fact.answer, Withdrawn):
            if fact.answer.is_drained:
                self._move(ClaimTrigger.CONFIRMED)
        elif fact.answer.reason is DeclineReason.OTHER_INCARNATION:
            self._on_dead(fact.answer.detail)

    def _on_dead(self, detail: str) -> None:
        self.is_dead = True
        if self.state is ClaimState.REGISTERING:
            self._refuse(PushOutcome.DECLINED_OTHER_INCARNATION, detail)
        elif self.state is not ClaimState.OVER:
            self._move(ClaimTrigger.DEAD)
            self._note(PushOutcome.DECLINED_OTHER_INCARNATION, detail)

    # -- what the reader decides ------------------------------------------------------------------

    def give_up(self, why: PushOutcome, detail: str, *, now_s: float, drop: bool = False) -> Actions:
        """Nothing shall be written any more. ``drop``: nor shall it be kept for reading. Too late, it does nothing."""
        self._is_drop_wanted |= drop
        if self.state is not ClaimState.STANDING:
            self._refuse(why, detail)
            return ()
        self._move(ClaimTrigger.GIVEN_UP)
        self._note(why, detail)
        return self._withdraw(now_s)

    def lose_interest(self) -> None:
        """What the handle names will not be read instead, so the holder need not keep it either."""
        self._is_drop_wanted = True

    def finish(self, now_s: float) -> Actions:
        """Everything is here; what the handle names is not needed any more."""
        if self.state not in (ClaimState.STANDING, ClaimState.WITHDRAWING):
            return ()
        self._move(ClaimTrigger.FINISHED)
        self._is_drop_wanted = True
        return self._withdraw(now_s)

    # -- the rest ---------------------------------------------------------------------------------

    def _refuse(self, why: PushOutcome, detail: str) -> None:
        """The registration comes to nothing, if it is not too late to say so."""
        if self.state is ClaimState.REGISTERING:
            self._move(ClaimTrigger.REFUSED)
            self._note(why, detail)

    def _note(self, why: PushOutcome, detail: str) -> None:
        if self.why is None:
            self.why, self.detail = why, detail

    def _proceed(self, now_s: float) -> Actions:
        lease_s = self._limits.fetch.lease_s
        interval_s = min(PROCEED_INTERVAL_S, lease_s / RENEWALS_PER_LEASE)
        self._proceed_at_s = now_s + interval_s
        return (SendProceed(Proceed(self._lease_id, self._incarnation, lease_s), interval_s),)

    def _withdraw(self, now_s: float) -> Actions:
        self._withdraw_at_s = now_s + self._withdraw_again_s
        self._withdraw_again_s = min(self._withdraw_again_s * 2, SLOWEST_WITHDRAW_S)
        return (SendWithdraw(Withdraw(self._lease_id, self._incarnation, self._is_drop_wanted), SLOWEST_WITHDRAW_S),)

    def _give_back(self, answer: Registered) -> Actions:
        """A lease that was not asked for, or came too late: it was never told to proceed."""
        if answer.lease_id in ("", self._lease_id) or answer.lease_id in self._surplus:
            return ()
        self._surplus.add(answer.lease_id)
        return (SendWithdraw(Withdraw(answer.lease_id, answer.incarnation, drop=False), SLOWEST_WITHDRAW_S),)

    def _move(self, trigger: ClaimTrigger) -> None:
        state = CLAIM_TRANSITIONS.get((self.state, trigger))
        if state is None:
            raise LocalProtocolError(f"{self!r} does not allow {trigger}")
        self.state = state
