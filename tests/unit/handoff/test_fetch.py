from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvshuttle.errors import ConfigError, LocalProtocolError
from kvshuttle.handoff import (
    MAX_CLOCK_RATE_SKEW,
    TRANSITIONS,
    AcquireAnswered,
    Acquired,
    BlockPlan,
    BlockRun,
    Denied,
    DenyReason,
    Fact,
    FailLoad,
    Fetch,
    FetchLimits,
    LoadAdmitted,
    NothingToRead,
    Offer,
    Outcome,
    PeerFailed,
    ReadEnded,
    ReadReason,
    Release,
    Renew,
    RenewAnswered,
    Renewed,
    RequestEnded,
    SendAcquire,
    SendRelease,
    SendRenew,
    StartRead,
    State,
    Trigger,
)
from support.handoff_values import HANDLE, LIMITS, fetch
from support.pair import HandoffPair, Request

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS = tuple(range(10))
GRANT = Acquired("lease-1", "life-1", 10, (5, 6, 9), 30.0)
LOAD = LoadAdmitted(0, 10, (21, 22, 23))
DROP = SendRelease(Release(lease_ids=("lease-1",), drop=True))
LEASE_ENDS_AT_S = 30.0 * (1 - MAX_CLOCK_RATE_SKEW)
LAST_SUBMIT_AT_S = LEASE_ENDS_AT_S - LIMITS.submit_margin_s


def acquiring(**options: object) -> Fetch:
    made = fetch(TOKENS, **options)
    made.start(0.0)
    return made


def leased(grant: Acquired = GRANT, **options: object) -> Fetch:
    made = acquiring(**options)
    assert made.on(AcquireAnswered(grant), now_s=0.1) == ()
    return made


def reading() -> Fetch:
    made = leased()
    made.on(LOAD, now_s=0.2)
    return made


def abandoned() -> Fetch:
    made = acquiring()
    made.on(RequestEnded(), now_s=0.1)
    return made


def draining() -> Fetch:
    made = reading()
    made.on(RequestEnded(), now_s=0.3)
    return made


def ended() -> Fetch:
    made = reading()
    made.on(ReadEnded(is_ok=True), now_s=0.3)
    return made


IN_STATE: dict[State, Callable[[], Fetch]] = {
    State.NEW: lambda: fetch(TOKENS),
    State.ACQUIRING: acquiring,
    State.LEASED: leased,
    State.READING: reading,
    State.ABANDONED: abandoned,
    State.DRAINING: draining,
    State.ENDED: ended,
}


# -- the happy path ----------------------------------------------------------------------------------


def test_a_request_gets_its_tokens_through_the_pair() -> None:
    pair = HandoffPair()
    pair.hold(HANDLE, TOKENS)
    request = pair.begin(HANDLE, TOKENS)
    assert repr(request.fetch) == "<Fetch xfer-1 ACQUIRING>"
    assert request.fetch.offer(0).is_pending
    pair.pump()
    assert repr(request.fetch) == "<Fetch xfer-1 LEASED>"
    offer = request.fetch.offer(4)
    assert offer == Offer(6, ReadReason.READ)
    pair.admit(request, 4, offer)
    assert repr(request.fetch) == "<Fetch xfer-1 READING>"
    pair.end_read(request)
    assert repr(request.fetch) == "<Fetch xfer-1 ENDED outcome=read_ok>"
    pair.pump()
    pair.check()
    pair.drain()


def test_the_actions_of_the_happy_path() -> None:
    made = fetch(TOKENS)
    (send,) = made.start(0.0)
    assert isinstance(send, SendAcquire)
    assert (send.message.handle, send.message.num_tokens, send.message.duration_s) == (HANDLE, 10, 30.0)
    assert send.message.incarnation == "life-1"
    assert send.timeout_s == LIMITS.acquire_timeout_s
    assert made.on(AcquireAnswered(GRANT), now_s=0.1) == ()
    (read,) = made.on(LOAD, now_s=0.2)
    plan = BlockPlan(0, 3, (BlockRun(5, 21, 2), BlockRun(9, 23, 1)))
    assert read == StartRead(plan, LIMITS.read_timeout_s, LAST_SUBMIT_AT_S - 0.2)
    assert made.on(ReadEnded(is_ok=True), now_s=1.0) == (DROP,)
    assert made.outcome is Outcome.READ_OK
    assert made.offer(0) == Offer(0)
    assert made.next_deadline_at_s() is None


