import numpy as np
import pytest

from kvshuttle.clock import now_s
from kvshuttle.connector.kv_layout import KvMemory
from kvshuttle.connector.reads import DrainedRead, ReadResult, Reads
from kvshuttle.errors import TransferFailed
from kvshuttle.handoff.block_plan import BlockPlan, BlockRun
from kvshuttle.handoff.cards import Region, WorkerCard
from kvshuttle.transport import TransferStatus
from support.scripted_transport import ScriptedTransport

HERE = "this-host"
REGIONS = (Region(10_000, 100, 100, 20), Region(30_000, 100, 100, 20))
MEMORY = KvMemory(REGIONS, np.array([[10_000, 2000]]), "DRAM", 0, "layout")
PLAN = BlockPlan(0, 2, (BlockRun(3, 5, 2),))
EITHER = pytest.mark.parametrize("what", ["budget_s", "submit_within_s"])


class Case:
    def __init__(self):
        self.transport = ScriptedTransport()
        self.outcomes = []
        self.hints = []
        self.reads = Reads(
            MEMORY,
            self.transport,
            host_id=HERE,
            transit_allowance_s=1.0,
            report=self.outcomes.append,
            hint=self.hints.append,
        )
        self.reads.meet("inc", self.card())

    def card(self, regions=REGIONS):
        return WorkerCard(0, "peer:1", b"agent", "DRAM", 0, regions)

    def begin(
        self,
        request_id="r",
        *,
        budget_s=100.0,
        submit_within_s=100.0,
        incarnation="inc",
        plan=PLAN,
        host=HERE,
        issued_at_s=None,
    ):
        from kvshuttle.connector.step_metadata import ReadOrder

        issued_at_s = now_s() if issued_at_s is None else issued_at_s
        self.reads.begin(ReadOrder(request_id, incarnation, plan, budget_s, submit_within_s, issued_at_s, host))
        return self.transport.transfers[-1] if self.transport.transfers else None

    def follow(self):
        self.reads.follow()
        taken, self.outcomes[:] = list(self.outcomes), []
        return taken

    def reasons(self):
        return [(each.request_id, each.reason, each.is_drained) for each in self.follow()]


@pytest.fixture
def case():
    return Case()


@pytest.fixture
def pass_time(monkeypatch):
    """Lets so many seconds pass for reads."""
    passed_s = []
    monkeypatch.setattr("kvshuttle.connector.reads.now_s", lambda: now_s() + sum(passed_s))
    return passed_s.append


def test_a_read_is_posted_from_the_peers_blocks_into_ours_and_reported_once(case):
    transfer = case.begin()
    assert transfer.remote.tolist() == [[10_300, 200], [30_300, 200]]
    assert transfer.local.tolist() == [[10_500, 200], [30_500, 200]]
    assert case.hints == ["peer:1"]
    assert case.follow() == []
    transfer.status = TransferStatus.DONE
    [result] = case.follow()
    assert (result.reason, result.num_bytes, result.num_descriptors, result.is_drained) == ("", 400, 2, True)
    assert case.follow() == []
    assert not case.reads.is_any_live
    assert "remove_peer" not in case.transport.calls


def test_an_order_for_a_peer_that_was_never_met_fails(case):
    case.begin(incarnation="other")
    assert case.reasons() == [("r", "peer_unknown", True)]


@pytest.mark.parametrize(
    ("host", "issued_before_s", "is_posted"),
    [(HERE, 0.0, True), (HERE, 3.0, False), ("other-host", 3.0, True), ("other-host", 0.0, True)],
)
@EITHER
def test_time_counts_from_the_order_where_clocks_can_be_compared(case, what, host, issued_before_s, is_posted):
    case.begin(host=host, issued_at_s=now_s() - issued_before_s, **{what: 2.0})
    assert case.reasons() == ([] if is_posted else [("r", "no_time_left", True)])


@EITHER
def test_an_order_from_another_host_pays_an_allowance_for_its_transit(case, what):
    case.begin(host="other-host", **{what: 0.9})
    assert case.reasons() == [("r", "no_time_left", True)]


@EITHER
def test_nothing_is_posted_when_connecting_took_all_the_time(case, what, pass_time):
    case.transport.add_peer = lambda metadata: (pass_time(20.0), b"p")[1]
    case.begin(**{what: 10.0})
    assert case.reasons() == [("r", "no_time_left", True)]
    assert not case.transport.transfers


def test_a_read_that_was_submitted_in_time_has_its_whole_budget_to_complete_in(case, pass_time):
    transfer = case.begin(submit_within_s=10.0)
    pass_time(20.0)
    assert case.follow() == []
    transfer.status = TransferStatus.DONE
    assert case.reasons() == [("r", "", True)]


@pytest.mark.parametrize("method", ["add_peer", "post"])
@pytest.mark.parametrize(
    ("error", "reason"), [(TransferFailed("no"), "post_failed"), (ZeroDivisionError("bug"), "internal_error")]
)
def test_whatever_goes_wrong_in_starting_a_read_is_its_result(case, method, error, reason):
    case.transport.failures[method] = error
    case.begin()
    assert case.reasons() == [("r", reason, True)]
    assert not case.reads.is_any_live


@pytest.mark.parametrize(
    "regions",
    [(), REGIONS[:1], (REGIONS[0], Region(30_000, 101, 101, 20)), (REGIONS[0], Region(30_000, 100, 100, 4))],
    ids=["none", "too few", "other length", "too short"],
)
def test_a_peer_whose_memory_does_not_fit_is_not_read(case, regions):
    case.reads.meet("odd", case.card(regions))
    case.begin(incarnation="odd")
    assert case.reasons() == [("r", "post_failed", True)]
    assert not case.transport.transfers


