from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from kvshuttle.handoff import Close, Open, OrderCursor, OrderLog, Orders, OrdersTaken
from support.push_values import close_order, open_order

OPEN, CLOSE = open_order(), close_order()


def test_orders_are_done_once_and_then_not_sent_again() -> None:
    log, cursor = OrderLog(), OrderCursor()
    log.append(OPEN)
    log.append(CLOSE)
    message = log.due(0.0)
    assert message == Orders(0, (OPEN, CLOSE))
    assert cursor.take(message) == (OPEN, CLOSE)
    assert log.on_taken(OrdersTaken(cursor.next, ())) == ("lease-1",)
    assert log.is_drained
    assert log.due(100.0) is None
    assert log.next_due_at_s() is None


def test_an_order_that_comes_twice_or_late_does_nothing() -> None:
    cursor = OrderCursor()
    assert cursor.take(Orders(0, (OPEN,))) == (OPEN,)
    assert cursor.take(Orders(0, (OPEN,))) == ()
    assert cursor.take(Orders(0, (OPEN, CLOSE))) == (CLOSE,)
    assert cursor.take(Orders(0, (OPEN,))) == ()
    assert cursor.take(Orders(1, (CLOSE,))) == ()
    assert cursor.next == 2


def test_an_order_that_comes_before_its_turn_is_not_done() -> None:
    cursor = OrderCursor()
    assert cursor.take(Orders(1, (CLOSE,))) == ()
    assert cursor.next == 0


def test_new_orders_are_due_at_once_and_unanswered_ones_again_ever_more_slowly() -> None:
    log = OrderLog()
    log.append(OPEN)
    assert log.next_due_at_s() == -math.inf
    assert log.due(0.0) is not None
    sent_at_s = []
    for _ in range(8):
        at_s = log.next_due_at_s()
        assert at_s is not None
        assert log.due(at_s - 1e-6) is None
        assert log.due(at_s) == Orders(0, (OPEN,))
        sent_at_s.append(at_s)
    waits = [later - earlier for earlier, later in itertools.pairwise(sent_at_s)]
    assert waits == sorted(waits)
    assert waits[-1] == 1.0


def test_what_is_closed_is_asked_for_until_it_is_drained() -> None:
    log = OrderLog()
    log.append(CLOSE)
    log.due(0.0)
    assert log.on_taken(OrdersTaken(1, ("lease-1",))) == ()
    assert not log.is_drained
    assert log.due(1.0) == Orders(1, ())
    assert log.on_taken(OrdersTaken(1, ())) == ("lease-1",)
    assert log.on_taken(OrdersTaken(1, ())) == ()
    assert log.is_drained


def test_an_answer_that_is_older_than_the_close_does_not_drain_it() -> None:
    log = OrderLog()
    log.append(OPEN)
    log.due(0.0)
    log.append(CLOSE)
    assert log.on_taken(OrdersTaken(1, ())) == ()
    assert log.on_taken(OrdersTaken(2, ())) == ("lease-1",)


def test_a_late_answer_takes_nothing_back() -> None:
    log = OrderLog()
    log.append(OPEN)
    log.append(CLOSE)
    log.due(0.0)
    log.on_taken(OrdersTaken(2, ("lease-1",)))
    log.on_taken(OrdersTaken(1, ()))
    assert log.due(1.0) == Orders(2, ())


def test_an_answer_beyond_what_was_ordered_is_no_harm() -> None:
    log = OrderLog()
    log.append(OPEN)
    log.on_taken(OrdersTaken(7, ()))
    log.append(CLOSE)
    assert log.due(0.0) == Orders(1, (CLOSE,))


def test_many_orders_go_in_several_messages() -> None:
    log, cursor = OrderLog(), OrderCursor()
    for number in range(150):
        log.append(open_order(f"lease-{number}"))
    done: list[Open | Close] = []
    for _ in range(3):
        message = log.due(0.0)
        assert message is not None
        assert log.due(0.0) is None
        done += cursor.take(message)
        log.on_taken(OrdersTaken(cursor.next, ()))
    assert [order.lease_id for order in done] == [f"lease-{number}" for number in range(150)]
    assert repr(log) == "<OrderLog next=150 waiting=0 closing=0>"


@given(st.lists(st.tuples(st.sampled_from(["append", "send", "deliver", "answer", "again"]), st.integers(0, 9))))
def test_whatever_the_link_does_every_order_is_done_once_and_in_order(story: list[tuple[str, int]]) -> None:
    log, cursor = OrderLog(), OrderCursor()
    now_s, num_appended = 0.0, 0
    done: list[str] = []
    link: list[Orders | OrdersTaken] = []
    for what, index in story:
        now_s += 0.3
        if what == "append":
            log.append(open_order(str(num_appended)))
            num_appended += 1
        elif what == "send":
            link += [message] if (message := log.due(now_s)) else []
        elif link:
            message = link[index % len(link)] if what == "again" else link.pop(index % len(link))
            if isinstance(message, Orders):
                done += [order.lease_id for order in cursor.take(message)]
                link.append(OrdersTaken(cursor.next, ()))
            else:
                log.on_taken(message)
    assert done == [str(number) for number in range(len(done))]
    while not log.is_drained:
        now_s += 2.0
        message = log.due(now_s)
        assert message is not None
        done += [order.lease_id for order in cursor.take(message)]
        log.on_taken(OrdersTaken(cursor.next, ()))
    assert len(done) == num_appended
