"""What the worker half makes of a step's orders about pushes."""

from dataclasses import replace

import pytest

from kvshuttle.config import ConnectorConfig
from kvshuttle.connector.arrivals import PushNews
from kvshuttle.connector.reads import ReadResult
from kvshuttle.connector.step_metadata import FailedLoad, PushExpectation, ReadOrder, StepMetadata, WorkerReport
from kvshuttle.connector.worker_half import WorkerHalf, WorkerPlace
from kvshuttle.connector.writes import EndedWrite, FailedWrite
from kvshuttle.handoff.block_plan import BlockPlan, BlockRun
from kvshuttle.handoff.progress import Progress, Restarted

PUSH = PushExpectation("r", "reg", (21, 22))
FAILED = FailedLoad("r", "went_quiet", (21, 22), is_push=True)
READ = ReadOrder("r", "inc", BlockPlan(0, 2, (BlockRun(5, 21, 2),)), 10.0, 10.0, 0.0, "here", is_instead_of_push=True)


class Comm:
    """Writes down what it is told. ``num_polls_to_settle``: how often it says that old writes are under way."""

    is_alive = True

    def __init__(self):
        self.told = []
        self.outcomes = []
        self.num_polls_to_settle = 0

    def __getattr__(self, name):
        return lambda *args: self.told.append((name, *args))

    def take(self):
        taken, self.outcomes = self.outcomes, []
        return taken

    def restart(self, restarted):
        self.told.append(("restart", restarted))
        return self.num_polls_to_settle == 0

    def is_settled(self, source_ids):
        self.num_polls_to_settle -= 1
        return self.num_polls_to_settle <= 0


@pytest.fixture
def half():
    made = WorkerHalf(ConnectorConfig(), WorkerPlace(0, host_id="here", secret=None))
    made._comm = Comm()
    return made


def results(half, *outcomes):
    half._comm.outcomes += outcomes
    found = half.transfer_results()
    return found.finished_recving, found.failed_recving


def test_a_push_that_is_called_off_in_the_step_that_begins_it_fails_once(half):
    half.begin_step(StepMetadata(pushes=[PUSH], failed_loads=[FAILED]))
    assert half._comm.told == [("expect", PUSH), ("abandon", "r")]
    assert results(half) == ({"r"}, {"r"})
    assert results(half) == (set(), set())


def test_a_push_that_is_received_first_is_not_failed_any_more(half):
    half.begin_step(StepMetadata(pushes=[PUSH]))
    assert results(half, ReadResult("r", "", is_pushed=True)) == ({"r"}, set())
    half.begin_step(StepMetadata(failed_loads=[FAILED]))
    half.begin_step(StepMetadata(reads=[READ]))
    assert results(half) == (set(), set())
    assert [told[0] for told in half._comm.told] == ["expect"]


def test_a_result_that_is_on_its_way_beats_the_order_to_fail(half):
    half.begin_step(StepMetadata(pushes=[PUSH]))
    half.begin_step(StepMetadata(failed_loads=[FAILED]))
    assert results(half, ReadResult("r", "", is_pushed=True)) == ({"r"}, set())
    assert results(half) == (set(), set())


def test_a_load_that_is_called_off_is_no_failed_transfer_but_a_failed_read_is(half):
    half.begin_step(StepMetadata(pushes=[PUSH]))
    half.begin_step(StepMetadata(failed_loads=[FAILED]))
    assert results(half) == ({"r"}, {"r"})
    assert half.take_stats() is None
    half.begin_step(StepMetadata(reads=[replace(READ, is_instead_of_push=False)]))
    assert results(half, ReadResult("r", "transport_failed")) == ({"r"}, {"r"})
    assert half.take_stats().data["transfer_failures|read|transport_failed"] == 1


def test_a_read_takes_the_place_of_a_push_that_is_still_owed(half):
    half.begin_step(StepMetadata(pushes=[PUSH]))
    half.begin_step(StepMetadata(reads=[READ]))
    assert half._comm.told[-1] == ("order", READ)
    assert results(half, ReadResult("r", "transport_failed")) == ({"r"}, {"r"})


def test_news_of_pushes_go_to_the_scheduler_half(half):
    results(half, PushNews("a"), PushNews("a"), PushNews("b", "write_failed"))
    assert half.take_report() == WorkerReport(arriving={"a"}, push_failed={"b": "write_failed"})
    assert half.take_report() is None


def test_reports_of_two_ranks_are_merged():
    merged = WorkerReport(arriving={"a"}).aggregate(WorkerReport(arriving={"b"}, push_failed={"c": "x"}))
    assert (merged.arriving, merged.push_failed) == ({"a", "b"}, {"c": "x"})


def test_progress_goes_out_once_and_after_the_forward_pass(half):
    half._launched = lambda: "event"
    step = StepMetadata(progress=[Progress("req", 0, 0, (5,), is_final=False)], sources_over=["old"])
    half.begin_step(step)
    assert half._comm.told == []
    half.end_step(step)
    half.end_step(step)
    assert half._comm.told == [("compute", "event", tuple(step.progress)), ("forget_sources", ("old",))]


@pytest.mark.parametrize("num_polls", [0, 3])
def test_a_restart_is_told_before_the_forward_pass_and_awaited_for_a_moment(half, num_polls):
    half._comm.num_polls_to_settle = num_polls
    half.begin_step(StepMetadata(restarted=[Restarted("req", 1)]))
    assert half._comm.told == [("restart", [Restarted("req", 1)])]
    assert half._comm.num_polls_to_settle == 0


def test_writes_are_counted_by_when_they_ended(half):
    results(
        half,
        EndedWrite(100, 1, 0.0, 0.1, is_streamed=True),
        EndedWrite(50, 1, 0.0, 0.1, is_streamed=False),
        FailedWrite("post_failed"),
        ReadResult("unknown", "", num_bytes=70, is_pushed=True),
    )
    data = half.take_stats().data
    assert (data["transfer_bytes|write"], data["pushed_bytes|streamed"], data["pushed_bytes|final"]) == (150, 100, 50)
    assert data["transfer_failures|write|post_failed"] == 1