# -- the table ---------------------------------------------------------------------------------------


def fact_for(trigger: Trigger, made: Fetch) -> Fact:
    facts: dict[Trigger, Fact] = {
        Trigger.GRANTED: AcquireAnswered(GRANT),
        Trigger.DENIED: AcquireAnswered(Denied(DenyReason.UNKNOWN_HANDLE)),
        Trigger.BAD_ANSWER: AcquireAnswered(msgspec.structs.replace(GRANT, num_verified_tokens=-1)),
        Trigger.PEER_FAILED: PeerFailed("timed out"),
        Trigger.RENEWED: RenewAnswered(1, Renewed((30.0,))),
        Trigger.LEASE_LOST: RenewAnswered(1, Renewed((-1.0,))),
        Trigger.LOAD_ADMITTED: LOAD,
        Trigger.LOAD_TOO_LATE: LOAD,
        Trigger.LOAD_FAILED: ReadEnded(is_ok=False),
        Trigger.NOTHING_TO_READ: NothingToRead(ReadReason.FULL_LOCAL_HIT),
        Trigger.READ_ENDED: ReadEnded(is_ok=True),
        Trigger.REQUEST_ENDED: RequestEnded(),
    }
    return facts[trigger]


def trigger_it(made: Fetch, trigger: Trigger) -> None:
    match trigger:
        case Trigger.START:
            made.start(0.0)
        case Trigger.ACQUIRE_TIMED_OUT:
            made.tick(LIMITS.acquire_timeout_s)
        case Trigger.WAITED_TOO_LONG:
            made.tick(LIMITS.total_wait_s)
        case Trigger.LOAD_TOO_LATE:
            made.on(LOAD, now_s=LAST_SUBMIT_AT_S)
        case _:
            made.on(fact_for(trigger, made), now_s=0.5)


def start_of(state: State, trigger: Trigger) -> Fetch:
    if state is not State.ENDED or trigger not in (Trigger.LOAD_TOO_LATE, Trigger.LOAD_FAILED):
        return IN_STATE[state]()
    made = leased()
    made.tick(LAST_SUBMIT_AT_S)
    if trigger is Trigger.LOAD_FAILED:
        made.on(LOAD, now_s=LAST_SUBMIT_AT_S)
    return made


@pytest.mark.parametrize(("state", "trigger"), TRANSITIONS)
def test_every_row_of_the_table_happens(state: State, trigger: Trigger, monkeypatch: pytest.MonkeyPatch) -> None:
    made = start_of(state, trigger)
    moves: list[tuple[State, Trigger]] = []
    move = Fetch._move

    def note(self: Fetch, trigger: Trigger) -> None:
        moves.append((self.state, trigger))
        move(self, trigger)

    monkeypatch.setattr(Fetch, "_move", note)
    assert made.state is state
    trigger_it(made, trigger)
    assert (state, trigger) in moves
    assert made.state is TRANSITIONS[state, trigger]


LOCAL_MISUSE = [
    (state, trigger)
    for state, trigger in itertools.product(State, Trigger)
    if (state, trigger) not in TRANSITIONS
    and trigger
    in (Trigger.LOAD_ADMITTED, Trigger.NOTHING_TO_READ, Trigger.READ_ENDED, Trigger.GRANTED, Trigger.RENEWED)
]


@pytest.mark.parametrize(("state", "trigger"), LOCAL_MISUSE)
def test_a_fact_that_cannot_be_true_is_refused_and_changes_nothing(state: State, trigger: Trigger) -> None:
    made = IN_STATE[state]()
    fact = fact_for(trigger, made)
    if isinstance(fact, LoadAdmitted | ReadEnded):
        # Not a repetition of what it has already been told.
        fact = LoadAdmitted(4, 6, (31, 32, 33)) if isinstance(fact, LoadAdmitted) else ReadEnded(is_ok=True, detail="x")
    before = (repr(made), made.next_deadline_at_s(), made.offer(0))
    with pytest.raises(LocalProtocolError, match=str(trigger)):
        made.on(fact, now_s=0.5)
    assert (repr(made), made.next_deadline_at_s(), made.offer(0)) == before


def test_a_fact_of_another_kind_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        leased().on("hello", now_s=0.0)  # type: ignore[arg-type]


