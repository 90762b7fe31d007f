from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvshuttle.errors import LocalProtocolError, RemoteProtocolError
from kvshuttle.handoff import (
    REGISTRATION_TRANSITIONS,
    Close,
    Declined,
    DeclineReason,
    Denied,
    DenyReason,
    Ending,
    LeaseLedger,
    Open,
    Orders,
    OrdersTaken,
    Proceeding,
    PushSource,
    Registered,
    Registration,
    RegistrationState,
    RegistrationTrigger,
    Release,
    Stage,
    Withdrawn,
)
from kvshuttle.ids import Handle
from support.handoff_values import FINGERPRINT, HANDLE, acquire, chain_of
from support.push_pair import PushPair
from support.push_values import (
    BLOCKS,
    CHAIN,
    DESTINATIONS,
    GRANT,
    TOKENS,
    card,
    proceed,
    push_source,
    register,
    withdraw,
)

if TYPE_CHECKING:
    from collections.abc import Callable

OTHER_CHAIN = chain_of((7, *TOKENS[1:]))
DRAINED, UNDRAINED = Withdrawn(is_drained=True), Withdrawn(is_drained=False)
HELD = Ending(is_taken=True, is_held=True)
UNKNOWN = Declined(DeclineReason.UNKNOWN_REGISTRATION)


class Holder:
    """A push source with its ledger and workers that do what they are told."""

    def __init__(self, num_ranks: int = 1, **options: int) -> None:
        self.push, self.ledger = push_source(num_ranks, **options)
        self.num_ranks = num_ranks
        self.done: list[Open | Close] = []
        self.undrained: set[str] = set()

    def work(self, now_s: float = 0.0, ranks: tuple[int, ...] | None = None) -> None:
        """Workers do every order that is due and answer."""
        for rank in range(self.num_ranks) if ranks is None else ranks:
            message = self.push.take_orders(rank, now_s)
            if message is not None:
                self.done += message.orders
                taken = OrdersTaken(message.first + len(message.orders), tuple(self.undrained))
                self.push.on_orders_taken(rank, taken, now_s=now_s)

    def register(self, now_s: float = 0.0, **changes: object) -> Registered | Declined:
        return self.push.register(register(self.num_ranks, **changes), now_s=now_s)

    def opened(self) -> Holder:
        self.push.begin("req-1", HANDLE, CHAIN, now_s=0.0)
        assert self.register() == GRANT
        assert self.push.proceed(proceed(), now_s=0.1) == Proceeding(30.0, Stage.COMPUTING)
        self.work()
        return self

    def finish(self, now_s: float = 1.0, *, is_computed: bool = True, duration_s: float = 30.0) -> Ending:
        return self.push.finish("req-1", BLOCKS, is_computed=is_computed, duration_s=duration_s, now_s=now_s)

    def withdraw(self, now_s: float = 1.0, *, drop: bool = False) -> Withdrawn | Declined:
        return self.push.withdraw(withdraw(drop=drop), now_s=now_s)

    def freed(self, now_s: float) -> list[tuple[int, ...]]:
        self.push.tick(now_s)
        self.work(now_s)
        self.ledger.expire(now_s)
        return self.ledger.take_freed()

    @property
    def is_drained(self) -> bool:
        self.push.take_sources_over()
        return self.push.is_drained and self.ledger.is_drained


# -- the happy path ----------------------------------------------------------------------------------


def test_a_request_is_written_held_and_let_go_through_the_pair() -> None:
    pair = PushPair(num_ranks=2)
    request = pair.decode(Handle("x"), TOKENS)
    prefill = pair.holder.begin(Handle("x"), TOKENS, 0.0)
    assert repr(pair.holder.push) == "<PushSource sources=1 registrations=0>"
    pair.admit(request, 0, request.intake.offer(0))
    pair.exchange()
    pair.reader_step()
    assert repr(pair.holder.push) == "<PushSource sources=1 registrations=1>"
    pair.holder.step(prefill, 10, 0.0, rolls_back=False, waits=True)
    pair.holder.finish(prefill, 30.0, 0.0)
    assert repr(pair.holder.ledger) == "<LeaseLedger holdings=1 leases=1 held_blocks=3>"
    for _ in range(2):
        pair.pump()
        pair.reader_step()
    pair.holder.collect(0.0)
    assert pair.holder.push.is_drained
    assert pair.holder.pool.num_free == pair.holder.pool.num_blocks
    pair.drain()


