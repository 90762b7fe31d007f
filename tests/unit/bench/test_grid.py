"""The order of a load benchmark: which engines are started when, what failures cost, and how a run goes on."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kvshuttle.bench import grid
from kvshuttle.bench.grid import run_grid
from kvshuttle.bench.grid_records import CellRecord, read_cells
from kvshuttle.launcher.plan import FleetPlan
from support.grid_values import grid_plan, served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvshuttle.bench.grid_plan import GridCell, GridPlan, GridSystem

OURS = ["shuttle-pull", "shuttle-push"]


class Stage:
    """What was started and measured, in order. ``failing``: cells that fail. ``killing``: cells that end engines."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.said: list[str] = []
        self.failing: set[tuple[str, float]] = set()
        self.killing: set[tuple[str, float]] = set()
        self.dead: list[str] = []

    def run(self, plan: GridPlan, out_dir: Path) -> list[str]:
        """Run and return what was started and measured since the last run."""
        self.told.clear()
        run_grid(plan, out_dir, env={}, say=self.said.append)
        return list(self.told)


class FakeFleet:
    """Engines that are only told of."""

    def __init__(self, stage: Stage, plan: Any, **_: Any) -> None:
        self._stage = stage
        self._names = [engine.name for engine in plan.engines]

    def __enter__(self) -> FakeFleet:
        self._stage.told.append(f"start {' '.join(self._names)}")
        self._stage.dead.clear()
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, **_: Any) -> None:
        pass

    def dead(self) -> list[str]:
        return self._stage.dead

    def pid(self, name: str) -> int:
        return 1 + self._names.index(name)


class FakeStanding:
    """A system whose cells are measured at once."""

    def __init__(self, stage: Stage, plan: GridPlan, system: GridSystem, engines: Any, *_: Any) -> None:
        self._stage = stage
        self.plan, self.system, self.engines = plan, system, engines
        self._computed: set[int] = set()

    def warm_up(self) -> None:
        self._stage.told.append(f"warm {self.system}")

    def has_computed(self, cell: GridCell) -> bool:
        return self.plan.prompts == "new" or cell.input_tokens in self._computed

    def compute(self, cell: GridCell) -> None:
        self._stage.told.append(f"compute {cell.input_tokens}")
        self._computed.add(cell.input_tokens)

    def measure(self, cell: GridCell) -> CellRecord:
        self._stage.told.append(f"{self.system} {cell.input_tokens} {cell.rate:g}")
        where = (str(self.system), cell.rate)
        if where in self._stage.killing:
            self._stage.dead.append("prefill-0")
        place = (str(self.system), cell.slots, cell.input_tokens, cell.output_tokens, cell.rate)
        error = "broken" if where in self._stage.failing else ""
        return CellRecord(*place, cell.seed, cell.repeat, requests=[served()], error=error)


@contextlib.contextmanager
def no_front(*_: Any) -> Iterator[tuple[str, int]]:
    yield "http://front", 0


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    """No process is started; the rest is the real thing."""
    made = Stage()
    monkeypatch.setattr(grid, "Fleet", partial(FakeFleet, made))
    monkeypatch.setattr(grid, "Standing", partial(FakeStanding, made))
    monkeypatch.setattr(grid, "_front", no_front)
    monkeypatch.setattr(grid, "save_metrics", lambda *_: None)
    monkeypatch.setattr(grid, "_SETTLE_S", 0)
    return made


def test_engines_stay_while_only_the_mode_changes(stage: Stage, tmp_path: Path) -> None:
    plan = grid_plan(systems=[*OURS, "upstream-pull", "plain"])
    assert stage.run(plan, tmp_path) == [
        "start prefill-0 decode-0",
        "warm shuttle-pull",
        "shuttle-pull 2048 4",
        "warm shuttle-push",
        "shuttle-push 2048 4",
        "start prefill-0 decode-0",
        "warm upstream-pull",
        "upstream-pull 2048 4",
        "start plain-0",
        "warm plain",
        "plain 2048 4",
    ]
    assert [record.system for record in read_cells(tmp_path / "cells.jsonl")] == [*OURS, "upstream-pull", "plain"]


