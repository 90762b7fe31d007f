"""A run of churn passes when every failure has a cause, nothing is left and nothing grew; otherwise it says why not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from kvshuttle.bench.churn_plan import MODES, ChurnPlan
from kvshuttle.bench.churn_records import (
    DIED,
    NOT_OVER,
    AskRecord,
    Client,
    EndRecord,
    How,
    Journal,
    LookRecord,
    OutageRecord,
    Record,
    RestRecord,
    RoutedRecord,
    WindowRecord,
    read_churn_records,
)
from kvshuttle.bench.churn_report import read_verdict, report_sections
from kvshuttle.bench.churn_verdict import (
    MOST_NEW_FDS,
    MOST_NEW_THREADS,
    OVERLOAD,
    UNEXPLAINED,
    Causes,
    ChurnResults,
    explained_part,
    judge,
    slope_per_hour,
    well_part,
)
from kvshuttle.bench.plan_file import claim
from kvshuttle.bench.report import write_report
from kvshuttle.bench.run_files import FACTS_FILE, RECORDS_FILE
from kvshuttle.bench.sections import as_markdown

if TYPE_CHECKING:
    from pathlib import Path

PLAN = ChurnPlan(minutes=2, explained_within_s=20)
FACTS = {
    "cpu": "a CPU", "cores": 2, "memory": "24 kB", "kernel": "6", "packages": {}, "kvshuttle": "0", "commit": "",
    "date": "2026-01-01",
}  # fmt: skip


def ask(**fields: object) -> AskRecord:
    values: dict[str, object] = {
        "client": Client.LOAD, "request_id": "w0-1", "sent_s": 10.0, "ended_s": 12.0, "how": How.RIGHT, "mode": "push",
        "num_tokens": 48, **fields,
    }  # fmt: skip
    return AskRecord(**values)  # type: ignore[arg-type]


def look(name: str, at_s: float, *, fds: int = 50, threads: int = 30, life: int = 1, **gauges: float) -> LookRecord:
    return LookRecord(
        name=name, life=life, at_s=at_s, is_healthy=True, rss_mib=100.0, num_fds=fds, num_threads=threads, gauges=gauges
    )


KILL = OutageRecord(number=1, name="decode-0", kind="kill", began_s=40.0, ended_s=60.0)
LAST = [ask(client=Client.LAST, mode=mode, request_id=f"last-{mode}", sent_s=200.0, ended_s=201.0) for mode in MODES]
GOOD: list[Record] = [
    WindowRecord(name="burst", began_s=-9.0, ended_s=-1.0, rate=0.0, num_requests=24, num_right=24),
    look("router", 0.0),
    look("decode-0", 0.0, preemptions=2.0, usage=0.4),
    ask(),
    replace(KILL, ended_s=NOT_OVER),
    KILL,
    ask(request_id="w0-2", sent_s=39.0, ended_s=41.0, how=How.CUT),
    RoutedRecord(request_id="w0-2", outcome="broken_stream", failures=["stream:decode-0:reset"]),
    RestRecord(began_s=150.0, took_s=3.0, bound_s=54.0, left={}),
    *LAST,
    look("router", 203.0),
    look("decode-0", 203.0, **{"push received": 4.0, "read read_ok": 2.0}),
    EndRecord(num_wrong_kv_lines=0),
]


def results(*more: Record, without: tuple[Record, ...] = ()) -> ChurnResults:
    return ChurnResults(PLAN, FACTS, [*(record for record in GOOD if record not in without), *more])


def test_a_good_run_passes() -> None:
    assert judge(results()).text == "PASS"


FAILED = ask(request_id="w1-7", sent_s=100.0, ended_s=101.0, how=How.ERROR, status=502)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (ask(how=How.WRONG, request_id="w9-9"), "1 wrong answers, the first: w9-9"),
        (FAILED, "1 requests failed and nothing explains that, the first: w1-7, error, 502"),
        (OutageRecord(number=2, name="prefill-1", kind=DIED, began_s=7.0, detail="ended by SIGABRT\nx"), "by itself"),
        (RestRecord(began_s=150.0, took_s=60.0, bound_s=54.0, left={"decode-1": {"leases_held": 1.0}}), "leases_held"),
        (replace(LAST[0], how=How.ERROR), "with mode auto, 1 of 2 requests"),
        (look("prefill-0", 30.0, internal_errors=1.0), "prefill-0 counts internal_errors: 1"),
        (EndRecord(num_wrong_kv_lines=2), "wrong KV 2 times"),
        (EndRecord(num_wrong_kv_lines=0, log_troubles=["decode-0: Traceback"]), "in a log: decode-0"),
        (look("router", 210.0, fds=51 + MOST_NEW_FDS), "more open files"),
        (look("router", 210.0, threads=31 + MOST_NEW_THREADS), "more threads"),
        (
            ask(how=How.SILENT, request_id="talk1-1", sent_s=45.0, ended_s=165.0),
            "nothing explains that, the first: talk1-1",
        ),
        (WindowRecord(name="w5", began_s=1, ended_s=2, rate=1, num_requests=1, num_right=0, error="no\nx"), "w5"),
    ],
)
def test_what_must_not_be_fails_the_run_and_is_named(record: Record, reason: str) -> None:
    (found,) = judge(results(record)).reasons
    assert reason in found


def test_a_run_that_was_interrupted_is_reported_and_does_not_pass() -> None:
    cut_off = ChurnResults(PLAN, FACTS, GOOD[:5])
    assert judge(cut_off).reasons == ("the run did not come to its end",)
    assert "It did not come to that." in as_markdown("t", report_sections(cut_off))


@pytest.mark.parametrize(
    ("sent_s", "ended_s", "is_explained"),
    [(30.0, 39.5, True), (20.0, 35.0, False), (55.0, 56.0, True), (79.0, 90.0, True), (81.0, 90.0, False)],
)
def test_a_fault_explains_what_failed_while_it_lasted_or_soon_after(
    sent_s: float, ended_s: float, is_explained: bool
) -> None:
    failed = ask(sent_s=sent_s, ended_s=ended_s, how=How.CUT)
    routed = RoutedRecord(request_id=failed.request_id, outcome="broken_stream", failures=["stream:decode-0:reset"])
    assert (Causes(results(routed)).of(failed) != UNEXPLAINED) is is_explained


@pytest.mark.parametrize("outcome", ["", "ok", "disconnected", "stopped", "client_error"])
def test_what_the_router_does_not_put_down_to_engines_only_its_own_end_explains(outcome: str) -> None:
    failed = ask(sent_s=45.0, ended_s=46.0, how=How.CUT)
    routed = (RoutedRecord(request_id=failed.request_id, outcome=outcome),) if outcome else ()
    restart = OutageRecord(number=2, name="router", kind="restart", began_s=45.5, ended_s=47.0)
    assert Causes(results(*routed)).of(failed) == UNEXPLAINED
    assert Causes(results(*routed, restart)).of(failed) == "a fault: kill, restart"


def test_a_hang_is_explained_by_nothing() -> None:
    routed = RoutedRecord(request_id="w0-1", outcome="unavailable", failures=["decode:decode-0:reset"])
    failed = ask(sent_s=45.0, ended_s=165.0, how=How.SILENT)
    assert Causes(results(routed)).of(failed) == UNEXPLAINED
    assert Causes(results(routed)).of(replace(failed, how=How.ERROR)) == "a fault: kill"


def test_where_the_client_does_not_say_when_a_request_ended_the_router_does() -> None:
    failed = ask(sent_s=20.0, ended_s=NOT_OVER, how=How.ERROR)
    routed = RoutedRecord(request_id=failed.request_id, outcome="unavailable", total_s=22.0)
    assert Causes(results(replace(routed, total_s=0.0))).of(failed) == UNEXPLAINED
    assert Causes(results(routed)).of(failed) == "a fault: kill"


WINDOWS = [
    WindowRecord(name="w0", began_s=90.0, ended_s=105.0, rate=3.0, num_requests=60, num_right=60),
    WindowRecord(name="w1", began_s=105.0, ended_s=140.0, rate=0.8, num_requests=9, num_right=9),
]


def test_refusals_for_want_of_connections_are_overload_and_only_those() -> None:
    failed = ask(sent_s=100.0, ended_s=101.0, how=How.ERROR)
    routed = RoutedRecord(request_id=failed.request_id, outcome="unavailable", failures=["decode:decode-0:capacity"])
    mixed = replace(routed, failures=["decode:decode-0:capacity", "decode:decode-1:reset"])
    assert Causes(results(routed, *WINDOWS)).of(failed) == OVERLOAD
    assert Causes(results(mixed, *WINDOWS)).of(failed) == UNEXPLAINED
    # Nobody refused what was cut: it waited for a connection when the router went away.
    assert Causes(results(routed, *WINDOWS)).of(replace(failed, how=How.CUT)) == UNEXPLAINED


def test_refusals_where_there_is_neither_overload_nor_a_fault_are_explained_by_nothing() -> None:
    calm = ask(sent_s=110.0, ended_s=111.0, how=How.ERROR)
    routed = RoutedRecord(request_id=calm.request_id, outcome="unavailable", failures=["decode:decode-0:capacity"])
    assert Causes(results(routed, *WINDOWS)).of(calm) == UNEXPLAINED
    fault = OutageRecord(number=2, name="decode-1", kind="stop", began_s=108.0, ended_s=112.0)
    assert Causes(results(routed, *WINDOWS, fault)).of(calm) == OVERLOAD


def test_where_the_router_names_an_engine_the_fault_must_have_been_its_own_or_the_router_s() -> None:
    failed = ask(sent_s=45.0, ended_s=46.0, how=How.ERROR)
    its_own = RoutedRecord(
        request_id=failed.request_id,
        outcome="unavailable",
        failures=["decode:decode-0:reset", "decode:decode-1:capacity"],
    )
    another_s = replace(its_own, failures=["decode:decode-0:reset", "prefill:prefill-1:status"])
    restart = OutageRecord(number=2, name="router", kind="restart", began_s=30.0, ended_s=33.0)
    assert Causes(results(its_own)).of(failed) == "a fault: kill"
    assert Causes(results(another_s)).of(failed) == UNEXPLAINED
    assert Causes(results(another_s, restart)).of(failed) == "a fault: kill, restart"


def test_growth_counts_for_the_life_that_lasted_until_the_end() -> None:
    died_with_many = [look("decode-1", 10.0), look("decode-1", 60.0, fds=500)]
    assert judge(results(*died_with_many)).is_pass


def test_a_look_at_what_was_just_killed_is_none_at_its_life() -> None:
    killed = replace(look("decode-0", 208.0, fds=0, threads=3), rss_mib=0.0)
    assert judge(results(look("decode-0", 205.0, fds=51), killed)).text == "PASS"
    found = results(look("decode-0", 205.0, fds=51 + MOST_NEW_FDS), killed)
    assert found.lives()["decode-0", 1][-1].at_s == 205.0
    assert "more open files" in judge(found).reasons[0]


def test_a_restart_under_load_hides_no_growth_behind_the_files_of_that_load() -> None:
    router = [
        look("router", 100.0, life=2, fds=130),
        look("router", 120.0, life=2, fds=40),
        look("router", 203.0, life=2, fds=41 + MOST_NEW_FDS),
    ]
    (reason,) = judge(results(*router)).reasons
    assert reason == f"router has {MOST_NEW_FDS + 1} more open files than at another time of its 1.7 minutes"


@pytest.mark.parametrize(("mode", "counter"), [("push", "push received"), ("pull", "read read_ok")])
def test_right_answers_at_the_end_without_any_hand_off_do_not_pass(mode: str, counter: str) -> None:
    last_look = look("decode-0", 203.0, **{"push received": 4.0, "read read_ok": 2.0})
    before = replace(last_look, at_s=199.0, gauges={counter: last_look.gauges[counter]})
    (reason,) = judge(results(before)).reasons
    assert reason == f"at the end, with mode {mode}, requests were sent and no engine counts {counter}"


def test_turns_without_a_whole_block_are_not_handed_off_at_the_end_either() -> None:
    last_look = look("decode-0", 203.0, **{"push received": 4.0, "read read_ok": 2.0})
    records = [record for record in GOOD if record != last_look]
    assert judge(ChurnResults(ChurnPlan(turn_tokens=100), FACTS, records)).is_pass
    assert not judge(ChurnResults(PLAN, FACTS, records)).is_pass


def test_parts_of_the_time_count_overlapping_faults_once() -> None:
    asks = [ask(sent_s=0.0), ask(sent_s=100.0)]
    faults = [
        OutageRecord(number=1, name="decode-0", kind="kill", began_s=11.0, ended_s=20.0),
        OutageRecord(number=2, name="prefill-0", kind="stop", began_s=16.0, ended_s=30.0),
        OutageRecord(number=3, name="router", kind="restart", began_s=91.0),
    ]
    run = ChurnResults(PLAN, FACTS, [*asks, *faults])
    assert explained_part(run) == pytest.approx(0.5)  # 10 to 50, and from 90 on
    assert explained_part(run, ("router",)) == pytest.approx(0.1)
    assert well_part(run, "decode-0") == pytest.approx(0.91)
    assert well_part(run, "decode-1") == 1.0
    assert explained_part(ChurnResults(PLAN, FACTS, [])) == 0.0


def test_a_slope_is_that_of_the_line_through_the_points() -> None:
    assert slope_per_hour([(0.0, 1.0), (1800.0, 2.0), (3600.0, 3.0)]) == pytest.approx(2.0)
    assert slope_per_hour([(0.0, 1.0), (1.0, 2.0)]) is None
    assert slope_per_hour([(5.0, 1.0)] * 3) is None


def test_the_report_is_written_from_a_directory(tmp_path: Path) -> None:
    claim(PLAN, tmp_path)
    (tmp_path / FACTS_FILE).write_text(json.dumps(FACTS))
    Journal(tmp_path / RECORDS_FILE).write(*GOOD)
    with (tmp_path / RECORDS_FILE).open("ab") as file:
        file.write(b'{"type":"ask","client":"lo')
    assert read_churn_records(tmp_path / RECORDS_FILE) == GOOD
    page = write_report(tmp_path)
    assert read_verdict(tmp_path).is_pass
    report = page.with_name("report.md").read_text()
    assert "PASS. 5 requests: 4 answered" in report
    assert "| 40 | kill | decode-0 | 20 |" in report
    assert "| cut | stream: reset | broken_stream | a fault: kill | 1 |" in report
    assert "under no fault: prefill-0 100%, prefill-1 100%, decode-0 " in report
    assert "2 preemptions; the fullest pool was 40% in use" in report
    assert "kvshuttle bench churn --out DIR --minutes 2" in report
    assert page.read_text().count("<svg") == 7