def test_the_workers_are_told_what_goes_where_once_the_reader_says_so() -> None:
    holder = Holder(num_ranks=2)
    holder.push.begin("req-1", HANDLE, CHAIN, now_s=0.0)
    assert holder.register() == GRANT
    holder.work()
    assert holder.done == []
    holder.push.proceed(proceed(), now_s=0.1)
    holder.work()
    workers = card(num_ranks=2).workers
    assert holder.done == [Open("lease-1", "reg-1", "req-1", 0, DESTINATIONS, worker) for worker in workers]


@pytest.mark.parametrize("order", ["request first", "registered first", "cleared first", "held first"])
def test_request_and_registration_are_joined_in_either_order(order: str) -> None:
    holder = Holder()
    if order in ("request first", "held first"):
        holder.push.begin("req-1", HANDLE, CHAIN, now_s=0.0)
    if order == "held first":
        assert holder.finish() == HELD
    holder.register(now_s=1.0)
    if order == "cleared first":
        assert holder.push.proceed(proceed(), now_s=1.1) == Proceeding(30.0, Stage.AWAITING_PREFILL)
    if order in ("registered first", "cleared first"):
        holder.push.begin("req-1", HANDLE, CHAIN, now_s=1.2)
    stage = Stage.COMPUTED if order == "held first" else Stage.COMPUTING
    assert holder.push.proceed(proceed(), now_s=1.3) == Proceeding(30.0, stage)
    holder.work(1.3)
    assert [type(each) for each in holder.done] == [Open]


# -- what is kept ------------------------------------------------------------------------------------


def test_blocks_are_pinned_from_the_end_of_the_request_until_nothing_reads_them() -> None:
    holder = Holder().opened()
    holder.undrained = {"lease-1"}
    assert holder.finish(duration_s=5.0) == HELD
    assert holder.freed(29.0) == []
    assert holder.freed(31.0) == []
    assert holder.done[-1] == Close("lease-1", "lease_expired")
    holder.undrained.clear()
    assert holder.freed(40.0) == [BLOCKS]
    assert holder.is_drained


def test_a_withdrawal_is_confirmed_when_every_rank_has_closed_and_drained() -> None:
    holder = Holder(num_ranks=2).opened()
    assert holder.withdraw() == UNDRAINED
    holder.work(1.0, ranks=(0,))
    assert holder.withdraw() == UNDRAINED
    holder.undrained = {"lease-1"}
    holder.work(1.1, ranks=(1,))
    assert holder.withdraw(1.1) == UNDRAINED
    holder.undrained.clear()
    holder.work(2.0, ranks=(1,))
    assert holder.withdraw(2.0) == DRAINED
    assert holder.withdraw(2.0) == DRAINED


def test_a_withdrawal_before_the_first_proceed_is_confirmed_at_once_and_for_ever() -> None:
    holder = Holder()
    holder.push.begin("req-1", HANDLE, CHAIN, now_s=0.0)
    holder.register()
    assert holder.withdraw() == DRAINED
    assert holder.push.proceed(proceed(), now_s=1.1) == UNKNOWN
    holder.work(1.1)
    assert holder.done == []


def test_an_aborted_requests_blocks_are_fenced_while_they_are_read() -> None:
    holder = Holder().opened()
    holder.undrained = {"lease-1"}
    assert holder.finish(is_computed=False) == Ending(is_taken=True, is_held=False)
    assert holder.ledger.acquire(acquire(TOKENS), now_s=1.0) == Denied(DenyReason.UNKNOWN_HANDLE)
    assert holder.push.proceed(proceed(), now_s=1.1) == Declined(DeclineReason.PREFILL_ENDED)
    assert holder.freed(2.0) == []
    assert holder.done[-1] == Close("lease-1", "prefill_ended")
    holder.undrained.clear()
    assert holder.freed(9.0) == [BLOCKS]
    assert holder.is_drained


def test_an_aborted_request_that_nobody_is_written_from_is_not_kept() -> None:
    holder = Holder()
    holder.push.begin("req-1", HANDLE, CHAIN, now_s=0.0)
    holder.register()
    assert holder.finish(is_computed=False) == Ending(is_taken=False, is_held=False)
    assert holder.push.proceed(proceed(), now_s=1.1) == UNKNOWN
    assert holder.register(now_s=1.2) == Declined(DeclineReason.PREFILL_ENDED)
    assert holder.is_drained


