from collections import Counter

import pytest

from kvshuttle.connector.loads import Loads
from kvshuttle.connector.reads import DrainedRead, ReadResult

BLOCKS = (4, 5)


def expecting():
    loads = Loads()
    loads.expect("r", block_ids=BLOCKS, budget_s=10.0, now_s=100.0)
    return loads


def settle(loads, *outcomes, now_s=101.0, is_comm_alive=True):
    step = loads.settle(outcomes, is_comm_alive=is_comm_alive, now_s=now_s)
    return [(each.request_id, each.reason) for each in step.ended], step.undrained, step.drained


def test_a_load_ends_once_though_its_result_comes_twice():
    loads = expecting()
    assert settle(loads) == ([], Counter(), Counter())
    assert settle(loads, ReadResult("r", ""), ReadResult("r", "")) == ([("r", "")], Counter(), Counter())
    assert settle(loads, ReadResult("r", "late")) == ([], Counter(), Counter())


def test_a_result_that_nobody_expects_is_dropped():
    assert settle(Loads(), ReadResult("r", "")) == ([], Counter(), Counter())


def test_a_failure_names_its_blocks_and_a_success_does_not():
    for reason, blocks in (("bad", set(BLOCKS)), ("", set())):
        step = expecting().settle([ReadResult("r", reason)], is_comm_alive=True, now_s=101.0)
        assert step.failed_block_ids == blocks
        assert step.failures == ({"r": reason} if reason else {})


def test_an_undrained_failure_is_told_at_once_and_its_end_later():
    loads = expecting()
    assert settle(loads, ReadResult("r", "timed_out", is_drained=False)) == ([("r", "timed_out")], {"r": 1}, {})
    assert settle(loads, DrainedRead("r")) == ([], {}, {"r": 1})


def test_a_load_that_is_ordered_to_fail_fails_at_the_next_settle():
    from kvshuttle.connector.step_metadata import FailedLoad

    loads = Loads()
    loads.fail(FailedLoad("r", "lease_lost", BLOCKS))
    assert settle(loads, now_s=1e9) == ([("r", "lease_lost")], {}, {})
    assert settle(loads) == ([], {}, {})


@pytest.mark.parametrize(
    ("now_s", "is_comm_alive", "reason"), [(115.0, True, "comm_thread_stuck"), (101.0, False, "comm_thread_dead")]
)
def test_a_load_without_a_result_is_given_up_and_its_blocks_are_kept_back(now_s, is_comm_alive, reason):
    loads = expecting()
    assert settle(loads, now_s=114.9) == ([], {}, {})
    assert settle(loads, now_s=now_s, is_comm_alive=is_comm_alive) == ([("r", reason)], {"r": 1}, {})
    assert settle(loads, now_s=now_s, is_comm_alive=is_comm_alive) == ([], {}, {})


@pytest.mark.parametrize(
    "late", [[ReadResult("r", "")], [ReadResult("r", "timed_out", is_drained=False), DrainedRead("r")]]
)
def test_a_late_result_of_a_load_that_was_given_up_only_frees_its_blocks(late):
    loads = expecting()
    settle(loads, now_s=1000.0)
    ended, undrained, drained = settle(loads, *late, now_s=1001.0)
    assert (ended, undrained, drained) == ([], {}, {"r": 1})
    assert repr(loads) == "<Loads pending=0 given_up=0>"