def test_engines_that_compute_are_others_with_a_model_of_their_own(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "find_model", lambda model, *_, **__: tmp_path / model)
    models: list[str] = []
    monkeypatch.setattr(grid, "FleetPlan", lambda name, engines: models.append(name) or FleetPlan(name, engines))
    plan = grid_plan(systems=["shuttle-push", "shuttle-push-real"], time_scale=1, bytes_scale=1, prefill_kv_gib=8)
    plan = replace(plan, decode_kv_gib=8)
    assert stage.run(plan, tmp_path) == [
        "start prefill-0 decode-0",
        "warm shuttle-push",
        "shuttle-push 2048 4",
        "start prefill-0 decode-0",
        "warm shuttle-push-real",
        "shuttle-push-real 2048 4",
    ]
    assert models == ["emulated", "smollm2"]


def test_other_slots_take_other_engines(stage: Stage, tmp_path: Path) -> None:
    told = stage.run(grid_plan(systems=OURS, decode_slots=[8, 32]), tmp_path)
    assert [each for each in told if each.startswith("start")] == ["start prefill-0 decode-0"] * 2
    assert len(read_cells(tmp_path / "cells.jsonl")) == 4


def test_after_a_failed_cell_the_rest_runs_on_new_engines_and_the_failure_stays(stage: Stage, tmp_path: Path) -> None:
    stage.failing.add(("shuttle-pull", 4.0))
    plan = grid_plan(systems=OURS, rates=[4, 8])
    told = stage.run(plan, tmp_path)
    assert told[:6] == [
        "start prefill-0 decode-0",
        "warm shuttle-pull",
        "shuttle-pull 2048 4",
        "start prefill-0 decode-0",
        "warm shuttle-pull",
        "shuttle-pull 2048 8",
    ]
    assert [record.error for record in read_cells(tmp_path / "cells.jsonl")] == ["broken", "", "", ""]
    stage.failing.clear()
    assert stage.run(plan, tmp_path) == []


def test_engines_that_died_are_started_anew_and_the_cell_counts(stage: Stage, tmp_path: Path) -> None:
    stage.killing.add(("shuttle-pull", 4.0))
    told = stage.run(grid_plan(systems=OURS), tmp_path)
    assert [each for each in told if each.startswith("start")] == ["start prefill-0 decode-0"] * 2
    assert [record.error for record in read_cells(tmp_path / "cells.jsonl")] == ["", ""]


def test_a_run_goes_on_with_what_is_not_measured_yet(stage: Stage, tmp_path: Path) -> None:
    stage.run(grid_plan(systems=["plain"]), tmp_path)
    assert stage.run(grid_plan(systems=["plain", "shuttle-push"]), tmp_path) == [
        "start prefill-0 decode-0",
        "warm shuttle-push",
        "shuttle-push 2048 4",
    ]
    assert stage.said[-2].startswith("starting prefill-0, decode-0 for shuttle-push")
    assert "[1/1] shuttle-push: 2048 in, 4 out, 4/s, 8 slots, seed 0: TTFT p50 500 ms" in stage.said[-1]
    assert stage.said[-1].endswith("about 0 min left")


def test_repeated_prompts_are_computed_once_for_each_length(stage: Stage, tmp_path: Path) -> None:
    plan = grid_plan(prompts="repeated", input_tokens=[1024, 2048], rates=[1, 2])
    told = [each for each in stage.run(plan, tmp_path) if not each.startswith(("start", "warm"))]
    assert told == [
        "compute 1024",
        "shuttle-push 1024 1",
        "shuttle-push 1024 2",
        "compute 2048",
        "shuttle-push 2048 1",
        "shuttle-push 2048 2",
    ]