def test_a_full_ledger_ends_the_push_without_freeing_under_it() -> None:
    holder = Holder(max_holdings=1).opened()
    holder.ledger.hold(Handle("other"), block_ids=(1,), chain=chain_of((1,)), duration_s=60.0, now_s=0.0)
    holder.undrained = {"lease-1"}
    assert holder.finish() == Ending(is_taken=True, is_held=False)
    assert holder.freed(2.0) == []
    holder.undrained.clear()
    assert holder.freed(9.0) == [BLOCKS]


def test_after_a_withdrawal_the_prompt_is_still_there_to_be_read() -> None:
    holder = Holder().opened()
    holder.finish()
    holder.withdraw()
    assert holder.freed(1.5) == []
    assert not isinstance(holder.ledger.acquire(acquire(TOKENS), now_s=1.6), Denied)


def test_a_reader_that_has_everything_lets_the_holding_go() -> None:
    holder = Holder().opened()
    holder.finish()
    holder.withdraw(drop=True)
    assert holder.freed(1.5) == [BLOCKS]
    assert holder.push.take_sources_over() == ("req-1",)
    assert holder.push.take_sources_over() == ()
    assert holder.is_drained


@pytest.mark.parametrize("is_early", [True, False])
def test_what_nobody_needs_is_not_held(is_early: bool) -> None:
    holder = Holder()
    if is_early:
        holder.push.release(HANDLE)
    holder.push.begin("req-1", HANDLE, CHAIN, now_s=0.0)
    holder.push.release(HANDLE)
    assert holder.finish() == Ending(is_taken=False, is_held=False)
    assert holder.is_drained


def test_what_one_reader_does_not_need_another_still_gets() -> None:
    holder = Holder().opened()
    holder.push.release(HANDLE)
    assert holder.finish() == Ending(is_taken=True, is_held=False)
    assert holder.freed(2.0) == []
    holder.withdraw(2.0, drop=True)
    assert holder.freed(2.5) == [BLOCKS]


def test_equal_readers_of_one_source_each_have_their_pin() -> None:
    holder = Holder().opened()
    assert holder.register(registration_id="reg-2") == msgspec.structs.replace(GRANT, lease_id="lease-2")
    holder.push.proceed(proceed("lease-2"), now_s=0.2)
    holder.finish()
    holder.withdraw(drop=True)
    assert holder.freed(1.5) == []
    holder.push.withdraw(withdraw("lease-2", drop=True), now_s=2.0)
    assert holder.freed(2.5) == [BLOCKS]


def test_a_source_is_over_when_its_holding_has_gone() -> None:
    holder = Holder()
    holder.push.begin("req-1", HANDLE, CHAIN, now_s=0.0)
    holder.finish(duration_s=5.0)
    assert holder.push.take_sources_over() == ()
    holder.freed(6.0)
    assert holder.push.take_sources_over() == ("req-1",)
    assert holder.register(now_s=7.0) == Declined(DeclineReason.UNKNOWN_HANDLE)


def test_a_holding_that_has_just_gone_is_not_promised() -> None:
    holder = Holder()
    holder.push.begin("req-1", HANDLE, CHAIN, now_s=0.0)
    holder.finish()
    holder.ledger.release(Release(handles=(HANDLE,)), now_s=2.0)
    assert holder.register(now_s=2.0) == Declined(DeclineReason.UNKNOWN_HANDLE)


# -- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"incarnation": "life-0"}, DeclineReason.OTHER_INCARNATION),
        ({"fingerprint": msgspec.structs.replace(FINGERPRINT, kv_dtype="fp8")}, DeclineReason.INCOMPATIBLE),
        ({"workers": card(num_ranks=2).workers}, DeclineReason.INCOMPATIBLE),
        ({"links": OTHER_CHAIN.links, "tail": OTHER_CHAIN.tail}, DeclineReason.OTHER_TOKENS),
        ({"tail": b"x" * 16}, DeclineReason.OTHER_TOKENS),
    ],
)
def test_a_refusal_says_why_and_nothing_is_noted(changes: dict[str, object], reason: DeclineReason) -> None:
    holder = Holder()
    holder.push.begin("req-1", HANDLE, CHAIN, now_s=0.0)
    answer = holder.register(**changes)
    assert isinstance(answer, Declined)
    assert answer.reason is reason
    assert repr(holder.push) == "<PushSource sources=1 registrations=0>"


