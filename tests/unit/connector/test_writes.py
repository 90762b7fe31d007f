import numpy as np
import pytest

from kvshuttle.connector.kv_layout import KvMemory
from kvshuttle.connector.writes import EndedWrite, FailedWrite, Writes
from kvshuttle.errors import TransferFailed, TransportError
from kvshuttle.handoff import Close, Commit, Fail, Open, Orders, Progress, Restarted, decode_notification
from kvshuttle.handoff.cards import Region, WorkerCard
from kvshuttle.transport import TransferStatus
from support.scripted_transport import ScriptedTransport

REGIONS = (Region(10_000, 100, 100, 20), Region(50_000, 100, 100, 20))
MEMORY = KvMemory(REGIONS, np.array([[10_000, 2000], [50_000, 2000]]), "DRAM", 0, "layout")
READER = WorkerCard(0, "127.0.0.1:1", b"reader", "DRAM", 0, (Region(0, 100, 100, 30), Region(90_000, 100, 100, 30)))
WHOLE = Progress("req-1", 0, 0, (5, 6), is_final=True)


class Case:
    def __init__(self):
        self.transport = ScriptedTransport()
        self.reported = []
        self.hinted = []
        self.writes = Writes(MEMORY, self.transport, report=self.reported.append, hint=self.hinted.append)
        self.num_orders = 0

    def order(self, *orders):
        answer = self.writes.take_orders(Orders(self.num_orders, orders))
        self.num_orders += len(orders)
        return answer

    def open(self, *progress):
        self.order(Open("lease", "reg", "req-1", 0, (21, 22), READER))
        self.writes.compute(lambda: True, progress)
        self.writes.turn()

    @property
    def notes(self):
        return [decode_notification(note) for note in self.transport.notes]


@pytest.fixture
def case():
    return Case()


def test_what_is_computed_is_written_and_committed(case):
    case.open(WHOLE)
    [transfer] = case.transport.transfers
    assert transfer.local.tolist() == [[10_500, 200], [50_500, 200]]
    assert transfer.remote.tolist() == [[2100, 200], [92_100, 200]]
    assert case.writes.is_any_live
    transfer.status = TransferStatus.DONE
    case.writes.turn()
    assert case.notes == [Commit("reg", 0, 1, 2)]
    [ended] = case.reported
    assert isinstance(ended, EndedWrite)
    assert (ended.num_bytes, ended.num_descriptors, ended.is_streamed) == (400, 2, False)
    assert case.hinted == [READER.address, READER.address]
    assert not case.writes.is_any_live


def test_progress_counts_when_its_forward_pass_is_done(case):
    is_done = False
    case.order(Open("lease", "reg", "req-1", 0, (21, 22), READER))
    case.writes.compute(lambda: is_done, (Progress("req-1", 0, 0, (5,), is_final=False),))
    case.writes.turn()
    assert case.transport.transfers == []
    is_done = True
    case.writes.turn()
    case.transport.transfers[0].status = TransferStatus.DONE
    case.writes.turn()
    assert case.reported[0].is_streamed


def test_a_failed_write_is_told_at_once_and_drained_when_it_has_ended(case):
    case.open(WHOLE)
    [transfer] = case.transport.transfers
    transfer.status, transfer.is_releasable = TransferStatus.FAILED, False
    case.writes.turn()
    case.writes.turn()
    assert case.notes == [Fail("reg", "write_failed")]
    assert case.reported == [FailedWrite("transport_failed")]
    assert case.order(Close("lease")).undrained == ("lease",)
    # Meanwhile it is followed without haste, and the next write gets a connection of its own.
    assert not case.writes.is_any_live
    assert case.writes.is_any_undrained
    assert case.transport.calls.count("remove_peer") == 1
    transfer.is_releasable = True
    case.writes.turn()
    assert case.order().undrained == ()
    assert not case.writes.is_any_undrained
    assert case.transport.calls.count("remove_peer") == 1


def test_a_transfer_that_cannot_be_asked_has_failed_and_is_followed(case, caplog):
    case.open(WHOLE)
    [transfer] = case.transport.transfers
    transfer.status, transfer.is_releasable = RuntimeError("lost"), False
    for _ in range(3):
        case.writes.turn()
    assert case.reported == [FailedWrite("transport_failed")]
    assert len([record for record in caplog.records if "cannot be followed" in record.message]) == 1
    assert case.order(Close("lease")).undrained == ("lease",)


@pytest.mark.parametrize("method", ["add_peer", "post"])
def test_a_write_that_cannot_be_posted_fails_its_push_alone(case, method):
    case.transport.failures[method] = TransferFailed("no")
    case.open(WHOLE)
    assert case.reported == [FailedWrite("post_failed")]
    assert case.order(Close("lease")).undrained == ()
    case.transport.failures.clear()
    case.order(Open("lease-2", "reg-2", "req-1", 0, (23, 24), READER))
    case.writes.turn()
    assert len(case.transport.transfers) == 1


def test_a_reader_that_cannot_be_told_is_left_to_its_deadline(case):
    case.open(WHOLE)
    case.transport.failures["notify"] = TransportError("gone")
    case.transport.transfers[0].status = TransferStatus.DONE
    case.writes.turn()
    assert case.notes == []
    assert case.order(Close("lease")).undrained == ()


def test_a_restart_holds_at_once_and_says_whether_old_writes_are_under_way(case):
    case.open(WHOLE)
    assert case.writes.restart([Restarted("req-1", 1)])
    assert not case.writes.is_settled(["req-1"])
    case.transport.transfers[0].status = TransferStatus.DONE
    case.writes.turn()
    assert case.writes.is_settled(["req-1"])
    assert case.notes == []
    case.writes.compute(lambda: True, (Progress("req-1", 1, 0, (7, 8), is_final=True),))
    case.writes.turn()
    case.transport.transfers[1].status = TransferStatus.DONE
    case.writes.turn()
    assert case.notes == [Commit("reg", 1, 1, 2)]


def test_sources_that_are_over_are_forgotten(case):
    case.writes.compute(lambda: True, (WHOLE,))
    case.writes.turn()
    case.writes.forget(["req-1", "never heard of"])
    assert case.writes._writer.is_drained
    assert repr(case.writes) == "<Writes <PushWriter sources=0 outboxes=0 under_way=0>>"