# -- duplicates and conflicts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (leased, AcquireAnswered(GRANT)),
        (reading, AcquireAnswered(GRANT)),
        (ended, AcquireAnswered(GRANT)),
        (reading, LOAD),
        (draining, LOAD),
        (ended, LOAD),
        (ended, ReadEnded(is_ok=True)),
        (abandoned, RequestEnded()),
        (draining, RequestEnded()),
        (ended, RequestEnded()),
        (leased, PeerFailed("timed out")),
        (ended, PeerFailed("timed out")),
        (ended, NothingToRead()),
        (leased, AcquireAnswered(Denied(DenyReason.UNKNOWN_HANDLE))),
    ],
)
def test_a_repeated_or_overtaken_fact_changes_nothing(make: Callable[[], Fetch], fact: Fact) -> None:
    made = make()
    before = repr(made)
    assert made.on(fact, now_s=0.5) == ()
    assert repr(made) == before


def test_starting_twice_asks_once() -> None:
    made = acquiring()
    assert made.start(0.1) == ()


def test_a_second_lease_for_one_acquire_is_given_back_without_dropping_what_is_read() -> None:
    second = msgspec.structs.replace(GRANT, lease_id="lease-2")
    for made in (leased(), reading(), draining()):
        assert made.on(AcquireAnswered(second), now_s=0.5) == (SendRelease(Release(("lease-2",), drop=False)),)
        assert made.on(AcquireAnswered(second), now_s=0.6) == ()


@pytest.mark.parametrize(
    "end", [lambda made: made.tick(2.0), lambda made: made.on(PeerFailed("x"), now_s=0.1), lambda made: None]
)
def test_a_lease_that_comes_too_late_is_given_back(end: Callable[[Fetch], object]) -> None:
    made = acquiring()
    end(made)
    made.on(RequestEnded(), now_s=2.1)
    assert made.on(AcquireAnswered(GRANT), now_s=2.2) == (DROP,)
    assert made.is_drained


@pytest.mark.parametrize(
    "conflict",
    [
        LoadAdmitted(0, 11, (21, 22, 23)),
        LoadAdmitted(0, 0, (21, 22, 23)),
        LoadAdmitted(3, 7, (21, 22, 23)),
        LoadAdmitted(0, 10, (21, 22)),
        LoadAdmitted(0, 10, (21, 22, 21)),
        LoadAdmitted(0, 10, (21, 0, 23)),
    ],
)
def test_a_load_that_was_never_offered_is_refused_and_changes_nothing(conflict: LoadAdmitted) -> None:
    made = leased()
    with pytest.raises(LocalProtocolError):
        made.on(conflict, now_s=0.2)
    assert made.state is State.LEASED
    assert isinstance(made.on(LOAD, now_s=0.3)[0], StartRead)


# -- cancel in every state ---------------------------------------------------------------------------


def ends_drained(made: Fetch) -> list[object]:
    actions: list[object] = [*made.on(RequestEnded(), now_s=0.5)]
    if made.state is State.DRAINING:
        assert not made.is_drained
        actions += made.on(ReadEnded(is_ok=True), now_s=0.6)
    if made.state is State.ABANDONED:
        assert not made.is_drained
        actions += made.on(AcquireAnswered(GRANT), now_s=0.6)
    assert made.is_drained
    return actions


@pytest.mark.parametrize("state", State)
def test_cancel_in_every_state_ends_drained(state: State) -> None:
    made = IN_STATE[state]()
    outcome_before = made.outcome
    actions = ends_drained(made)
    is_lease_out = state not in (State.NEW, State.ENDED)
    assert actions == ([DROP] if is_lease_out else [])
    assert made.outcome is (outcome_before or Outcome.ABORTED)
    assert made.next_deadline_at_s() is None


def test_an_abandoned_acquire_that_is_never_answered_ends_at_its_timeout() -> None:
    made = abandoned()
    assert made.next_deadline_at_s() == 2.0
    assert made.tick(2.0) == ()
    assert made.is_drained
    assert made.outcome is Outcome.ABORTED