def test_a_reader_of_other_tokens_is_refused_when_the_request_arrives() -> None:
    holder = Holder()
    holder.register()
    holder.push.proceed(proceed(), now_s=0.1)
    holder.push.begin("req-1", HANDLE, OTHER_CHAIN, now_s=0.2)
    assert holder.push.proceed(proceed(), now_s=0.3) == UNKNOWN
    holder.work()
    assert holder.done == []


def test_registrations_are_bounded_in_number() -> None:
    holder = Holder(max_registrations=1)
    holder.register()
    answer = holder.register(handle="other")
    assert answer == Declined(DeclineReason.TOO_MANY, "1 registrations")


@pytest.mark.parametrize(
    "changes",
    [
        {"first_index": -1},
        {"first_index": 1},
        {"destination_block_ids": DESTINATIONS[:2]},
        {"destination_block_ids": (), "first_index": 3},
        {"destination_block_ids": (21, 21, 23)},
        {"destination_block_ids": (21, 0, 23)},
        {"registration_id": ""},
        {"num_tokens": 0},
        {"duration_s": math.nan},
        {"tail": b""},
    ],
)
def test_a_registration_that_contradicts_itself_is_the_peers_fault(changes: dict[str, object]) -> None:
    holder = Holder()
    with pytest.raises(RemoteProtocolError):
        holder.register(**changes)
    assert holder.is_drained


@pytest.mark.parametrize(
    "ask",
    [
        lambda push: push.proceed(proceed(incarnation="life-0"), now_s=1.0),
        lambda push: push.withdraw(withdraw(incarnation="life-0"), now_s=1.0),
    ],
)
def test_a_question_for_an_earlier_life_is_answered_with_its_end(ask: Callable[[PushSource], object]) -> None:
    answer = ask(Holder().opened().push)
    assert answer == Declined(DeclineReason.OTHER_INCARNATION, "this is life-1")


def test_a_request_that_begins_twice_is_a_bug() -> None:
    holder = Holder()
    holder.push.begin("req-1", HANDLE, CHAIN, now_s=0.0)
    with pytest.raises(LocalProtocolError, match="began twice"):
        holder.push.begin("req-1", HANDLE, CHAIN, now_s=0.0)


# -- time --------------------------------------------------------------------------------------------


def test_a_reader_that_is_not_heard_of_for_a_lease_is_written_to_no_more() -> None:
    holder = Holder().opened()
    assert holder.push.next_deadline_at_s() == 30.0
    assert holder.push.proceed(proceed(), now_s=20.0) == Proceeding(30.0, Stage.COMPUTING)
    holder.push.tick(49.9)
    holder.work(49.9)
    assert [type(each) for each in holder.done] == [Open]
    holder.push.tick(50.1)
    assert holder.push.proceed(proceed(), now_s=50.2) == UNKNOWN
    holder.work(50.2)
    assert holder.done[-1] == Close("lease-1", "lease_expired")
    assert holder.push.proceed(proceed(), now_s=50.3) == UNKNOWN


@pytest.mark.parametrize("is_cleared", [True, False])
def test_a_registration_without_a_request_expires(is_cleared: bool) -> None:
    holder = Holder()
    holder.register()
    if is_cleared:
        holder.push.proceed(proceed(), now_s=1.0)
    holder.push.tick(31.0)
    assert holder.is_drained
    assert holder.push.next_deadline_at_s() is None


def test_orders_wake_the_driver_until_they_are_taken() -> None:
    holder = Holder()
    holder.push.begin("req-1", HANDLE, CHAIN, now_s=0.0)
    holder.register()
    holder.push.proceed(proceed(), now_s=0.1)
    assert holder.push.next_deadline_at_s() == -math.inf
    message = holder.push.take_orders(0, 0.1)
    assert isinstance(message, Orders)
    assert holder.push.take_orders(0, 0.1) is None
    assert holder.push.next_deadline_at_s() == pytest.approx(0.12)
    assert holder.push.take_orders(0, 0.125) == message


# -- the table ---------------------------------------------------------------------------------------


def registered() -> Holder:
    holder = Holder()
    holder.register()
    return holder


def cleared() -> Holder:
    holder = registered()
    holder.push.proceed(proceed(), now_s=0.1)
    return holder


def closing() -> Holder:
    holder = Holder().opened()
    holder.withdraw()
    return holder


