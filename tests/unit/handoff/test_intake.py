from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

import pytest

from kvshuttle.errors import LocalProtocolError
from kvshuttle.handoff import (
    INTAKE_TRANSITIONS,
    AcquireAnswered,
    Acquired,
    BlockPlan,
    BlockRun,
    Declined,
    DeclineReason,
    Denied,
    DenyReason,
    ExpectPush,
    FailPush,
    Intake,
    IntakeFact,
    IntakeState,
    IntakeTrigger,
    LiftQuarantine,
    LoadAdmitted,
    NothingToRead,
    Offer,
    Outcome,
    PeerFailed,
    PushOutcome,
    Quarantine,
    ReadEnded,
    ReadReason,
    RegisterAnswered,
    RegisterFailed,
    Release,
    RequestEnded,
    SendAcquire,
    SendProceed,
    SendRegister,
    SendRelease,
    SendWithdraw,
    SourceDead,
    SourceFailed,
    StartRead,
    WithdrawAnswered,
    Withdrawn,
)
from kvshuttle.ids import Handle
from support.handoff_values import LIMITS
from support.push_pair import PushPair
from support.push_values import DESTINATIONS, GRANT, LOAD, RELEASE_HANDLE, TOKENS, intake, register, withdraw

if TYPE_CHECKING:
    from collections.abc import Callable

OK, FAILED = ReadEnded(is_ok=True), ReadEnded(is_ok=False, detail="why")
DRAINED = WithdrawAnswered("lease-1", Withdrawn(is_drained=True))
ACQUIRED = AcquireAnswered(Acquired("read-1", "life-1", 10, (5, 6, 9), 30.0))
WITHDRAW = SendWithdraw(withdraw(), 2.0)
QUARANTINE = Quarantine(DESTINATIONS)
RELEASE = SendRelease(RELEASE_HANDLE)
WRITE_FAILED = SourceFailed("write_failed")


def admitted(**limits: object) -> Intake:
    made = intake(**limits)
    made.on(LOAD, now_s=0.0)
    return made


def receiving(**limits: object) -> Intake:
    made = admitted(**limits)
    made.on(RegisterAnswered(GRANT), now_s=0.1)
    return made


def stopping() -> Intake:
    made = receiving()
    made.on(WRITE_FAILED, now_s=1.0)
    return made


def quarantined() -> Intake:
    made = stopping()
    made.tick(3.0)
    return made


def quarantined_after_the_load() -> Intake:
    made = quarantined()
    made.on(FAILED, now_s=3.1)
    return made


def falling_back() -> Intake:
    made = stopping()
    made.on(DRAINED, now_s=1.1)
    return made


def reading() -> Intake:
    made = falling_back()
    made.on(ACQUIRED, now_s=1.2)
    return made


def failing() -> Intake:
    made = falling_back()
    made.on(AcquireAnswered(Denied(DenyReason.UNKNOWN_HANDLE)), now_s=1.2)
    return made


def ended() -> Intake:
    made = receiving()
    made.on(OK, now_s=1.0)
    return made


IN_STATE: dict[IntakeState, Callable[[], Intake]] = {
    IntakeState.NEW: intake,
    IntakeState.RECEIVING: receiving,
    IntakeState.STOPPING: stopping,
    IntakeState.FALLING_BACK: falling_back,
    IntakeState.FAILING: failing,
    IntakeState.QUARANTINED: quarantined,
    IntakeState.ENDED: ended,
}


# -- the happy path ----------------------------------------------------------------------------------


def test_a_request_gets_its_tokens_through_the_pair() -> None:
    pair = PushPair(num_ranks=2)
    request = pair.decode(Handle("x"), TOKENS)
    made = request.intake
    assert repr(made) == "<Intake x NEW>"
    prefill = pair.holder.begin(Handle("x"), TOKENS, 0.0)
    assert pair.admit(request, 4, made.offer(4))
    assert repr(made) == "<Intake x RECEIVING>"
    pair.reader_step()
    for _ in range(3):
        pair.pump()
        pair.holder.step(prefill, 4, 0.0, rolls_back=False, waits=True)
    assert pair.holder.finish(prefill, 30.0, 0.0)
    pair.pump()
    pair.reader_step()
    assert repr(made) == "<Intake x ENDED outcome=received>"
    assert made.is_drained
    pair.drain()