@pytest.mark.parametrize("num_steps", range(12))
def test_an_abort_after_any_number_of_steps_leaves_nothing_behind_through_the_pair(num_steps: int) -> None:
    pair = HandoffPair()
    pair.hold(HANDLE, TOKENS)
    request = pair.begin(HANDLE, TOKENS)

    def next_step() -> None:
        if pair.link:
            pair.deliver()
        elif request.read is not None and request.read.pairs:
            pair.copy_block(request)
        elif request.read is not None:
            pair.end_read(request)
        elif request.fetch.offer(0).num_tokens:
            pair.admit(request, 0, request.fetch.offer(0))

    for _ in range(num_steps):
        next_step()
    pair.end_request(request)
    pair.check()
    pair.pump()
    pair.drain()


# -- offers ------------------------------------------------------------------------------------------


def test_asking_changes_nothing() -> None:
    made = leased()
    before = repr(made)
    assert {made.offer(0) for _ in range(3)} == {Offer(10, ReadReason.READ)}
    assert made.offer(8) == Offer(2, ReadReason.READ)
    assert repr(made) == before


def test_a_full_local_hit_does_not_wait_for_the_peer() -> None:
    made = fetch(TOKENS[:9])
    made.start(0.0)
    assert made.offer(0).is_pending
    assert made.offer(8) == Offer(0, ReadReason.FULL_LOCAL_HIT)
    assert made.on(NothingToRead(ReadReason.FULL_LOCAL_HIT), now_s=0.1) == ()
    assert (made.state, made.outcome) == (State.ABANDONED, Outcome.FULL_LOCAL_HIT)
    grant = msgspec.structs.replace(GRANT, num_verified_tokens=9)
    assert made.on(AcquireAnswered(grant), now_s=0.2) == (DROP,)
    assert made.outcome is Outcome.FULL_LOCAL_HIT


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (ReadReason.FULL_LOCAL_HIT, Outcome.FULL_LOCAL_HIT),
        (ReadReason.LOCAL_COVERS_VERIFIED, Outcome.LOCAL_COVERS_VERIFIED),
        (ReadReason.BELOW_THRESHOLD, Outcome.BELOW_THRESHOLD),
        (ReadReason.READ, Outcome.ENGINE_DECLINED),
        (None, Outcome.ENGINE_DECLINED),
    ],
)
def test_nothing_to_read_gives_the_lease_back_and_says_why(reason: ReadReason | None, outcome: Outcome) -> None:
    made = leased()
    assert made.on(NothingToRead(reason), now_s=0.2) == (DROP,)
    assert (made.state, made.outcome) == (State.ENDED, outcome)


def test_a_threshold_makes_small_reads_not_worth_it() -> None:
    made = leased(limits=dataclasses.replace(LIMITS, recompute_threshold_tokens=7))
    assert made.offer(0) == Offer(10, ReadReason.READ)
    assert made.offer(4) == Offer(0, ReadReason.BELOW_THRESHOLD)


@pytest.mark.parametrize("reason", DenyReason)
def test_a_denial_is_an_outcome_of_its_own(reason: DenyReason) -> None:
    made = acquiring()
    assert made.on(AcquireAnswered(Denied(reason, "why")), now_s=0.1) == ()
    assert (made.outcome, made.detail) == (Outcome(f"denied_{reason}"), "why")
    assert made.offer(0) == Offer(0)
    assert made.is_drained


# -- answers that make no sense ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"num_verified_tokens": 0},
        {"num_verified_tokens": -4},
        {"num_verified_tokens": 11},
        {"num_verified_tokens": 9},
        {"block_ids": (5, 6)},
        {"block_ids": ()},
        {"block_ids": (5, 6, 6)},
        {"block_ids": (5, 0, 6)},
        {"block_ids": (5, -3, 6)},
        {"incarnation": "life-0"},
        {"remaining_s": 0.0},
        {"remaining_s": -1.0},
        {"remaining_s": math.nan},
        {"remaining_s": math.inf},
    ],
)
def test_a_nonsensical_grant_is_refused_and_its_lease_given_back(changes: dict[str, object]) -> None:
    made = acquiring()
    assert made.on(AcquireAnswered(msgspec.structs.replace(GRANT, **changes)), now_s=0.1) == (DROP,)
    assert (made.state, made.outcome) == (State.ENDED, Outcome.BAD_ANSWER)
    assert made.detail


def test_a_grant_without_a_lease_id_has_nothing_to_give_back() -> None:
    made = acquiring()
    assert made.on(AcquireAnswered(msgspec.structs.replace(GRANT, lease_id="")), now_s=0.1) == ()
    assert made.outcome is Outcome.BAD_ANSWER


