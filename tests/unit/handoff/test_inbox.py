from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshuttle.errors import LocalProtocolError, RemoteProtocolError
from kvshuttle.handoff import (
    EARLY_LIFE_S,
    INBOX_TRANSITIONS,
    Arrived,
    Commit,
    Fail,
    Inbox,
    Inboxes,
    InboxState,
    InboxTrigger,
    Notification,
    PushFailed,
    PushReceived,
    Written,
    decode_notification,
    encode_notification,
)
from kvshuttle.ids import Handle
from support.push_pair import PushPair
from support.push_values import TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable

W0, W1 = Written("r", 0, 0, 2), Written("r", 0, 1, 1)
COMMIT = Commit("r", 0, 2, 3)
RECEIVED = PushReceived("r")


def early(*notifications: Notification) -> Inbox:
    made = Inbox("r", born_at_s=0.0)
    for notification in notifications:
        made.on_notification(notification)
    return made


def expecting(*notifications: Notification) -> Inbox:
    made = early()
    made.expect(3)
    for notification in notifications:
        made.on_notification(notification)
    return made


def abandoned() -> Inbox:
    made = expecting()
    made.abandon()
    return made


IN_STATE: dict[InboxState, Callable[[], Inbox]] = {
    InboxState.EARLY: early,
    InboxState.EXPECTING: lambda: expecting(W0, W1),
    InboxState.COMPLETE: lambda: expecting(W0, W1, COMMIT),
    InboxState.FAILED: lambda: expecting(Fail("r", "write_failed")),
    InboxState.ABANDONED: abandoned,
}


def test_a_push_is_complete_when_its_last_piece_is_here_through_the_pair() -> None:
    pair = PushPair()
    request = pair.decode(Handle("x"), TOKENS)
    prefill = pair.holder.begin(Handle("x"), TOKENS, 0.0)
    pair.admit(request, 0, request.intake.offer(0))
    pair.reader_step()
    pair.holder.step(prefill, 10, 0.0, rolls_back=False, waits=True)
    (rank,) = pair.reader.ranks
    (box,) = rank.inboxes._inboxes.values()
    pair.exchange()
    while pair._work():
        pass
    while box.state is InboxState.EXPECTING:
        pair.deliver_note(len(pair.notes) - 1)
    assert repr(box).startswith("<Inbox reg-1-0 ABANDONED epoch=0 writes=2>")
    pair.drain()
    assert request.reports == [True]


@pytest.mark.parametrize("order", list(itertools.permutations([W0, W1, COMMIT])))
def test_the_pieces_may_come_in_any_order_and_twice(order: tuple[Notification, ...]) -> None:
    made = early()
    made.expect(3)
    events = [event for each in order for event in (*made.on_notification(each), *made.on_notification(each))]
    assert [event for event in events if isinstance(event, PushReceived)] == [RECEIVED]
    assert sum(event.num_blocks for event in events if isinstance(event, Arrived)) == 3
    assert made.state is InboxState.COMPLETE


@pytest.mark.parametrize("missing", [W0, W1, COMMIT])
def test_with_a_piece_missing_it_is_not_complete(missing: Notification) -> None:
    made = expecting(*(each for each in (W0, W1, COMMIT) if each != missing))
    assert made.state is InboxState.EXPECTING
    assert RECEIVED in made.on_notification(missing)


def test_what_comes_before_the_order_counts() -> None:
    made = early(W0, COMMIT, W1)
    assert made.expect(3) == (RECEIVED,)
    assert early(Fail("r", "why")).expect(3) == (PushFailed("r", "why"),)


def test_pieces_of_an_older_epoch_count_for_nothing() -> None:
    made = expecting(W0, COMMIT, Written("r", 1, 0, 2))
    assert made.on_notification(W1) == ()
    assert made.on_notification(Commit("r", 1, 2, 3)) == ()
    assert made.on_notification(Written("r", 1, 1, 1)) == (Arrived("r", 1), RECEIVED)


def test_a_commit_of_an_older_epoch_counts_for_nothing() -> None:
    made = expecting(Written("r", 1, 0, 2), Written("r", 1, 1, 1))
    assert made.on_notification(COMMIT) == ()
    assert made.state is InboxState.EXPECTING


