"""What is left when a run of churn is over, by metrics and by logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.bench.churn_rest import ENGINE_RESIDUE, ROUTER_RESIDUE, end_record, residue
from kvshuttle.bench.churn_watch import SERIES

if TYPE_CHECKING:
    from pathlib import Path


def test_what_is_not_zero_is_left_and_what_nobody_tells_may_be() -> None:
    assert residue({"turns": 0.0, "outstanding": 0.0, "other": 5.0}, ROUTER_RESIDUE) == {}
    assert residue({"turns": 2.0, "outstanding": 0.0}, ROUTER_RESIDUE) == {"turns": 2.0}
    assert residue({"turns": 0.0}, ROUTER_RESIDUE) == {"no figure of outstanding": 1.0}


def test_everything_that_may_be_left_is_read_from_metrics() -> None:
    assert set(SERIES.values()) >= {*ENGINE_RESIDUE, *ROUTER_RESIDUE}


def test_logs_tell_of_wrong_kv_and_of_tracebacks_but_not_those_of_the_load_generator(tmp_path: Path) -> None:
    trace = "Traceback (most recent call last):\n"
    (tmp_path / "decode-0.log").write_text(f"request x has wrong KV: block 3\n{trace}fine\n{trace}")
    (tmp_path / "load.log").write_text(trace)
    record = end_record(tmp_path, {"decode-0 corrupted": 1.0})
    assert record.num_wrong_kv_lines == 1
    assert record.log_troubles == ["decode-0: Traceback (most recent call last): (2 times)"]
    assert record.bugs == {"decode-0 corrupted": 1.0}