def test_more_blocks_than_needed_are_no_harm() -> None:
    made = leased(msgspec.structs.replace(GRANT, block_ids=(5, 6, 9, 12), num_verified_tokens=8))
    assert made.offer(0) == Offer(8, ReadReason.READ)


@pytest.mark.parametrize("remaining_s", [(), (30.0, 30.0), (math.nan,), (math.inf,)])
def test_a_nonsensical_renewal_counts_as_none(remaining_s: tuple[float, ...]) -> None:
    made = leased()
    (renew,) = made.tick(10.0)
    assert isinstance(renew, SendRenew)
    assert made.on(RenewAnswered(renew.ordinal, Renewed(remaining_s)), now_s=10.1) == ()
    assert made.tick(LAST_SUBMIT_AT_S - 0.001) != (DROP,)
    assert made.tick(LAST_SUBMIT_AT_S) == (DROP,)
    assert made.outcome is Outcome.LEASE_LOST


def test_a_peer_that_grants_more_than_asked_is_not_trusted_with_it() -> None:
    made = leased(msgspec.structs.replace(GRANT, remaining_s=1e6))
    assert not made.is_read_trustworthy(LEASE_ENDS_AT_S)


# -- time --------------------------------------------------------------------------------------------


def test_an_unanswered_acquire_times_out() -> None:
    made = acquiring()
    assert made.next_deadline_at_s() == 2.0
    assert made.tick(1.999) == ()
    assert made.offer(0).is_pending
    assert made.tick(2.0) == ()
    assert (made.state, made.outcome) == (State.ENDED, Outcome.ACQUIRE_TIMED_OUT)


def test_a_peer_that_fails_is_an_outcome_with_its_detail() -> None:
    made = acquiring()
    made.on(PeerFailed("connection refused"), now_s=0.1)
    assert (made.outcome, made.detail) == (Outcome.PEER_FAILED, "connection refused")


def test_a_waiting_request_renews_every_third_of_its_lease() -> None:
    made = leased()
    sent_at_s = []
    for _ in range(5):
        at_s = made.next_deadline_at_s()
        assert at_s is not None
        (renew,) = made.tick(at_s)
        assert renew == SendRenew(Renew(("lease-1",), 30.0), len(sent_at_s) + 1, 10.0)
        sent_at_s.append(at_s)
        made.on(RenewAnswered(len(sent_at_s), Renewed((30.0,))), now_s=at_s + 0.1)
    assert sent_at_s == [10.0, 20.0, 30.0, 40.0, 50.0]
    assert made.is_read_trustworthy(50.0 + LEASE_ENDS_AT_S - 0.01)


def test_a_short_grant_is_renewed_in_thirds_of_what_was_granted() -> None:
    made = leased(msgspec.structs.replace(GRANT, remaining_s=6.0))
    assert made.next_deadline_at_s() == 2.0
    made.tick(2.0)
    made.on(RenewAnswered(1, Renewed((6.0,))), now_s=2.1)
    assert made.next_deadline_at_s() == 4.0


def test_two_lost_renewals_do_not_lose_the_lease_but_three_do() -> None:
    made = leased()
    assert [len(made.tick(at_s)) for at_s in (10.0, 20.0)] == [1, 1]
    made.on(PeerFailed("timed out"), now_s=20.1)
    assert made.state is State.LEASED
    assert made.next_deadline_at_s() == LAST_SUBMIT_AT_S
    assert made.tick(LAST_SUBMIT_AT_S) == (DROP,)
    assert made.outcome is Outcome.LEASE_LOST


def test_a_lease_is_counted_from_when_it_was_asked_for() -> None:
    made = acquiring()
    made.on(AcquireAnswered(GRANT), now_s=1.9)
    assert made.is_read_trustworthy(LEASE_ENDS_AT_S - 0.001)
    assert not made.is_read_trustworthy(LEASE_ENDS_AT_S)


def test_an_answer_to_a_superseded_renewal_extends_nothing() -> None:
    made = leased()
    made.tick(10.0)
    made.tick(20.0)
    made.on(RenewAnswered(1, Renewed((30.0,))), now_s=20.1)
    assert not made.is_read_trustworthy(LEASE_ENDS_AT_S)
    made.on(RenewAnswered(2, Renewed((20.0,))), now_s=20.2)
    assert made.is_read_trustworthy(39.9)
    made.on(RenewAnswered(2, Renewed((30.0,))), now_s=20.3)
    assert not made.is_read_trustworthy(40.0)