def test_the_actions_of_the_happy_path() -> None:
    made = intake()
    assert made.offer(0) == Offer(10, ReadReason.READ)
    assert made.on(LOAD, now_s=0.0) == (ExpectPush("reg-1", 3), SendRegister(register(), LIMITS.acquire_timeout_s))
    assert isinstance(made.on(RegisterAnswered(GRANT), now_s=0.1)[0], SendProceed)
    assert made.on(OK, now_s=1.0) == (SendWithdraw(withdraw(drop=True), 2.0),)
    assert (made.outcome, made.is_drained, made.next_deadline_at_s()) == (PushOutcome.RECEIVED, True, None)


@pytest.mark.parametrize("when", ["before", "after", "long after"])
def test_the_prefill_may_come_before_or_after_the_registration_through_the_pair(when: str) -> None:
    pair = PushPair()
    request = pair.decode(Handle("x"), TOKENS)
    steps = [
        lambda: pair.admit(request, 0, request.intake.offer(0)),
        pair.reader_step,
        pair.exchange,
    ]
    prefill = None
    for number, step in enumerate(steps):
        if number == (0 if when != "after" else 2):
            prefill = pair.holder.begin(Handle("x"), TOKENS, 0.0)
            if when == "long after":
                pair.holder.step(prefill, 10, 0.0, rolls_back=False, waits=True)
                pair.holder.finish(prefill, 30.0, 0.0)
        step()
    assert prefill is not None
    if not prefill.is_over:
        pair.holder.step(prefill, 10, 0.0, rolls_back=False, waits=True)
        pair.holder.finish(prefill, 30.0, 0.0)
    pair.pump()
    pair.reader_step()
    assert request.intake.outcome is PushOutcome.RECEIVED
    pair.drain()


# -- offers ------------------------------------------------------------------------------------------


def test_the_whole_rest_is_offered_without_asking_anybody() -> None:
    made = intake()
    assert {made.offer(4) for _ in range(3)} == {Offer(6, ReadReason.READ)}
    assert made.offer(8) == Offer(2, ReadReason.READ)
    assert made.next_deadline_at_s() is None


@pytest.mark.parametrize("state", [each for each in IntakeState if each is not IntakeState.NEW])
def test_nothing_is_offered_twice(state: IntakeState) -> None:
    assert IN_STATE[state]().offer(0) == Offer(0)


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (ReadReason.FULL_LOCAL_HIT, PushOutcome.FULL_LOCAL_HIT),
        (ReadReason.BELOW_THRESHOLD, PushOutcome.BELOW_THRESHOLD),
        (ReadReason.READ, PushOutcome.ENGINE_DECLINED),
        (None, PushOutcome.ENGINE_DECLINED),
    ],
)
def test_nothing_to_read_tells_the_holder_once(reason: ReadReason | None, outcome: PushOutcome) -> None:
    made = intake()
    assert made.on(NothingToRead(reason), now_s=0.1) == (RELEASE,)
    assert made.on(NothingToRead(reason), now_s=0.2) == ()
    assert (made.outcome, made.is_drained) == (outcome, True)


def test_a_threshold_makes_small_pushes_not_worth_it() -> None:
    made = intake(fetch=dataclasses.replace(LIMITS, recompute_threshold_tokens=7))
    assert made.offer(4) == Offer(0, ReadReason.BELOW_THRESHOLD)


# -- the table ---------------------------------------------------------------------------------------


