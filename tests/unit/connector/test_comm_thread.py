import threading
import time

import numpy as np
import pytest

from kvshuttle.clock import now_s
from kvshuttle.connector import comm_thread
from kvshuttle.connector.comm_thread import CommThread, CommThreadOptions
from kvshuttle.connector.kv_layout import KvMemory
from kvshuttle.connector.step_metadata import PushExpectation, ReadOrder
from kvshuttle.errors import ConfigError, TransportError
from kvshuttle.handoff.block_plan import BlockPlan, BlockRun
from kvshuttle.handoff.cards import Region, WorkerCard
from kvshuttle.handoff.messages import Busy
from kvshuttle.handoff.wire import MessageCodec
from kvshuttle.transport import TransferStatus
from kvshuttle.transport.endpoint import Endpoint
from support.scripted_transport import ScriptedTransport

REGIONS = (Region(10_000, 100, 100, 20),)
MEMORY = KvMemory(REGIONS, np.array([[10_000, 2000]]), "DRAM", 0, "layout")
PEER = WorkerCard(0, "127.0.0.1:1", b"agent", "DRAM", 0, REGIONS)
LIMIT_S = 20.0


class Case:
    def __init__(self):
        self.transport = ScriptedTransport()
        self.endpoints = []
        self.host = "127.0.0.1"
        self.thread = None

    def make_endpoint(self, handler):
        endpoint = Endpoint(codec=MessageCodec(), secret=None, sender="worker-0", handler=handler, now_s=now_s)
        self.endpoints.append(endpoint)
        return endpoint

    def start(self):
        options = CommThreadOptions(0, self.host, "peers-see-this", "here", 1.0)
        self.thread = CommThread(
            MEMORY, options, transport_factory=lambda: self.transport, endpoint_factory=self.make_endpoint
        )
        return self.thread.start()

    def order(self, request_id="r"):
        plan = BlockPlan(0, 1, (BlockRun(1, 2, 1),))
        self.thread.order(ReadOrder(request_id, "inc", plan, 100.0, 100.0, now_s(), "here"))

    def wait(self, condition):
        deadline_at_s = time.monotonic() + LIMIT_S
        while not (found := condition()):
            assert time.monotonic() < deadline_at_s, self.thread
            time.sleep(0.001)
        return found


@pytest.fixture
def case():
    case = Case()
    yield case
    if case.thread is not None:
        assert case.thread.stop()


def test_it_says_where_it_listens_and_what_it_registered(case):
    card = case.start()
    host, port = card.address.rsplit(":", 1)
    assert (host, int(port) > 0, card.agent_metadata, card.regions) == ("peers-see-this", True, b"scripted", REGIONS)
    assert case.transport.calls == ["register", "metadata"]
    assert case.thread.is_alive


def test_an_order_is_answered_and_waits_for_its_transfer(case):
    case.start()
    case.thread.meet("inc", PEER)
    case.order()
    case.wait(lambda: case.transport.transfers)
    assert case.thread.take() == []
    case.transport.transfers[0].status = TransferStatus.DONE
    [result] = case.wait(case.thread.take)
    assert (result.request_id, result.reason) == ("r", "")


@pytest.mark.parametrize("method", ["register", "metadata"])
def test_what_fails_at_the_start_is_raised_where_it_was_started_and_everything_is_closed(case, method):
    case.transport.failures[method] = TransportError("no device")
    with pytest.raises(TransportError, match="no device"):
        case.start()
    case.wait(lambda: case.transport.is_closed)
    assert all(endpoint._is_closed for endpoint in case.endpoints)


def test_an_address_that_may_not_be_bound_is_raised_too(case):
    case.host = "0.0.0.0"
    with pytest.raises(ConfigError, match="KVSHUTTLE_SECRET"):
        case.start()
    case.wait(lambda: case.transport.is_closed)


def test_a_transport_whose_notifications_fail_still_reads(case):
    case.transport.failures["take_notifications"] = TransportError("broken")
    case.start()
    case.thread.meet("inc", PEER)
    case.order()
    case.wait(lambda: case.transport.transfers)[0].status = TransferStatus.DONE
    [result] = case.wait(case.thread.take)
    assert result.reason == ""


def test_a_failing_command_does_not_end_the_thread(case):
    case.start()
    case.thread._submit(lambda reads: 1 / 0)
    case.order("after")
    assert [each.reason for each in case.wait(case.thread.take)] == ["peer_unknown"]


def test_stopping_closes_everything_once(case):
    case.start()
    assert case.thread.stop()
    assert case.thread.stop()
    assert case.transport.calls.count("close") == 1
    assert case.endpoints[0]._is_closed
    assert not case.thread.is_alive
    case.order("too late")  # nobody answers; WorkerHalf sees that the thread is dead
    assert case.thread.take() == []


def test_stopping_before_the_start_is_harmless():
    thread = CommThread(
        MEMORY,
        CommThreadOptions(0, "127.0.0.1", "x", "here", 1.0),
        transport_factory=ScriptedTransport,
        endpoint_factory=lambda handler: None,
    )
    assert thread.stop()


def test_a_call_that_does_not_return_is_seen_by_stop(case):
    entered, gate = threading.Event(), threading.Event()
    case.transport.add_peer = lambda metadata: entered.set() or (gate.wait(LIMIT_S) and b"p")
    case.start()
    case.thread.meet("inc", PEER)
    case.order()
    assert entered.wait(LIMIT_S)
    assert not case.thread.stop(timeout_s=0.05)
    gate.set()


def test_a_hint_makes_it_poll_fast_for_a_bounded_time(case):
    case.start()
    for duration_s in (float("nan"), -5.0, 0.0):
        case.thread._on_message(Busy("peer", duration_s))
        assert case.thread._busy_until_s <= now_s()
    case.thread._on_message(Busy("peer", 1e9))
    assert case.thread._busy_until_s <= now_s() + comm_thread._MAX_BUSY_S
    assert case.thread._on_message(Busy("peer", 0.5)) is None


def test_while_a_push_is_expected_it_looks_without_being_told_and_without_haste(case):
    case.start()
    [endpoint] = case.endpoints
    pauses, poll = [], endpoint.poll
    endpoint.poll = lambda pause_s: (pauses.append(pause_s), poll(pause_s))
    case.thread.expect(PushExpectation("r", "reg", (1, 2)))
    case.wait(lambda: comm_thread._EXPECTING_POLL_S in pauses)
    assert 0.0 not in pauses
    case.thread.abandon("r")
    case.wait(lambda: pauses[-1] == comm_thread._IDLE_POLL_S)


def test_an_idle_thread_sleeps(case):
    case.start()
    turns = []
    case.transport.take_notifications = lambda: turns.append(1) or []
    case.wait(lambda: len(turns) >= 2)
    before, started_at_s = len(turns), time.monotonic()
    time.sleep(0.5)  # counts how often an idle thread wakes: it is the passing time that is tested
    num_turns, passed_s = len(turns) - before, time.monotonic() - started_at_s
    assert num_turns <= passed_s / comm_thread._IDLE_POLL_S + 2
