"""A load benchmark from plan to page, with vLLM's own load generator and engines with emulated accelerators."""

from __future__ import annotations

import gzip
import os
from typing import TYPE_CHECKING

import pytest

from kvshuttle.bench.grid import run_grid
from kvshuttle.bench.grid_plan import GridPlan
from kvshuttle.bench.grid_records import NOT_KNOWN, CellRecord, read_cells
from kvshuttle.bench.grid_report import write_grid_report
from kvshuttle.bench.load import parse_result

if TYPE_CHECKING:
    from pathlib import Path

SYSTEMS = ("upstream-push-paced", "shuttle-push")
NUM_PROMPTS = 6
PLAN = GridPlan.from_mapping(
    {
        "systems": list(SYSTEMS),
        "rates": [8],
        "input_tokens": [2048],
        "output_tokens": [8],
        "num_prompts": NUM_PROMPTS,
        "bytes_scale": 0.03125,
        "prefill_kv_gib": 1,
        "decode_kv_gib": 1,
    }
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    path = tmp_path_factory.mktemp("load")
    run_grid(PLAN, path, env=os.environ, say=print)
    return path


@pytest.fixture(scope="module")
def records(run_dir: Path) -> dict[str, CellRecord]:
    """By system."""
    return {record.system: record for record in read_cells(run_dir / "cells.jsonl")}


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_request_is_answered_rightly_and_found_in_both_traces(
    records: dict[str, CellRecord], system: str
) -> None:
    record = records[system]
    assert record.error == ""
    assert [request.error for request in record.requests] == [""] * NUM_PROMPTS
    for request in record.requests:
        assert (request.prefill, request.decode) == ("prefill-0", "decode-0")
        assert request.gap_s != NOT_KNOWN
        stages_s = request.queue_s + request.prefill_s + request.gap_s + request.first_step_s
        assert 0 < stages_s < request.ttft_s < request.latency_s
    assert min(record.front_cpu_s, record.prefill_cpu_s, record.decode_cpu_s) > 0


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_the_load_generator_wrote_is_kept(run_dir: Path, system: str) -> None:
    (path,) = (run_dir / "raw" / system).iterdir()
    assert len(parse_result(gzip.decompress(path.read_bytes())).ttfts) == NUM_PROMPTS


def test_a_finished_run_is_not_run_again_but_reported(run_dir: Path) -> None:
    told: list[str] = []
    run_grid(PLAN, run_dir, env=os.environ, say=told.append)
    assert told == [f"0 of 2 cells to measure, results in {run_dir}"]
    assert "<svg" in write_grid_report(run_dir).read_text()
    assert "kvshuttle push" in (run_dir / "report.md").read_text()
