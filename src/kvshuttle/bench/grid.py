"""`kvshuttle bench run`: the cells of a plan on each system in turn, each written down when it is done."""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from kvshuttle.bench.fleets import ARRANGEMENTS, plan_engines, plan_front, wanted_engines
from kvshuttle.bench.grid_cells import Standing
from kvshuttle.bench.grid_figures import PREFILL_NAME
from kvshuttle.bench.grid_plan import GridPlan, GridSystem
from kvshuttle.bench.grid_records import NOT_KNOWN, CellRecord, read_cells
from kvshuttle.bench.inspection import save_metrics
from kvshuttle.bench.load import LoadGenerator, write_prompt_tokenizer
from kvshuttle.bench.machine_facts import write_facts
from kvshuttle.bench.plan_file import claim
from kvshuttle.bench.real_engines import RealModel, plan_real_engines
from kvshuttle.bench.record_file import append_records
from kvshuttle.bench.run_files import CELLS_FILE, FACTS_FILE, TOKENIZER_DIR
from kvshuttle.bench.systems import MODEL_NAME, Places
from kvshuttle.bench.turns_fleet import Host
from kvshuttle.clock import now_s
from kvshuttle.config import LauncherConfig
from kvshuttle.emulate.model_dir import write_model_dir
from kvshuttle.launcher.fleet import Fleet
from kvshuttle.launcher.machine import free_ports, this_machine
from kvshuttle.launcher.model import cache_dir_from
from kvshuttle.launcher.plan import FleetPlan, served_name
from kvshuttle.launcher.prepare import find_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from kvshuttle.bench.grid_plan import GridCell
    from kvshuttle.launcher.plan import ProcessPlan

_SETTLE_S = 1.0
"""Pause after a cell, so that leases and notifications of one do not fall into the next."""
_FRONT_SETTLE_S = 3.0
"""Our router is healthy with one pair of engines, and looks at each engine once a second."""
_BESIDE_ARRIVALS_S = 6.0
"""What a cell takes beyond its arrivals, for a guess of the time left."""


@dataclass(slots=True)
class _Run:
    """What all systems of one run share."""

    plan: GridPlan
    out_dir: Path
    env: Mapping[str, str]
    say: Callable[[str], None]
    load: LoadGenerator
    num_done: int = 0
    done_s: float = 0.0
    """What was expected of the cells that are done."""
    waiting: list[tuple[GridSystem, GridCell]] = field(default_factory=list)
    started_at_s: float = field(default_factory=now_s)

    @property
    def cells_path(self) -> Path:
        return self.out_dir / CELLS_FILE

    def write(self, system: GridSystem, cell: GridCell, record: CellRecord) -> None:
        """Write a cell down and tell of it."""
        append_records(self.cells_path, [record])
        self.waiting.remove((system, cell))
        self.num_done += 1
        self.done_s += self._expected_s(cell)
        waiting_s = sum(self._expected_s(each) for _, each in self.waiting)
        left_s = (now_s() - self.started_at_s) / self.done_s * waiting_s
        place = f"[{self.num_done}/{self.num_done + len(self.waiting)}] {system}: {cell.text}"
        self.say(f"{place}: {_summary(record)}; about {left_s / 60:.0f} min left")

    def _expected_s(self, cell: GridCell) -> float:
        return self.plan.arrival_s(cell) + _BESIDE_ARRIVALS_S