def trigger_it(made: Intake, trigger: IntakeTrigger) -> None:
    facts: dict[IntakeTrigger, IntakeFact] = {
        IntakeTrigger.LOAD_ADMITTED: LOAD,
        IntakeTrigger.NOTHING_TO_READ: NothingToRead(),
        IntakeTrigger.GIVEN_UP: WRITE_FAILED,
        IntakeTrigger.OVER_HOPEFUL: DRAINED,
        IntakeTrigger.OVER_HOPELESS: SourceDead("gone"),
        IntakeTrigger.OVER_LATE: DRAINED,
        IntakeTrigger.FALLBACK_FAILED: AcquireAnswered(Denied(DenyReason.UNKNOWN_HANDLE)),
        IntakeTrigger.RECEIVED: OK,
        IntakeTrigger.LOAD_ENDED: FAILED,
        IntakeTrigger.LOAD_FAILED: FAILED,
        IntakeTrigger.REQUEST_ENDED: RequestEnded(),
    }
    if trigger is IntakeTrigger.UNCONFIRMED:
        made.tick(3.0)
    else:
        made.on(facts[trigger], now_s=3.2)


def start_of(state: IntakeState, trigger: IntakeTrigger) -> Intake:
    is_unregistered = trigger in (IntakeTrigger.OVER_HOPEFUL, IntakeTrigger.LOAD_ENDED, IntakeTrigger.REQUEST_ENDED)
    if state is IntakeState.RECEIVING and is_unregistered:
        return admitted()
    if trigger is IntakeTrigger.OVER_LATE:
        return quarantined_after_the_load()
    return IN_STATE[state]()


@pytest.mark.parametrize(("state", "trigger"), INTAKE_TRANSITIONS)
def test_every_row_of_the_table_happens(
    state: IntakeState, trigger: IntakeTrigger, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = start_of(state, trigger)
    assert made.state is state
    moves: list[tuple[IntakeState, IntakeTrigger, IntakeState]] = []
    move = Intake._move

    def note(self: Intake, trigger: IntakeTrigger) -> None:
        before = self.state
        move(self, trigger)
        moves.append((before, trigger, self.state))

    monkeypatch.setattr(Intake, "_move", note)
    if (state, trigger) == (IntakeState.RECEIVING, IntakeTrigger.OVER_HOPEFUL):
        made.on(RegisterAnswered(Declined(DeclineReason.TOO_MANY)), now_s=0.2)
    else:
        trigger_it(made, trigger)
    assert (state, trigger, INTAKE_TRANSITIONS[state, trigger]) in moves


MISUSE: list[tuple[IntakeState, IntakeFact]] = [
    *((state, LoadAdmitted(4, 6, DESTINATIONS)) for state in IntakeState if state is not IntakeState.NEW),
    *((state, NothingToRead()) for state in IntakeState if state not in (IntakeState.NEW, IntakeState.ENDED)),
    *((IntakeState.NEW, fact) for fact in (OK, FAILED)),
    (IntakeState.ENDED, FAILED),
]


@pytest.mark.parametrize(("state", "fact"), MISUSE)
def test_a_fact_that_cannot_be_true_is_refused_and_changes_nothing(state: IntakeState, fact: IntakeFact) -> None:
    made = IN_STATE[state]()
    before = (repr(made), made.next_deadline_at_s())
    with pytest.raises(LocalProtocolError):
        made.on(fact, now_s=3.2)
    assert (repr(made), made.next_deadline_at_s()) == before


# -- duplicates --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (receiving, LOAD),
        (ended, LOAD),
        (ended, OK),
        (quarantined_after_the_load, FAILED),
        (receiving, RegisterAnswered(GRANT)),
        (receiving, RegisterFailed("timed out")),
        (receiving, ACQUIRED),
        (ended, WRITE_FAILED),
        (ended, DRAINED),
        (intake, RegisterAnswered(GRANT)),
        (intake, PeerFailed("timed out")),
        (falling_back, DRAINED),
        (reading, WRITE_FAILED),
    ],
)
def test_a_repeated_or_overtaken_fact_changes_nothing(make: Callable[[], Intake], fact: IntakeFact) -> None:
    made = make()
    before = repr(made)
    assert made.on(fact, now_s=3.2) == ()
    assert repr(made) == before


# -- falling back ------------------------------------------------------------------------------------


