from __future__ import annotations

import pytest

from kvshuttle.errors import LocalProtocolError
from kvshuttle.handoff import Commit, Fail, Orders, OrdersTaken, PostWrite, Progress, PushWriter, Restarted
from support.push_values import BLOCKS, close_order, open_order

WHOLE = Progress("req-1", 0, 0, BLOCKS, is_final=True)


def order(made: PushWriter, *orders: object) -> tuple[OrdersTaken, tuple[object, ...]]:
    answer, actions = made.take_orders(Orders(made._cursor.next, orders))
    return answer, tuple(action.notification for action in actions)


def take(made: PushWriter) -> PostWrite:
    write = made.next_write()
    assert write is not None
    return write


def end(made: PushWriter, *writes: PostWrite) -> list[object]:
    return [action.notification for write in writes for action in made.on_write_ended(write, is_ok=True)]


@pytest.mark.parametrize("is_open_first", [True, False])
def test_source_and_registration_are_joined_in_either_order(is_open_first: bool) -> None:
    made = PushWriter()
    if is_open_first:
        order(made, open_order())
    made.on_source(WHOLE)
    if not is_open_first:
        order(made, open_order())
    assert end(made, take(made)) == [Commit("reg-of-lease-1", 0, 1, 3)]
    assert order(made, close_order()) == (OrdersTaken(2, ()), ())
    made.forget_source("req-1")
    assert made.is_drained
    assert repr(made) == "<PushWriter sources=0 outboxes=0 under_way=0>"


def test_an_outbox_with_a_write_under_way_stays_undrained_until_that_has_ended() -> None:
    made = PushWriter()
    made.on_source(WHOLE)
    order(made, open_order())
    write = take(made)
    assert order(made, close_order("prefill_ended")) == (
        OrdersTaken(2, ("lease-1",)),
        (Fail("reg-of-lease-1", "prefill_ended"),),
    )
    assert order(made)[0] == OrdersTaken(2, ("lease-1",))
    assert end(made, write) == []
    assert order(made)[0] == OrdersTaken(2, ())


def test_outboxes_take_turns() -> None:
    made = PushWriter(max_blocks_per_write=1, max_writes_per_peer=100)
    made.on_source(WHOLE)
    order(made, open_order("a"), open_order("b"))
    assert [take(made).lease_id for _ in range(6)] == ["a", "b"] * 3
    assert made.next_write() is None


def test_a_slow_peer_holds_no_more_than_its_window_and_delays_nobody() -> None:
    made = PushWriter(max_blocks_per_write=1, max_writes_per_peer=2)
    made.on_source(WHOLE)
    order(made, open_order("slow", address="slow"), open_order("quick", address="quick"))
    writes = [take(made) for _ in range(4)]
    assert [write.lease_id for write in writes] == ["slow", "quick"] * 2
    assert made.next_write() is None
    assert made.num_under_way == 4
    end(made, writes[1])
    assert take(made).lease_id == "quick"
    assert made.next_write() is None
    end(made, writes[0])
    assert take(made).lease_id == "slow"


def test_writes_that_failed_and_still_touch_memory_keep_nobody_waiting() -> None:
    made = PushWriter(max_blocks_per_write=1, max_writes_per_peer=2)
    made.on_source(WHOLE)
    order(made, open_order("a"), open_order("b"), open_order("c"))
    failing = [take(made), take(made)]
    assert [write.lease_id for write in failing] == ["a", "b"]
    assert made.next_write() is None
    made.on_write_failed(failing[0])
    made.on_write_failed(failing[1])
    others = [take(made), take(made)]
    assert [write.lease_id for write in others] == ["c", "c"]
    # Their end gives back nothing that was given back already.
    for write in failing:
        assert made.on_write_ended(write, is_ok=False) == ()
    assert made.num_under_way == len(others)
    assert made.next_write() is None
    end(made, *others)
    end(made, take(made))
    assert made.num_under_way == 0


def test_progress_of_an_epoch_that_has_passed_is_ignored() -> None:
    made = PushWriter()
    order(made, open_order())
    made.on_source(Restarted("req-1", 1))
    assert made.on_source(WHOLE) == ()
    assert made.next_write() is None
    made.on_source(Progress("req-1", 1, 0, (7, 8, 9), is_final=True))
    assert end(made, take(made)) == [Commit("reg-of-lease-1", 1, 1, 3)]


def test_a_restart_is_settled_when_no_old_write_is_under_way() -> None:
    made = PushWriter()
    made.on_source(WHOLE)
    order(made, open_order())
    write = take(made)
    assert made.is_settled("req-1")
    made.on_source(Restarted("req-1", 1))
    assert not made.is_settled("req-1")
    end(made, write)
    assert made.is_settled("req-1")
    assert made.is_settled("nobody knows it")


def test_a_source_may_serve_several_readers() -> None:
    made = PushWriter()
    order(made, open_order("a", address="a"), open_order("b", address="b"))
    made.on_source(WHOLE)
    assert len(end(made, take(made), take(made))) == 2


def test_a_gap_in_the_progress_is_a_bug() -> None:
    made = PushWriter()
    with pytest.raises(LocalProtocolError, match="goes on at index 1"):
        made.on_source(Progress("req-1", 0, 1, (6,), is_final=False))


def test_failures_go_to_their_own_outbox() -> None:
    made = PushWriter()
    made.on_source(WHOLE)
    order(made, open_order("a"), open_order("b"))
    first, second = take(made), take(made)
    assert [action.notification for action in made.on_write_failed(first)] == [Fail("reg-of-a", "write_failed")]
    assert made.on_write_ended(first, is_ok=False) == ()
    assert end(made, second) == [Commit("reg-of-b", 0, 1, 3)]


def test_orders_that_come_again_are_not_done_again() -> None:
    made = PushWriter()
    order(made, open_order(), close_order())
    answer, _ = made.take_orders(Orders(0, (open_order(),)))
    assert answer == OrdersTaken(2, ())
    assert made._outboxes == {}