def test_a_destination_that_does_not_exist_is_not_written(case):
    case.begin(plan=BlockPlan(0, 2, (BlockRun(3, 19, 2),)))
    assert case.reasons() == [("r", "post_failed", True)]


def test_a_late_read_is_reported_as_not_drained_and_followed_to_its_end(case, pass_time):
    transfer = case.begin(budget_s=10.0)
    pass_time(20.0)
    assert case.reasons() == [("r", "timed_out", False)]
    assert not case.reads.is_any_live
    transfer.is_releasable = False
    transfer.status = TransferStatus.FAILED
    assert case.follow() == []
    transfer.is_releasable = True
    assert case.follow() == [DrainedRead("r")]
    assert case.follow() == []


def test_a_read_that_completes_late_is_not_good(case, pass_time):
    case.begin(budget_s=10.0).status = TransferStatus.DONE
    pass_time(20.0)
    assert case.reasons() == [("r", "too_late", True)]


def test_a_failed_read_that_is_not_released_is_not_drained(case):
    transfer = case.begin()
    transfer.status, transfer.is_releasable = TransferStatus.FAILED, False
    assert case.reasons() == [("r", "transport_failed", False)]
    transfer.is_releasable = True
    assert case.follow() == [DrainedRead("r")]


def test_a_good_read_is_drained_though_its_handle_is_given_back_later(case):
    transfer = case.begin()
    transfer.status, transfer.is_releasable = TransferStatus.DONE, False
    assert case.reasons() == [("r", "", True)]
    transfer.is_releasable = True
    assert case.follow() == []
    assert transfer.is_released
    assert repr(case.reads) == "<Reads live=0 undrained=0 peers=1>"


def test_an_exception_in_following_one_read_does_not_hold_up_another(case):
    case.begin("bad").status = ZeroDivisionError("bug")
    case.begin("good").status = TransferStatus.DONE
    assert case.reasons() == [("bad", "transport_failed", True), ("good", "", True)]


def test_a_read_that_cannot_be_released_counts_as_writing(case):
    case.begin().status = TransferStatus.FAILED
    case.transport.failures["release"] = ZeroDivisionError("bug")
    assert case.reasons() == [("r", "transport_failed", False)]
    del case.transport.failures["release"]
    assert case.follow() == [DrainedRead("r")]


def test_after_a_failure_the_next_read_connects_anew(case):
    case.begin().status = TransferStatus.FAILED
    case.follow()
    case.begin("again")
    assert [call for call in case.transport.calls if "peer" in call] == ["add_peer", "remove_peer", "add_peer"]


def test_a_refused_post_also_makes_the_next_read_connect_anew(case):
    case.transport.failures["post"] = TransferFailed("endpoint is broken")
    case.begin()
    del case.transport.failures["post"]
    case.begin("again")
    assert [call for call in case.transport.calls if "peer" in call] == ["add_peer", "remove_peer", "add_peer"]


def test_a_failed_read_does_not_take_a_good_one_down_with_it(case):
    bad, good = case.begin("bad"), case.begin("good")
    bad.status = TransferStatus.FAILED
    assert case.reasons() == [("bad", "transport_failed", True)]
    assert "remove_peer" not in case.transport.calls
    case.begin("third").status = TransferStatus.DONE  # over the same connection, while it is in use
    good.status = TransferStatus.DONE
    assert [each[0] for each in case.reasons()] == ["good", "third"]
    case.begin("fourth")
    assert [call for call in case.transport.calls if "peer" in call] == ["add_peer", "remove_peer", "add_peer"]


def test_a_forgotten_peer_is_let_go_of_and_is_not_read_until_it_is_met_again(case):
    case.begin().status = TransferStatus.DONE
    case.follow()
    case.reads.forget("inc")
    assert case.transport.calls[-1] == "remove_peer"
    case.begin("late")
    assert case.reasons() == [("late", "peer_unknown", True)]
    case.reads.meet("inc", case.card())
    case.begin("again").status = TransferStatus.DONE
    assert case.reasons() == [("again", "", True)]


def test_a_peer_forgotten_during_a_read_is_kept_until_the_read_has_ended(case):
    transfer = case.begin()
    case.reads.forget("inc")
    transfer.status, transfer.is_releasable = TransferStatus.FAILED, False
    case.follow()
    assert len(case.reads._peers) == 1
    transfer.is_releasable = True
    assert case.follow() == [DrainedRead("r")]
    assert not case.reads._peers
    assert repr(case.reads) == "<Reads live=0 undrained=0 peers=0>"


def test_a_long_read_renews_its_hint(case, monkeypatch):
    case.begin()
    later_s = now_s() + 0.6
    monkeypatch.setattr("kvshuttle.connector.posting.now_s", lambda: later_s)
    assert case.follow() == []
    assert case.follow() == []
    assert case.hints == ["peer:1", "peer:1"]


def test_forgetting_an_unknown_peer_is_harmless(case):
    case.reads.forget("never met")
    assert case.follow() == []


def test_results_say_what_a_read_cost(case):
    case.begin().status = TransferStatus.DONE
    [result] = case.follow()
    assert isinstance(result, ReadResult)
    assert 0 <= result.post_s <= result.wire_s < 20.0
