import pytest

from kvshuttle.connector.arrivals import Arrivals, PushNews
from kvshuttle.connector.reads import ReadResult
from kvshuttle.connector.step_metadata import PushExpectation
from kvshuttle.handoff import Commit, Fail, Written, encode_notification

PUSH = PushExpectation("r", "reg", (21, 22, 23))
PIECES = [Written("reg", 0, 0, 2), Written("reg", 0, 1, 1), Commit("reg", 0, 2, 3)]


class Case:
    def __init__(self):
        self.reported = []
        self.arrivals = Arrivals(block_len_bytes=100, report=self.reported.append)

    def take(self, *notifications):
        self.arrivals.take([("peer", encode_notification(each)) for each in notifications])

    @property
    def results(self):
        return [each for each in self.reported if isinstance(each, ReadResult)]


@pytest.fixture
def case():
    return Case()


@pytest.mark.parametrize("is_early", [True, False])
def test_a_push_is_reported_once_when_all_of_it_is_here(case, is_early):
    if is_early:
        case.take(*PIECES)
    case.arrivals.expect(PUSH)
    if not is_early:
        case.take(*PIECES, *PIECES)
    [result] = case.results
    assert (result.request_id, result.reason, result.num_bytes, result.is_pushed) == ("r", "", 300, True)
    assert case.arrivals.is_drained
    assert not case.arrivals.abandon("r")


def test_each_arrival_is_a_sign_of_life(case):
    case.arrivals.expect(PUSH)
    case.take(PIECES[0], PIECES[0])
    assert case.reported == [PushNews("r")]


def test_a_failure_is_news_and_not_the_end_of_the_load(case):
    case.arrivals.expect(PUSH)
    case.take(Fail("reg", "write_failed"))
    assert case.reported == [PushNews("r", "write_failed")]
    assert repr(case.arrivals) == "<Arrivals expected=1 <Inboxes 1 early=0>>"
    assert case.arrivals.abandon("r")
    case.take(*PIECES)
    assert case.results == []


def test_what_is_no_notification_is_dropped(case, caplog):
    case.arrivals.expect(PUSH)
    case.arrivals.take([("stranger", b"\x00nonsense")])
    case.take(*PIECES)
    assert len(case.results) == 1
    assert "stranger" in caplog.text
    case.arrivals.expire()