def test_a_failed_push_is_read_into_the_same_blocks_once_nothing_is_written_any_more() -> None:
    made = receiving()
    assert made.on(WRITE_FAILED, now_s=1.0) == (WITHDRAW,)
    (acquire,) = made.on(DRAINED, now_s=1.1)
    assert isinstance(acquire, SendAcquire)
    plan = BlockPlan(0, 3, (BlockRun(5, 21, 2), BlockRun(9, 23, 1)))
    (read,) = made.on(ACQUIRED, now_s=1.2)
    assert isinstance(read, StartRead)
    assert (read.plan, read.budget_s) == (plan, LIMITS.read_timeout_s)
    assert made.on(OK, now_s=1.5) == (SendRelease(Release(("read-1",), drop=True)),)
    assert (made.outcome, made.is_drained) == (Outcome.READ_OK, True)


@pytest.mark.parametrize(
    "answer",
    [
        Denied(DenyReason.UNKNOWN_HANDLE),
        Acquired("read-1", "life-1", 8, (5, 6), 30.0),
        Acquired("read-1", "life-1", -1, (), 30.0),
    ],
)
def test_a_lease_on_less_than_everything_fails_the_load(answer: Acquired | Denied) -> None:
    made = falling_back()
    actions = made.on(AcquireAnswered(answer), now_s=1.2)
    assert isinstance(actions[-1], FailPush)
    given_back = [action for action in actions if isinstance(action, SendRelease)]
    assert len(given_back) == isinstance(answer, Acquired)
    assert made.state is IntakeState.FAILING
    assert made.on(FAILED, now_s=1.3) == ()
    assert made.is_drained
    assert made.outcome not in (None, PushOutcome.RECEIVED, Outcome.READ_OK)


def test_a_fallback_that_gets_no_answer_fails_the_load() -> None:
    made = falling_back()
    assert made.next_deadline_at_s() == pytest.approx(3.1)
    assert made.tick(3.1) == (FailPush(Outcome.ACQUIRE_TIMED_OUT),)
    made.on(FAILED, now_s=3.2)
    assert made.outcome is Outcome.ACQUIRE_TIMED_OUT


def test_a_fallback_that_reads_too_late_is_not_believed() -> None:
    made = reading()
    made.on(OK, now_s=100.0)
    assert made.outcome is Outcome.READ_TOO_LATE


@pytest.mark.parametrize(
    ("reason", "is_worth_it"),
    [
        (reason, reason is DeclineReason.TOO_MANY)
        for reason in DeclineReason
        if reason != DeclineReason.UNKNOWN_REGISTRATION
    ],
)
def test_reading_is_tried_only_where_it_may_help(reason: DeclineReason, is_worth_it: bool) -> None:
    made = admitted()
    (action,) = made.on(RegisterAnswered(Declined(reason)), now_s=0.1)
    assert isinstance(action, SendAcquire if is_worth_it else FailPush)


# -- quarantine --------------------------------------------------------------------------------------


def test_without_a_confirmation_the_load_fails_and_its_blocks_are_kept_back() -> None:
    made = stopping()
    assert made.tick(2.99) == (WITHDRAW,)
    assert made.tick(3.0) == (QUARANTINE, FailPush(PushOutcome.SOURCE_FAILED))
    assert made.on(FAILED, now_s=3.1) == ()
    assert (made.outcome, made.is_drained) == (PushOutcome.SOURCE_FAILED, False)
    for _ in range(5):
        at_s = made.next_deadline_at_s()
        assert at_s is not None
        # Nobody will read it any more.
        assert made.tick(at_s) == (SendWithdraw(withdraw(drop=True), 2.0),)
    assert made.on(DRAINED, now_s=100.0) == (LiftQuarantine(),)
    assert made.is_drained


def test_a_quarantine_that_is_lifted_before_the_load_has_ended_waits_for_that() -> None:
    made = quarantined()
    assert made.on(SourceDead("gone"), now_s=3.05) == (LiftQuarantine(),)
    assert made.state is IntakeState.FAILING
    made.on(FAILED, now_s=3.1)
    assert (made.outcome, made.is_drained) == (PushOutcome.SOURCE_FAILED, True)