def test_a_lost_lease_withdraws_the_offer() -> None:
    made = leased()
    made.tick(10.0)
    assert made.on(RenewAnswered(1, Renewed((-1.0,))), now_s=10.1) == (DROP,)
    assert made.outcome is Outcome.LEASE_LOST
    assert made.offer(0) == Offer(0)


def test_a_request_that_waits_too_long_gives_up() -> None:
    made = leased(limits=dataclasses.replace(LIMITS, total_wait_s=15.0))
    made.tick(10.0)
    assert made.next_deadline_at_s() == 15.0
    assert made.tick(15.0) == (DROP,)
    assert made.outcome is Outcome.WAITED_TOO_LONG


def test_a_read_is_submitted_a_margin_before_the_leases_end_and_may_take_its_time_then() -> None:
    made = leased()
    (read,) = made.on(LOAD, now_s=25.0)
    assert isinstance(read, StartRead)
    assert (read.budget_s, read.submit_within_s) == (LIMITS.read_timeout_s, LAST_SUBMIT_AT_S - 25.0)


SHORT = msgspec.structs.replace(GRANT, remaining_s=2.0)


def test_a_long_read_under_a_short_grant_goes_on_for_as_long_as_the_lease_is_renewed() -> None:
    made = leased(SHORT)
    (read,) = made.on(LOAD, now_s=0.5)
    assert isinstance(read, StartRead)
    assert read.budget_s == LIMITS.read_timeout_s
    assert read.submit_within_s == pytest.approx(2.0 * (1 - MAX_CLOCK_RATE_SKEW) - 1.0 - 0.5)
    for ordinal in range(1, 7):
        at_s = made.next_deadline_at_s()
        assert at_s is not None
        assert isinstance(made.tick(at_s)[0], SendRenew)
        made.on(RenewAnswered(ordinal, Renewed((5.0,))), now_s=at_s + 0.01)
    assert made.next_deadline_at_s() is None  # by then the read has ended or failed
    assert made.on(ReadEnded(is_ok=True), now_s=10.4) == (DROP,)
    assert made.outcome is Outcome.READ_OK


def test_a_long_read_whose_short_lease_is_not_renewed_is_not_believed() -> None:
    made = leased(SHORT)
    made.on(LOAD, now_s=0.5)
    assert [len(made.tick(at_s)) for at_s in (2.0 / 3, 4.0 / 3)] == [1, 1]
    assert made.next_deadline_at_s() is None
    assert made.on(ReadEnded(is_ok=True), now_s=2.0) == (DROP,)
    assert made.outcome is Outcome.READ_TOO_LATE


def test_a_lost_renewal_of_a_short_grant_is_sent_again_before_the_lease_ends() -> None:
    made = leased(msgspec.structs.replace(GRANT, remaining_s=6.0))
    assert made.tick(2.0) == (SendRenew(Renew(("lease-1",), 30.0), 1, 2.0),)
    assert made.next_deadline_at_s() == 4.0
    made.tick(4.0)
    made.on(RenewAnswered(2, Renewed((30.0,))), now_s=4.1)
    assert made.next_deadline_at_s() == 14.0


@pytest.mark.parametrize("remaining_s", [1.0, 0.5, 1e-9])
def test_a_grant_that_leaves_no_time_to_begin_is_given_back_and_nothing_is_read(remaining_s: float) -> None:
    made = leased(msgspec.structs.replace(GRANT, remaining_s=remaining_s))
    assert made.tick(0.1) == (DROP,)
    assert made.outcome is Outcome.LEASE_LOST
    assert made.offer(0) == Offer(0)


def test_no_read_starts_within_the_margin_and_the_load_is_failed() -> None:
    made = leased()
    assert made.on(LOAD, now_s=LAST_SUBMIT_AT_S) == (DROP, FailLoad(Outcome.LEASE_LOST))
    assert made.outcome is Outcome.LEASE_LOST
    assert made.on(ReadEnded(is_ok=False), now_s=LAST_SUBMIT_AT_S) == ()
    with pytest.raises(LocalProtocolError):
        made.on(ReadEnded(is_ok=True), now_s=LAST_SUBMIT_AT_S)


