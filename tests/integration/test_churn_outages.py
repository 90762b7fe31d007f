"""Faults on processes that run: killed, stopped and restarted by number, told of, and brought back."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvshuttle.bench.churn_faults import ROUTER, Fault, FaultKind
from kvshuttle.bench.churn_outages import Outages
from kvshuttle.bench.churn_records import DIED, NOT_OVER, Journal, LookRecord, OutageRecord, read_churn_records
from kvshuttle.bench.churn_watch import Watch, gauges_of, usage_of
from kvshuttle.bench.machine_load import group_of
from kvshuttle.clock import now_s
from support.tiny_fleet import plan_of, tiny_fleet, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvshuttle.launcher.fleet import Fleet

NAMES = ("prefill-0", "decode-0")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    plans = [plan_of(name) for name in (*NAMES, ROUTER)]
    with tiny_fleet(*plans, log_dir=tmp_path / "logs", report=lambda _: None) as fleet:
        fleet.start(timeout_s=60)
        yield fleet


def outages_of(fleet: Fleet, tmp_path: Path, *faults: Fault) -> Outages:
    return Outages(
        fleet, list(faults), Journal(tmp_path / "records.jsonl"), lambda _: None, now_s(), startup_timeout_s=60
    )


def carry_out(outages: Outages) -> list[OutageRecord]:
    """Until everything is up again: the last word on each outage."""

    def is_over() -> bool:
        outages.advance()
        return outages.is_over

    wait_until(is_over)
    records = [r for r in read_churn_records(outages.journal.path) if isinstance(r, OutageRecord)]
    return list({record.number: record for record in records}.values())


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_what_is_killed_comes_back_under_another_number(fleet: Fleet, tmp_path: Path) -> None:
    before = {name: fleet.pid(name) for name in NAMES}
    outages = outages_of(fleet, tmp_path, Fault(0.0, FaultKind.KILL, ("decode-0", "prefill-0"), 1, 0.1))
    (outage,) = carry_out(outages)
    assert {each.name: (each.pid, each.life) for each in outages.running}["decode-0"] == (fleet.pid("decode-0"), 2)
    assert (outage.name, outage.kind) == ("decode-0", "kill")
    assert outage.ended_s > outage.began_s
    assert fleet.pid("decode-0") != before["decode-0"]
    assert fleet.pid("prefill-0") == before["prefill-0"]


def test_what_is_stopped_goes_on_as_the_same_process(fleet: Fleet, tmp_path: Path) -> None:
    pid = fleet.pid("prefill-0")
    outages = outages_of(fleet, tmp_path, Fault(0.0, FaultKind.STOP, ("prefill-0",), 1, 0.5))
    outages.advance()
    wait_until(lambda: state_of(pid) == "T")
    assert "prefill-0" not in outages.healthy
    (outage,) = carry_out(outages)
    assert outage.ended_s - outage.began_s >= 0.5
    assert fleet.pid("prefill-0") == pid
    wait_until(lambda: fleet.check("prefill-0"))


def test_what_is_killed_while_it_is_stopped_ends_both_and_is_not_continued_as_another(
    fleet: Fleet, tmp_path: Path
) -> None:
    stop = Fault(0.0, FaultKind.STOP, ("decode-0",), 1, 60.0)
    kill = Fault(0.0, FaultKind.KILL, ("decode-0",), 1, 0.1)
    stopped, killed = carry_out(outages_of(fleet, tmp_path, stop, kill))
    assert (stopped.kind, killed.kind, killed.detail) == ("stop", "kill", "while it was stopped")
    assert NOT_OVER not in (stopped.ended_s, killed.ended_s)


def test_one_is_killed_while_another_is_started_and_says_so(fleet: Fleet, tmp_path: Path) -> None:
    first = Fault(0.0, FaultKind.KILL, ("decode-0",), 1, 0.0)
    outages = outages_of(fleet, tmp_path, first)
    outages.advance()
    outages.faults.append(Fault(0.0, FaultKind.KILL, ("prefill-0",), 1, 0.0))
    assert "while decode-0 started" in {outage.detail for outage in carry_out(outages)}


def test_the_router_is_asked_to_end_and_started_at_once(fleet: Fleet, tmp_path: Path) -> None:
    pid = fleet.pid(ROUTER)
    (outage,) = carry_out(outages_of(fleet, tmp_path, Fault(0.0, FaultKind.RESTART, (ROUTER,), 1, 0.0)))
    assert (outage.name, outage.kind) == (ROUTER, "restart")
    assert fleet.pid(ROUTER) != pid
    assert fleet.check(ROUTER)


def test_what_dies_by_itself_is_told_of_and_started_again(fleet: Fleet, tmp_path: Path) -> None:
    os.kill(fleet.pid("prefill-0"), signal.SIGABRT)
    wait_until(lambda: fleet.dead() == ["prefill-0"])
    outages = outages_of(fleet, tmp_path)
    outages.advance()
    (outage,) = carry_out(outages)
    assert outage.kind == DIED
    assert "SIGABRT" in outage.detail


def test_what_died_by_itself_is_not_put_down_to_a_fault_that_is_due(fleet: Fleet, tmp_path: Path) -> None:
    os.kill(fleet.pid("prefill-0"), signal.SIGABRT)
    wait_until(lambda: fleet.dead() == ["prefill-0"])
    (outage,) = carry_out(outages_of(fleet, tmp_path, Fault(0.0, FaultKind.KILL, ("prefill-0",), 1, 0.1)))
    assert outage.kind == DIED


def test_a_router_that_died_when_it_was_to_be_restarted_is_started_once(fleet: Fleet, tmp_path: Path) -> None:
    os.kill(fleet.pid(ROUTER), signal.SIGABRT)
    wait_until(lambda: fleet.dead() == [ROUTER])
    outages = outages_of(fleet, tmp_path, Fault(0.0, FaultKind.RESTART, (ROUTER,), 1, 0.0))
    died, restarted = carry_out(outages)
    assert (died.kind, restarted.kind) == (DIED, "restart")
    assert NOT_OVER not in (died.ended_s, restarted.ended_s)
    assert {each.name: each.life for each in outages.running}[ROUTER] == 2


def test_a_watch_writes_down_each_process_with_its_files_and_threads(fleet: Fleet, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "looks.jsonl")
    running = outages_of(fleet, tmp_path).running
    watch = Watch(fleet.plan.processes, lambda: running, lambda: ["prefill-0"], journal, now_s())
    looks = {look.name: look for look in watch.look()}
    assert looks.keys() == {*NAMES, ROUTER}
    assert [record for record in read_churn_records(journal.path) if isinstance(record, LookRecord)]
    assert looks["prefill-0"].is_healthy
    assert not looks["decode-0"].is_healthy
    assert looks["decode-0"].num_threads >= 1
    assert looks["decode-0"].rss_mib > 1
    rss_mib, num_fds, num_threads = usage_of(group_of(fleet.pid("prefill-0")))
    assert min(rss_mib, num_fds, num_threads) > 0
    assert usage_of([2**22]) == (0.0, 0, 0)


def test_gauges_are_summed_over_labels_and_hand_offs_by_outcome() -> None:
    text = (
        'vllm:num_requests_running{engine="0"} 2\nvllm:num_requests_running{engine="1"} 3\n'
        'kvshuttle:transfers_total{direction="push",outcome="received"} 7\nother 9\n'
    )
    assert gauges_of(text) == {"running": 5.0, "push received": 7.0}