IN_STATE: dict[RegistrationState, Callable[[], Holder]] = {
    RegistrationState.REGISTERED: registered,
    RegistrationState.CLEARED: cleared,
    RegistrationState.OPEN: lambda: Holder().opened(),
    RegistrationState.CLOSING: closing,
}


def trigger_it(holder: Holder, state: RegistrationState, trigger: RegistrationTrigger) -> None:
    match trigger:
        case RegistrationTrigger.CLEARED | RegistrationTrigger.PROCEEDED:
            holder.push.proceed(proceed(), now_s=1.5)
        case RegistrationTrigger.OPENED:
            holder.push.begin("req-1", HANDLE, CHAIN, now_s=1.5)
            holder.push.proceed(proceed(), now_s=1.5)
        case RegistrationTrigger.WITHDRAWN:
            holder.withdraw(1.5)
        case RegistrationTrigger.EXPIRED:
            holder.push.tick(31.0)
        case RegistrationTrigger.SOURCE_LOST if state in (RegistrationState.OPEN, RegistrationState.CLOSING):
            holder.finish(is_computed=False)
        case RegistrationTrigger.SOURCE_LOST:
            holder.push.begin("req-1", HANDLE, OTHER_CHAIN, now_s=1.5)
        case RegistrationTrigger.DRAINED:
            holder.work(1.5)


@pytest.mark.parametrize(("state", "trigger"), REGISTRATION_TRANSITIONS)
def test_every_row_of_the_table_happens(
    state: RegistrationState, trigger: RegistrationTrigger, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = IN_STATE[state]()
    moves: list[tuple[RegistrationState, RegistrationTrigger, RegistrationState]] = []
    move = Registration.move

    def note(self: Registration, trigger: RegistrationTrigger) -> None:
        before = self.state
        move(self, trigger)
        moves.append((before, trigger, self.state))

    monkeypatch.setattr(Registration, "move", note)
    trigger_it(holder, state, trigger)
    assert (state, trigger, REGISTRATION_TRANSITIONS[state, trigger]) in moves


@pytest.mark.parametrize("state", IN_STATE)
def test_cancel_in_every_state_ends_drained(state: RegistrationState) -> None:
    holder = IN_STATE[state]()
    holder.withdraw(2.0, drop=True)
    holder.work(2.5)
    assert holder.withdraw(3.0, drop=True) == DRAINED
    if state in (RegistrationState.OPEN, RegistrationState.CLOSING):
        assert holder.finish(4.0) == Ending(is_taken=False, is_held=False)
    assert holder.is_drained


@pytest.mark.parametrize("state", IN_STATE)
def test_proceeding_twice_is_as_once(state: RegistrationState) -> None:
    holder = IN_STATE[state]()
    answers = [holder.push.proceed(proceed(), now_s=2.0) for _ in range(2)]
    assert answers[0] == answers[1]
    holder.work(2.0)
    assert sum(isinstance(each, Open) for each in holder.done) == (
        state in (RegistrationState.OPEN, RegistrationState.CLOSING)
    )


def test_blocks_kept_for_an_abort_are_nobodys_to_acquire_in_the_ledger() -> None:
    _, ledger = push_source()
    assert isinstance(ledger, LeaseLedger)
    lease_id = ledger.keep(BLOCKS)
    assert (ledger.num_holdings, ledger.num_held_blocks, ledger.handles()) == (1, 3, ())
    ledger.expire(1e9)
    assert ledger.take_freed() == []
    ledger.release(Release((lease_id,)), now_s=1e9)
    assert ledger.take_freed() == [BLOCKS]
    assert ledger.counters.kept == 1


def test_a_pin_outlives_everything_but_its_release() -> None:
    _, ledger = push_source()
    ledger.hold(HANDLE, block_ids=BLOCKS, chain=CHAIN, duration_s=1.0, now_s=0.0)
    assert ledger.pin(HANDLE, (1, 2, 3)) is None
    lease_id = ledger.pin(HANDLE, BLOCKS)
    assert lease_id is not None
    ledger.expire(1e6)
    ledger.release(Release(handles=(HANDLE,)), now_s=1e6)
    assert ledger.take_freed() == []
    assert not ledger.is_findable(HANDLE, BLOCKS)
    assert ledger.next_deadline_at_s() is None
    ledger.release(Release((lease_id,), drop=False), now_s=1e6)
    assert ledger.take_freed() == [BLOCKS]
    assert ledger.is_drained