def run_grid(plan: GridPlan, out_dir: Path, *, env: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Measure what is not measured yet in ``out_dir``.

    Raises ``ConfigError`` when the directory holds a run of another plan, ``LaunchFailed`` when engines do not start.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    profile = plan.effective_profile()
    claim(plan, out_dir)
    done = {(record.system, record.cell) for record in read_cells(out_dir / CELLS_FILE)}
    write_facts(out_dir / FACTS_FILE, profile, is_continued=bool(done))
    write_model_dir(out_dir / "model", profile, max_model_len=plan.max_model_len)
    write_prompt_tokenizer(out_dir / TOKENIZER_DIR, out_dir / "model")
    load = LoadGenerator(env=env, log_path=out_dir / "logs" / "load.log")
    run = _Run(plan, out_dir, env, say, load)
    systems = [GridSystem(name) for name in plan.systems]
    run.waiting = [(name, cell) for name in systems for cell in plan.cells if (name, cell) not in done]
    say(f"{len(run.waiting)} of {len(systems) * len(plan.cells)} cells to measure, results in {out_dir}")
    with load:
        while run.waiting:
            # What needs the same engines, in the order of the plan; after a failure the rest of it, on new ones.
            system, cell = run.waiting[0]
            _measure_on_same_engines(system, cell.slots, run)


def _measure_on_same_engines(first: GridSystem, slots: int, run: _Run) -> None:
    """Start engines and run on them all waiting cells that they can serve, or as many as go well."""
    names = [name for name, cell in run.waiting if _has_same_engines(name, first) and cell.slots == slots]
    name = f"{_kind(first)}-{slots}"
    places = Places(run.out_dir / "model", run.out_dir / "traces" / name)
    shutil.rmtree(places.trace_dir, ignore_errors=True)
    host = Host(this_machine(), free_ports(random.Random()), sys.executable)
    model_name, engines = _plan_engines(first, slots, places, host, run)
    run.say(f"starting {', '.join(engine.name for engine in engines)} for {', '.join(dict.fromkeys(names))}")
    plan = FleetPlan(model_name, engines)
    with Fleet(plan, env=run.env, log_dir=run.out_dir / "logs" / name, report=run.say) as fleet:
        fleet.start(timeout_s=run.plan.startup_timeout_s)
        for system in dict.fromkeys(names):
            cells = [cell for name, cell in run.waiting if name is system and cell.slots == slots]
            with _front(system, engines, host.ports, run) as (url, front_pid):
                groups = {engine.name: fleet.pid(engine.name) for engine in engines}
                standing = Standing(
                    run.plan, system, engines, groups, places, run.out_dir, run.load, url, front_pid, model_name
                )
                is_well = _run_cells(standing, cells, run)
            if not is_well or fleet.dead():
                run.say("the engines are started anew")
                return
            save_metrics(run.out_dir, f"{system}-{slots}", engines)
    shutil.rmtree(places.trace_dir, ignore_errors=True)


def _has_same_engines(one: GridSystem, other: GridSystem) -> bool:
    return _kind(one) == _kind(other)


def _kind(system: GridSystem) -> str:
    """Of a system's engines, for files."""
    arrangement = ARRANGEMENTS[system]
    return f"{arrangement.connector or 'plain'}{'-real' if arrangement.is_real else ''}"


def _plan_engines(
    system: GridSystem, slots: int, places: Places, host: Host, run: _Run
) -> tuple[str, tuple[ProcessPlan, ...]]:
    """What clients call their model, and the engines."""
    connector = ARRANGEMENTS[system].connector
    if not ARRANGEMENTS[system].is_real:
        return MODEL_NAME, plan_engines(connector, run.plan, slots, places, host.ports, host.python)
    location = find_model(run.plan.model, cache_dir_from(run.env), env=run.env, report=run.say)
    model = RealModel(served_name(LauncherConfig(model=run.plan.model)), location, run.plan.dtype)
    return model.name, plan_real_engines(model, wanted_engines(connector, run.plan, slots), places, host)


@contextlib.contextmanager
def _front(
    system: GridSystem, engines: Sequence[ProcessPlan], ports: Iterator[int], run: _Run
) -> Iterator[tuple[str, int]]:
    """What clients of a system talk to: its URL, and its process, 0 where it is an engine."""
    front = plan_front(ARRANGEMENTS[system], engines, run.plan, ports, sys.executable)
    if front is None:
        yield engines[-1].url if ARRANGEMENTS[system].is_plain else _first_decode(engines).url, 0
        return
    plan = FleetPlan(MODEL_NAME, (), front)
    with Fleet(plan, env=run.env, log_dir=run.out_dir / "logs" / str(system), report=lambda _: None) as fleet:
        fleet.start(timeout_s=run.plan.startup_timeout_s)
        time.sleep(_FRONT_SETTLE_S)
        yield front.url, fleet.pid(front.name)


def _run_cells(standing: Standing, cells: Sequence[GridCell], run: _Run) -> bool:
    """All of them, or until one fails; then what the engines still do is not known, and False is returned."""
    standing.warm_up()
    for cell in cells:
        if not standing.has_computed(cell):
            run.say(f"  {standing.engines[0].name} computes the prompts of {cell.input_tokens} tokens once")
            standing.compute(cell)
        record = standing.measure(cell)
        run.write(standing.system, cell, record)
        if record.error:
            return False
        time.sleep(_SETTLE_S)
    return True


def _first_decode(engines: Sequence[ProcessPlan]) -> ProcessPlan:
    return next(engine for engine in engines if not engine.name.startswith(PREFILL_NAME))


def _summary(record: CellRecord) -> str:
    if record.error:
        return f"FAILED: {record.error.splitlines()[0]}"
    served = record.served
    if not served:
        return "no request was answered well"
    ttft_ms, tpot_ms = (median(values) * 1000 for values in ([r.ttft_s for r in served], [r.tpot_s for r in served]))
    gaps_ms = [request.gap_s * 1000 for request in served if request.gap_s != NOT_KNOWN]
    gap_text = f", gap p50 {median(gaps_ms):.0f} ms" if gaps_ms else ""
    failed_text = f", {len(record.requests) - len(served)} failed" if len(served) < len(record.requests) else ""
    return f"TTFT p50 {ttft_ms:.0f} ms, TPOT p50 {tpot_ms:.1f} ms{gap_text}{failed_text}"
