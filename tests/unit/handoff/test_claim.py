from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvshuttle.errors import ConfigError, LocalProtocolError
from kvshuttle.handoff import (
    CLAIM_TRANSITIONS,
    BlocksArrived,
    Claim,
    ClaimState,
    ClaimTrigger,
    Declined,
    DeclineReason,
    LoadAdmitted,
    ProceedAnswered,
    Proceeding,
    PushLimits,
    PushOutcome,
    RegisterAnswered,
    Registered,
    RegisterFailed,
    SendProceed,
    SendRegister,
    SendWithdraw,
    SourceDead,
    SourceFailed,
    Stage,
    WithdrawAnswered,
    Withdrawn,
    registration,
)
from kvshuttle.ids import Handle
from support.handoff_values import HANDLE, LIMITS
from support.push_pair import PushPair
from support.push_values import (
    CHAIN,
    DESTINATIONS,
    GRANT,
    HOLDER,
    PUSH_LIMITS,
    TOKENS,
    card,
    claim,
    proceed,
    register,
    withdraw,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvshuttle.handoff.intake_protocol import ClaimFact

COMPUTING = ProceedAnswered(Proceeding(30.0, Stage.COMPUTING))
COMPUTED = ProceedAnswered(Proceeding(30.0, Stage.COMPUTED))
AWAITING = ProceedAnswered(Proceeding(30.0, Stage.AWAITING_PREFILL))
DRAINED = WithdrawAnswered("lease-1", Withdrawn(is_drained=True))
UNDRAINED = WithdrawAnswered("lease-1", Withdrawn(is_drained=False))
RESTARTED = Declined(DeclineReason.OTHER_INCARNATION, "this is life-2")
WITHDRAW = SendWithdraw(withdraw(), 2.0)


def standing(**limits: float) -> Claim:
    made = claim(**limits)
    made.on(RegisterAnswered(GRANT), now_s=0.1)
    return made


def withdrawing() -> Claim:
    made = standing()
    made.give_up(PushOutcome.WENT_QUIET, "", now_s=1.0)
    return made


def over() -> Claim:
    made = withdrawing()
    made.on(DRAINED, now_s=1.1)
    return made


IN_STATE: dict[ClaimState, Callable[[], Claim]] = {
    ClaimState.REGISTERING: claim,
    ClaimState.STANDING: standing,
    ClaimState.WITHDRAWING: withdrawing,
    ClaimState.OVER: over,
}


def test_a_claim_stands_until_everything_is_here_through_the_pair() -> None:
    pair = PushPair()
    request = pair.decode(Handle("x"), TOKENS)
    prefill = pair.holder.begin(Handle("x"), TOKENS, 0.0)
    pair.admit(request, 0, request.intake.offer(0))
    made = request.intake.claim
    assert made is not None
    assert repr(made) == "<Claim reg-1-0 REGISTERING>"
    pair.exchange()
    assert repr(made) == "<Claim reg-1-0 STANDING>"
    pair.holder.step(prefill, 10, 0.0, rolls_back=False, waits=True)
    pair.reader_step()
    pair.pump()
    pair.reader_step()
    assert repr(made) == "<Claim reg-1-0 OVER>"
    pair.drain()


def test_the_actions_of_the_happy_path() -> None:
    made = claim()
    assert made.start() == (SendRegister(register(), LIMITS.acquire_timeout_s),)
    assert made.on(RegisterAnswered(GRANT), now_s=0.1) == (SendProceed(proceed(), 1.0),)
    assert made.on(COMPUTING, now_s=0.2) == ()
    assert made.finish(1.0) == (SendWithdraw(withdraw(drop=True), 2.0),)
    assert (made.state, made.why, made.next_deadline_at_s()) == (ClaimState.OVER, None, None)
    assert made.finish(1.1) == ()


def test_a_registration_is_for_the_whole_rest_of_the_prompt() -> None:
    message = register()
    assert (message.first_index, message.destination_block_ids) == (0, DESTINATIONS)
    assert (message.num_tokens, message.links, message.incarnation) == (10, CHAIN.links, "life-1")


@pytest.mark.parametrize(
    "load",
    [
        LoadAdmitted(0, 9, DESTINATIONS),
        LoadAdmitted(0, 11, DESTINATIONS),
        LoadAdmitted(3, 7, DESTINATIONS),
        LoadAdmitted(4, 6, DESTINATIONS[:2]),
        LoadAdmitted(12, -2, DESTINATIONS),
    ],
)
def test_a_load_that_was_never_offered_is_refused(load: LoadAdmitted) -> None:
    with pytest.raises(LocalProtocolError, match="were offered"):
        registration("reg-1", load=load, handle=HANDLE, holder=HOLDER, reader=card(), wanted=CHAIN, duration_s=30.0)


# -- the table ---------------------------------------------------------------------------------------


def trigger_it(made: Claim, trigger: ClaimTrigger) -> None:
    match trigger:
        case ClaimTrigger.GRANTED:
            made.on(RegisterAnswered(GRANT), now_s=0.5)
        case ClaimTrigger.REFUSED:
            made.on(RegisterFailed("timed out"), now_s=0.5)
        case ClaimTrigger.PROCEEDING:
            made.on(COMPUTING, now_s=0.5)
        case ClaimTrigger.GIVEN_UP:
            made.on(SourceFailed("write_failed"), now_s=0.5)
        case ClaimTrigger.CONFIRMED:
            made.on(DRAINED, now_s=0.5)
        case ClaimTrigger.FINISHED:
            made.finish(0.5)
        case ClaimTrigger.DEAD:
            made.on(SourceDead("gone"), now_s=0.5)


@pytest.mark.parametrize(("state", "trigger"), CLAIM_TRANSITIONS)
def test_every_row_of_the_table_happens(state: ClaimState, trigger: ClaimTrigger) -> None:
    made = IN_STATE[state]()
    assert made.state is state
    trigger_it(made, trigger)
    assert made.state is CLAIM_TRANSITIONS[state, trigger]


FACTS: list[ClaimFact] = [
    RegisterAnswered(GRANT),
    RegisterAnswered(Declined(DeclineReason.TOO_MANY)),
    RegisterFailed("timed out"),
    COMPUTING,
    ProceedAnswered(Declined(DeclineReason.UNKNOWN_REGISTRATION)),
    ProceedAnswered(RESTARTED),
    DRAINED,
    UNDRAINED,
    WithdrawAnswered("lease-9", Withdrawn(is_drained=True)),
    WithdrawAnswered("lease-1", RESTARTED),
    WithdrawAnswered("lease-1", Declined(DeclineReason.TOO_MANY)),
    BlocksArrived(),
    SourceFailed("write_failed"),
    SourceDead("gone"),
]


@pytest.mark.parametrize(("state", "fact"), list(itertools.product(ClaimState, FACTS)))
def test_whatever_the_holder_says_and_however_often_nothing_raises(state: ClaimState, fact: ClaimFact) -> None:
    made = IN_STATE[state]()
    made.on(fact, now_s=1.2)
    before = repr(made)
    again = made.on(fact, now_s=1.3)
    assert repr(made) == before
    assert not [action for action in again if not isinstance(action, SendProceed)]


@pytest.mark.parametrize("fact", FACTS)
def test_what_is_over_stays_over(fact: ClaimFact) -> None:
    made = over()
    assert made.on(fact, now_s=2.0) == ()
    assert made.state is ClaimState.OVER
    assert made.why is PushOutcome.WENT_QUIET


# -- what is safe ------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ClaimState)
def test_blocks_are_safe_before_the_first_proceed_and_after_the_end(state: ClaimState) -> None:
    assert IN_STATE[state]().is_safe is (state in (ClaimState.REGISTERING, ClaimState.OVER))


def test_only_a_yes_for_this_lease_confirms() -> None:
    made = withdrawing()
    for fact in (UNDRAINED, WithdrawAnswered("lease-9", Withdrawn(is_drained=True))):
        made.on(fact, now_s=1.1)
        assert not made.is_safe
    made.on(DRAINED, now_s=1.2)
    assert made.is_safe


@pytest.mark.parametrize("fact", [SourceDead("gone"), WithdrawAnswered("lease-1", RESTARTED)])
def test_the_death_of_the_holder_that_was_meant_is_an_end(fact: ClaimFact) -> None:
    made = withdrawing()
    made.on(fact, now_s=1.1)
    assert made.is_safe
    assert made.is_dead
    assert made.why is PushOutcome.WENT_QUIET


def test_a_holder_that_turns_out_to_be_another_ends_a_standing_claim() -> None:
    made = standing()
    assert made.on(ProceedAnswered(RESTARTED), now_s=1.0) == ()
    assert (made.state, made.why) == (ClaimState.OVER, PushOutcome.DECLINED_OTHER_INCARNATION)


# -- refusals and nonsense ---------------------------------------------------------------------------


@pytest.mark.parametrize("reason", DeclineReason)
def test_each_reason_to_decline_is_an_outcome_of_its_own(reason: DeclineReason) -> None:
    made = claim()
    assert made.on(RegisterAnswered(Declined(reason, "why")), now_s=0.1) == ()
    assert (made.state, made.why, made.detail) == (ClaimState.OVER, PushOutcome(f"declined_{reason}"), "why")


@pytest.mark.parametrize(
    ("changes", "is_given_back"),
    [({"incarnation": "life-0"}, True), ({"lease_id": ""}, False), ({"incarnation": ""}, True)],
)
def test_a_grant_that_makes_no_sense_is_refused_and_given_back(changes: dict[str, str], is_given_back: bool) -> None:
    made = claim()
    answer: Registered = msgspec.structs.replace(GRANT, **changes)
    actions = made.on(RegisterAnswered(answer), now_s=0.1)
    assert (made.state, made.why) == (ClaimState.OVER, PushOutcome.BAD_ANSWER)
    assert len(actions) == is_given_back
    assert all(isinstance(action, SendWithdraw) for action in actions)


@pytest.mark.parametrize("state", [ClaimState.STANDING, ClaimState.WITHDRAWING, ClaimState.OVER])
def test_a_second_lease_is_withdrawn_once_and_never_proceeded_with(state: ClaimState) -> None:
    made = IN_STATE[state]()
    second = RegisterAnswered(msgspec.structs.replace(GRANT, lease_id="lease-2"))
    assert made.on(second, now_s=2.0) == (SendWithdraw(withdraw("lease-2"), 2.0),)
    assert made.on(second, now_s=2.1) == ()
    assert made.state is state


def test_a_grant_that_comes_too_late_is_withdrawn() -> None:
    made = claim()
    made.on(RegisterFailed("timed out"), now_s=1.0)
    assert made.on(RegisterAnswered(GRANT), now_s=1.1) == (WITHDRAW,)
    assert made.is_safe


# -- time --------------------------------------------------------------------------------------------


def test_an_unanswered_registration_times_out() -> None:
    made = claim()
    assert made.next_deadline_at_s() == 2.0
    assert made.tick(1.9) == ()
    assert made.tick(2.0) == ()
    assert made.why is PushOutcome.REGISTER_TIMED_OUT
    assert made.is_safe


def test_a_standing_claim_says_so_every_second() -> None:
    made = standing()
    for number in range(1, 6):
        assert made.next_deadline_at_s() == pytest.approx(0.1 + number)
        assert made.tick(0.1 + number) == (SendProceed(proceed(), 1.0),)
        made.on(COMPUTING, now_s=0.2 + number)


@pytest.mark.parametrize(
    ("fact", "is_life"), [(COMPUTING, True), (BlocksArrived(), True), (COMPUTED, False), (AWAITING, False)]
)
def test_only_computing_and_arriving_blocks_are_signs_of_life(fact: ClaimFact, is_life: bool) -> None:
    made = standing()
    for tenth in range(2, 200):
        now_s = tenth / 10
        made.tick(now_s)
        if made.state is not ClaimState.STANDING:
            break
        made.on(fact, now_s=now_s)
    assert (made.state is ClaimState.STANDING) is is_life
    assert made.why is (None if is_life else PushOutcome.WENT_QUIET)


def test_even_a_lively_holder_is_not_waited_for_endlessly() -> None:
    made = standing(fetch=LIMITS, push_timeout_s=1000.0)
    made.tick(299.9)
    assert made.state is ClaimState.STANDING
    assert made.tick(300.0) == (SendWithdraw(withdraw(drop=True), 2.0),)
    assert made.why is PushOutcome.WAITED_TOO_LONG


def test_a_withdrawal_is_repeated_ever_more_slowly_until_it_is_confirmed() -> None:
    made = standing()
    assert made.give_up(PushOutcome.ABORTED, "", now_s=1.0, drop=True) == (SendWithdraw(withdraw(drop=True), 2.0),)
    sent_at_s = [1.0]
    for _ in range(12):
        at_s = made.next_deadline_at_s()
        assert at_s is not None
        assert made.tick(at_s) == (SendWithdraw(withdraw(drop=True), 2.0),)
        sent_at_s.append(at_s)
    waits = [round(later - earlier, 9) for earlier, later in itertools.pairwise(sent_at_s)]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (0.02, 2.0)
    made.on(DRAINED, now_s=sent_at_s[-1])
    assert made.next_deadline_at_s() is None
    assert made.tick(1e9) == ()


@pytest.mark.parametrize("state", ClaimState)
def test_giving_up_in_every_state_ends_safe(state: ClaimState) -> None:
    made = IN_STATE[state]()
    made.give_up(PushOutcome.ABORTED, "", now_s=1.0)
    made.on(DRAINED, now_s=1.1)
    assert made.is_safe
    assert made.state is ClaimState.OVER


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("push_timeout_s", 0.0),
        ("push_timeout_s", math.inf),
        ("confirm_timeout_s", 0.0),
        ("confirm_timeout_s", math.nan),
    ],
)
def test_limits_that_cannot_work_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        PushLimits(**{"fetch": LIMITS, "push_timeout_s": 8.0, "confirm_timeout_s": 2.0, field: value})
    assert math.isinf(PushLimits(LIMITS, PUSH_LIMITS.push_timeout_s, math.inf).confirm_timeout_s)