def test_what_arrives_at_the_last_moment_counts() -> None:
    made = quarantined()
    assert made.on(OK, now_s=3.1) == (LiftQuarantine(), SendWithdraw(withdraw(drop=True), 2.0))
    assert (made.outcome, made.is_drained) == (PushOutcome.RECEIVED, True)


def test_a_broken_worker_of_our_own_does_not_end_the_holders_writes() -> None:
    made = receiving()
    assert made.on(FAILED, now_s=1.0) == (QUARANTINE, WITHDRAW)
    assert (made.outcome, made.state) == (PushOutcome.LOAD_FAILED, IntakeState.QUARANTINED)
    assert made.on(DRAINED, now_s=1.1) == (LiftQuarantine(),)
    assert made.is_drained


def test_where_failed_loads_are_recomputed_in_place_the_confirmation_is_awaited() -> None:
    made = receiving(confirm_timeout_s=math.inf)
    made.on(WRITE_FAILED, now_s=1.0)
    now_s = 1.0
    for _ in range(50):
        now_s = made.next_deadline_at_s() or now_s
        assert made.tick(now_s) == (WITHDRAW,)
    assert made.state is IntakeState.STOPPING


# -- cancel in every state ---------------------------------------------------------------------------


@pytest.mark.parametrize("make", [*IN_STATE.values(), admitted, reading, quarantined_after_the_load])
def test_cancel_in_every_state_ends_drained(make: Callable[[], Intake]) -> None:
    made = make()
    outcome = made.outcome
    actions = list(made.on(RequestEnded(), now_s=4.0))
    assert made.on(RequestEnded(), now_s=4.1) == ()
    for fact in (DRAINED, PeerFailed("timed out"), FAILED):
        if not made.is_drained:
            actions += made.on(fact, now_s=4.2)
    assert made.is_drained
    assert made.outcome is not None
    assert made.outcome == (outcome or made.outcome)
    assert actions.count(RELEASE) == (make is intake)
    assert made.next_deadline_at_s() is None


def test_an_aborted_push_is_not_read_instead() -> None:
    made = receiving()
    assert made.on(RequestEnded(), now_s=1.0) == (SendWithdraw(withdraw(drop=True), 2.0),)
    assert made.on(DRAINED, now_s=1.1) == (FailPush(PushOutcome.ABORTED),)
    made.on(FAILED, now_s=1.2)
    assert (made.outcome, made.is_drained) == (PushOutcome.ABORTED, True)


def test_an_abort_before_the_first_proceed_fails_the_load_at_once() -> None:
    made = admitted()
    assert made.on(RequestEnded(), now_s=0.1) == (FailPush(PushOutcome.ABORTED),)
    assert made.on(RegisterAnswered(GRANT), now_s=0.2) == (WITHDRAW,)
    made.on(FAILED, now_s=0.3)
    assert made.is_drained


@pytest.mark.parametrize(("num_steps", "num_ranks"), list(itertools.product(range(12), [1, 2])))
def test_an_abort_after_any_number_of_steps_leaves_nothing_behind_through_the_pair(
    num_steps: int, num_ranks: int
) -> None:
    pair = PushPair(num_ranks=num_ranks)
    request = pair.decode(Handle("x"), TOKENS)
    prefill = pair.holder.begin(Handle("x"), TOKENS, 0.0)
    pair.admit(request, 0, request.intake.offer(0))

    def next_step(number: int) -> None:
        if pair.link:
            pair.deliver()
        elif pair.order_link:
            pair.deliver_order()
        elif not prefill.is_computed:
            pair.holder.step(prefill, 4, 0.0, rolls_back=False, waits=True)
        else:
            rank = pair.holder.ranks[number % num_ranks]
            while rank.facts:
                rank.take_fact()
            rank.post()

    for number in range(num_steps):
        next_step(number)
    pair.reader.end_request(request, pair.reader_now_s)
    pair.check()
    pair.drain()