@pytest.mark.parametrize(
    "pieces",
    [
        [Commit("r", 0, 2, 4)],
        [Commit("r", 0, 2, 2)],
        [W0, Written("r", 0, 1, 7), COMMIT],
        [W0, W1, Written("r", 0, 2, 1), COMMIT],
    ],
)
def test_a_commit_that_cannot_be_true_fails_it(pieces: list[Notification]) -> None:
    made = early()
    made.expect(3)
    events = [event for each in pieces for event in made.on_notification(each)]
    assert events[-1] == PushFailed("r", "bad_commit")
    assert made.state is InboxState.FAILED


def test_a_failure_is_the_end_even_if_the_rest_arrives() -> None:
    made = expecting(W0, Fail("r", "write_failed"))
    assert [event for each in (W1, COMMIT) for event in made.on_notification(each)] == [Arrived("r", 1)]
    assert made.state is InboxState.FAILED


def trigger_it(made: Inbox, trigger: InboxTrigger) -> None:
    match trigger:
        case InboxTrigger.EXPECTED:
            made.expect(3)
        case InboxTrigger.NOTED:
            made.on_notification(W0)
        case InboxTrigger.COMPLETED:
            made.on_notification(COMMIT)
        case InboxTrigger.FAILED:
            made.on_notification(Fail("r", "why"))
        case InboxTrigger.ABANDONED:
            made.abandon()


@pytest.mark.parametrize(("state", "trigger"), INBOX_TRANSITIONS)
def test_every_row_of_the_table_happens(state: InboxState, trigger: InboxTrigger) -> None:
    made = IN_STATE[state]()
    assert made.state is state
    trigger_it(made, trigger)
    assert made.state is INBOX_TRANSITIONS[state, trigger]


@pytest.mark.parametrize("state", [each for each in InboxState if each is not InboxState.EARLY])
def test_expecting_the_same_twice_is_a_bug(state: InboxState) -> None:
    made = IN_STATE[state]()
    with pytest.raises(LocalProtocolError, match="expected"):
        made.expect(3)
    assert made.state is state


@pytest.mark.parametrize("state", [each for each in InboxState if each is not InboxState.ABANDONED])
def test_abandoning_in_every_state_ends_drained(state: InboxState) -> None:
    made = Inboxes()
    made._inboxes["r"] = IN_STATE[state]()
    assert made.abandon("r") is (state is InboxState.COMPLETE)
    assert made.is_drained
    assert not made.abandon("r")


def test_leftovers_are_forgotten_after_a_while() -> None:
    made = Inboxes()
    made.on_notification(W0, now_s=5.0)
    made.expect("expected", 3, now_s=5.0)
    made.expire(5.0 + EARLY_LIFE_S - 1e-3)
    assert repr(made) == "<Inboxes 2 early=1>"
    made.expire(5.0 + EARLY_LIFE_S)
    assert repr(made) == "<Inboxes 1 early=0>"
    assert made.num_expecting == 1


def test_leftovers_are_few_whatever_comes() -> None:
    made = Inboxes(max_early=3)
    made.expect("expected", 3, now_s=0.0)
    for number in range(9):
        made.on_notification(Fail(f"stranger-{number}", ""), now_s=0.0)
    assert repr(made) == "<Inboxes 4 early=3>"
    assert made.on_notification(Fail("expected", ""), now_s=0.0) == (PushFailed("expected", "unspecified"),)


@pytest.mark.parametrize("notification", [W0, COMMIT, Fail("r", "why")])
def test_a_notification_survives_the_wire(notification: Notification) -> None:
    assert decode_notification(encode_notification(notification)) == notification


@given(st.binary(max_size=40))
def test_bytes_that_are_no_notification_are_the_peers_fault(payload: bytes) -> None:
    try:
        decode_notification(payload)
    except RemoteProtocolError as error:
        assert "undecodable" in str(error)  # noqa: PT017 - what it raises is what is checked


@given(st.lists(st.sampled_from([W0, W1, COMMIT, Fail("r", "x"), Written("r", 1, 0, 3), Commit("r", 1, 1, 3)])))
def test_at_most_one_result_whatever_comes(pieces: list[Notification]) -> None:
    made = early()
    made.expect(3)
    events = [event for each in pieces for event in made.on_notification(each)]
    assert sum(not isinstance(event, Arrived) for event in events) <= 1
