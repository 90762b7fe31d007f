"""The benchmark of conversations from start to report, on emulated engines."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kvshuttle.bench.report import write_report
from kvshuttle.bench.turns import run_turns
from kvshuttle.bench.turns_figures import TurnsResults, compared, kept_beside_cache, prefill_s
from kvshuttle.bench.turns_plan import TurnsPlan
from kvshuttle.bench.turns_records import read_turn_records

if TYPE_CHECKING:
    from pathlib import Path

PLAN = TurnsPlan(
    profile="h200-tp8-qwen3-32b",
    bytes_scale=0.05,
    prefill_cache=("off", "on", "larger"),
    conversations=2,
    turns=3,
    first_tokens=600,
    turn_tokens=300,
    output_tokens=8,
)
NUM_TURNS = PLAN.conversations * PLAN.turns


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("turns")
    run_turns(PLAN, path, env=os.environ, say=print)
    return path


@pytest.fixture(scope="module")
def results(run_dir: Path) -> TurnsResults:
    return TurnsResults(PLAN, {}, read_turn_records(run_dir / "records.jsonl"))


def test_every_cell_has_all_turns_with_the_answers_of_the_first(results: TurnsResults) -> None:
    assert results.cells == PLAN.cells
    reference = results.turns(results.cells[0])
    for cell in results.cells:
        turns = results.turns(cell)
        assert len(turns) == NUM_TURNS
        assert not [record for record in turns if record.error or record.is_wrong or record.failures]
        assert compared(turns, reference).num_equal == NUM_TURNS


def test_with_reuse_p_computes_what_is_new_and_up_to_a_block(results: TurnsResults) -> None:
    for cell in results.cells:
        excess = results.excess_tokens(cell)
        assert len(excess) == NUM_TURNS - PLAN.conversations
        if cell.is_reusing:
            assert max(excess) <= 128
            assert {record.history for record in results.turns(cell)} == {"new", "continued"}
        elif cell.prefill_cache == "off":
            assert min(excess) >= 512
            assert {record.history for record in results.turns(cell)} == {"off"}


def test_every_prefill_leg_is_timed_and_every_token_accounted_for(results: TurnsResults) -> None:
    for cell in results.cells:
        turns = results.turns(cell)
        assert all(prefill_s(record) is not None for record in turns)
        done = results.done(cell)
        assert done.local_hit_tokens + done.history_tokens == sum(record.cached_tokens for record in turns)
        if not cell.is_reusing or cell.prefill_cache == "off":
            assert (done.history_tokens > 0) is cell.is_reusing


def test_p_gets_as_many_more_blocks_as_d_kept(results: TurnsResults) -> None:
    kept = kept_beside_cache(PLAN, results.records)
    longest = max(record.prompt_tokens for record in results.turns(results.cells[0]))
    assert kept >= PLAN.conversations * (longest // 128)
    pools = [results.done(cell).prefill_blocks for cell in results.cells]
    assert pools[-1] == pools[0] + kept


def test_a_run_that_is_whole_is_not_measured_again(run_dir: Path) -> None:
    said: list[str] = []
    records = (run_dir / "records.jsonl").read_bytes()
    run_turns(PLAN, run_dir, env=os.environ, say=said.append)
    assert said == [f"0 of 5 cells to measure, results in {run_dir}"]
    assert (run_dir / "records.jsonl").read_bytes() == records
    assert "## Time to the first token" in write_report(run_dir).read_text()