def test_a_load_that_is_admitted_just_after_the_lease_was_lost_is_failed_once() -> None:
    made = leased()
    made.tick(LAST_SUBMIT_AT_S)
    assert made.on(LOAD, now_s=LAST_SUBMIT_AT_S) == (FailLoad(Outcome.LEASE_LOST),)
    assert made.on(LOAD, now_s=LAST_SUBMIT_AT_S) == ()


@pytest.mark.parametrize(
    ("is_ok", "now_s", "outcome"),
    [
        (True, LEASE_ENDS_AT_S - 0.001, Outcome.READ_OK),
        (True, LEASE_ENDS_AT_S, Outcome.READ_TOO_LATE),
        (False, 1.0, Outcome.READ_FAILED),
        (False, LEASE_ENDS_AT_S, Outcome.READ_FAILED),
    ],
)
def test_a_read_counts_only_if_it_succeeded_in_time(is_ok: bool, now_s: float, outcome: Outcome) -> None:
    made = reading()
    assert made.on(ReadEnded(is_ok, "detail"), now_s=now_s) == (DROP,)
    assert (made.outcome, made.detail) == (outcome, "detail")


def test_a_read_under_a_lease_that_the_peer_has_lost_is_not_believed() -> None:
    made = leased()
    made.tick(10.0)
    made.on(LOAD, now_s=11.0)
    assert made.on(RenewAnswered(1, Renewed((-1.0,))), now_s=11.1) == ()
    assert made.next_deadline_at_s() is None
    assert made.on(ReadEnded(is_ok=True), now_s=11.2) == (DROP,)
    assert made.outcome is Outcome.READ_TOO_LATE


def test_a_read_renews_its_lease_but_not_beyond_its_budget() -> None:
    made = leased()
    made.on(LOAD, now_s=5.0)
    assert made.next_deadline_at_s() == 10.0
    assert isinstance(made.tick(10.0)[0], SendRenew)
    made.on(RenewAnswered(1, Renewed((30.0,))), now_s=10.1)
    assert made.next_deadline_at_s() is None
    assert made.tick(1e9) == ()


def test_an_aborted_read_is_awaited_without_renewing() -> None:
    made = draining()
    assert made.next_deadline_at_s() is None
    assert made.tick(1e9) == ()
    assert not made.is_drained
    assert made.on(ReadEnded(is_ok=True), now_s=5.0) == (DROP,)
    assert made.outcome is Outcome.ABORTED


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *itertools.product(
            ["acquire_timeout_s", "lease_s", "read_timeout_s", "submit_margin_s", "total_wait_s"],
            [0.0, -1.0, math.nan, math.inf],
        ),
        ("submit_margin_s", 30.0),
        ("recompute_threshold_tokens", -1),
    ],
)
def test_limits_that_cannot_work_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        FetchLimits(**{**dataclasses.asdict(LIMITS), field: value})


def test_an_answer_that_arrives_after_the_next_renewal_is_not_counted_from_that_one_through_the_pair() -> None:
    pair = HandoffPair()
    pair.hold(HANDLE, TOKENS)
    request = pair.begin(HANDLE, TOKENS)
    pair.pump()
    for at_s in (10.001, 20.002):
        pair.world_s = at_s
        pair.tick()
        pair.deliver(0)
    pair.admit(request, 0, request.fetch.offer(0))
    pair.world_s = pair.lease_end_s(request) + 1e-6
    pair.collect()
    pair.end_read(request)
    assert request.fetch.outcome is Outcome.READ_TOO_LATE


def test_a_restarted_peer_denies_and_the_request_recomputes_through_the_pair() -> None:
    pair = HandoffPair()
    pair.hold(HANDLE, TOKENS)
    request: Request = pair.begin(HANDLE, TOKENS)
    pair.restart_holder()
    pair.pump()
    assert request.fetch.outcome is Outcome.DENIED_OTHER_INCARNATION
    pair.drain()


def test_a_peer_that_restarts_during_the_read_fails_it_through_the_pair() -> None:
    pair = HandoffPair()
    pair.hold(HANDLE, TOKENS)
    request = pair.begin(HANDLE, TOKENS)
    pair.pump()
    pair.admit(request, 0, request.fetch.offer(0))
    pair.copy_block(request)
    pair.restart_holder()
    pair.end_read(request)
    assert request.fetch.outcome is Outcome.READ_FAILED
    pair.drain()
