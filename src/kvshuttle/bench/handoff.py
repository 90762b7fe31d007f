"""`kvshuttle bench handoff`: a pair of engines for each system, all cells on it, each written down when it is done."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from kvshuttle.bench.countdown import Countdown
from kvshuttle.bench.figures import handoff_records, intervals
from kvshuttle.bench.inspection import card_of, save_metrics
from kvshuttle.bench.legs import Driven, Pair, complete, drive, send
from kvshuttle.bench.machine_facts import write_facts
from kvshuttle.bench.plan import Cell, HandoffPlan, SystemName
from kvshuttle.bench.plan_file import claim
from kvshuttle.bench.record_file import append_records
from kvshuttle.bench.records import CellDone, HandoffRecord, PaceRecord, Record, resume_records
from kvshuttle.bench.run_files import FACTS_FILE, RECORDS_FILE
from kvshuttle.bench.systems import SYSTEMS, Places, Protocol, System, plan_pair
from kvshuttle.bench.tracer import Tracer
from kvshuttle.clock import now_s
from kvshuttle.emulate.model_dir import FIRST_WORD, VOCAB_SIZE, write_model_dir
from kvshuttle.emulate.pattern import prefix_sums, prompt_key
from kvshuttle.emulate.profile import effective_profile
from kvshuttle.errors import TransportError
from kvshuttle.handoff.params import Peer
from kvshuttle.launcher.fleet import Fleet
from kvshuttle.launcher.machine import free_ports, this_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

_SETTLE_S = 0.15
"""Pause between rounds, so that leases and notifications of one do not fall into the next."""
_QUIET_WINDOW_S = 0.6
_BACKGROUND_PROMPT_TOKENS = 256
_BACKGROUND_ANSWER_TOKENS = 1700
_WARM_UP_ROUNDS = 3


@dataclass(slots=True)
class _Run:
    """What all systems of one run share."""

    plan: HandoffPlan
    out_dir: Path
    places: Places
    env: Mapping[str, str]
    say: Callable[[str], None]
    countdown: Countdown

    @property
    def records_path(self) -> Path:
        return self.out_dir / RECORDS_FILE


def run_handoff(plan: HandoffPlan, out_dir: Path, *, env: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Measure what is not measured yet in ``out_dir``.

    Raises ``ConfigError`` when the directory holds a run with other knobs, ``LaunchFailed`` when engines do not start.
    """
    profile = effective_profile(plan)
    plan.check_room(profile.geometry.kv_bytes_per_token)
    this_machine().check_memory(plan.kv_cache_gib * 2**30, named_by="--kv-cache-gib")
    claim(plan, out_dir)
    done = {(r.system, r.prompt_tokens, r.concurrency, r.background) for r in resume_records(out_dir / RECORDS_FILE)}
    write_facts(out_dir / FACTS_FILE, profile, is_continued=bool(done))
    places = Places(out_dir / "model", out_dir / "traces")
    write_model_dir(places.model_dir, profile, max_model_len=plan.max_model_len)
    waiting = {
        name: [c for c in plan.cells if (name, c.prompt_tokens, c.concurrency, c.background) not in done]
        for name in plan.systems
    }
    countdown = Countdown(sum(map(len, waiting.values())))
    run = _Run(plan, out_dir, places, env, say, countdown)
    say(f"{countdown.num_cells} of {len(plan.systems) * len(plan.cells)} cells to measure, results in {out_dir}")
    for name, cells in waiting.items():
        if cells:
            _measure_system(SYSTEMS[SystemName(name)], cells, run)


def _measure_system(system: System, cells: Sequence[Cell], run: _Run) -> None:
    run.say(f"{system.name}: starting P and D")
    pair_plan = plan_pair(system, run.plan, run.places, free_ports(random.Random()), sys.executable)
    with Fleet(pair_plan, env=run.env, log_dir=run.out_dir / "logs" / system.name, report=run.say) as fleet:
        fleet.start(timeout_s=run.plan.startup_timeout_s)
        prefill, decode = pair_plan.engines
        source = None
        if system.protocol is Protocol.SHUTTLE:
            card = card_of(prefill.side_address)
            source = Peer(prefill.side_address, card.engine_id, card.incarnation)
        pair = Pair(system, prefill.url, decode.url, int(prefill.side_address.rpartition(":")[2]), source)
        tracers = [Tracer(run.places.trace_dir_of(engine.name)) for engine in (prefill, decode)]
        bench = _Bench(run, pair, tracers[0], tracers[1])
        bench.warm_up()
        for cell in cells:
            began_at_s = now_s()
            records = bench.measure(cell)
            append_records(run.records_path, [*records, CellDone(system.name, *_place(cell), os.getloadavg()[0])])
            left = run.countdown.cell_done()
            run.say(
                f"[{run.countdown.num_done}/{run.countdown.num_cells}] {system.name}: {cell.text}: {_summary(records)},"
                f" {now_s() - began_at_s:.0f} s; {left}"
            )
        save_metrics(run.out_dir, system.name, pair_plan.engines)


@dataclass(slots=True)
class _Bench:
    """One pair of engines and the measuring of cells on it."""

    run: _Run
    pair: Pair
    prefill_trace: Tracer
    decode_trace: Tracer

    def warm_up(self) -> None:
        """Connections between the engines are made at their first hand-off, which no user waits for twice."""
        for index in range(_WARM_UP_ROUNDS):
            rng = random.Random(f"warm-up {index}")
            driven = drive(self.pair, _prompt(rng, 1024), output_tokens=self.run.plan.output_tokens)
            if driven.error:
                raise TransportError(f"{self.pair.system.name}: the first hand-off failed: {driven.error}")

    def measure(self, cell: Cell) -> list[Record]:
        """All rounds of one cell."""
        records: list[Record] = []
        for index in range(self.run.plan.num_rounds(cell)):
            rng = random.Random(f"{self.run.plan.seed} {_place(cell)} {index}")
            with self._background(cell.background, rng) as keys:
                records += self._round(cell, index, rng, keys)
            time.sleep(_SETTLE_S)
        return records

    def _round(self, cell: Cell, index: int, rng: random.Random, keys: list[str]) -> list[Record]:
        windows: dict[str, tuple[float, float]] = {}
        if keys:
            began_at_s = now_s()
            time.sleep(_QUIET_WINDOW_S)
            windows["idle"] = began_at_s, now_s()
            windows["prefill"] = self._prefill_alone(cell, rng)
        prompts = {
            _key(prompt): prompt for prompt in (_prompt(rng, cell.prompt_tokens) for _ in range(cell.concurrency))
        }
        self.prefill_trace.take()
        with ThreadPoolExecutor(cell.concurrency) as executor:
            waiting = {
                key: executor.submit(drive, self.pair, prompt, output_tokens=self.run.plan.output_tokens)
                for key, prompt in prompts.items()
            }
            driven: dict[str, Driven] = {key: future.result() for key, future in waiting.items()}
        prefill, decode = self.prefill_trace.take(), self.decode_trace.take()
        records: list[Record] = [
            *handoff_records(self.pair.system.name, cell, index, driven, prefill, decode),
        ]
        if not keys:
            return records
        starts_s = [f.start_s for f in decode if any(request.key in driven for request in f.requests)]
        windows["transfer"] = min(each.sent_at_s for each in driven.values()), max(starts_s, default=0.0)
        place = (self.pair.system.name, *_place(cell), index)
        for condition, (start_s, end_s) in windows.items():
            records.append(PaceRecord(*place, condition, intervals(decode, keys, start_s=start_s, end_s=end_s)))
        return records

    def _prefill_alone(self, cell: Cell, rng: random.Random) -> tuple[float, float]:
        """P computes as much as it will for the hand-offs, and nothing moves. Returns when that was."""
        prompts = [_prompt(rng, cell.prompt_tokens) for _ in range(cell.concurrency)]
        began_at_s = now_s()
        with ThreadPoolExecutor(cell.concurrency) as executor:
            list(executor.map(lambda prompt: complete(self.pair.prefill_url, prompt, max_tokens=1), prompts))
        return began_at_s, now_s()

    @contextlib.contextmanager
    def _background(self, count: int, rng: random.Random) -> Iterator[list[str]]:
        """``count`` requests that decode on D until the block ends. Yields their keys once all of them decode."""
        self.decode_trace.take()
        if not count:
            yield []
            return
        prompts = [_prompt(rng, _BACKGROUND_PROMPT_TOKENS) for _ in range(count)]
        with contextlib.ExitStack() as connections:
            for prompt in prompts:
                # Never read: vLLM ends the request when its connection is closed.
                request = send(self.pair.decode_url, prompt, max_tokens=_BACKGROUND_ANSWER_TOKENS)
                connections.enter_context(contextlib.closing(request))
            time.sleep(_QUIET_WINDOW_S)
            yield [_key(prompt) for prompt in prompts]


def _prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(FIRST_WORD, VOCAB_SIZE) for _ in range(num_tokens)]


def _key(prompt: Sequence[int]) -> str:
    return prompt_key(int(prefix_sums(np.asarray(prompt, dtype=np.int32))[-1]))


def _place(cell: Cell) -> tuple[int, int, int]:
    return cell.prompt_tokens, cell.concurrency, cell.background


def _summary(records: Sequence[Record]) -> str:
    handoffs = [record for record in records if isinstance(record, HandoffRecord)]
    gaps_s = [record.gap_s for record in handoffs if not record.error]
    num_failed = len(handoffs) - len(gaps_s)
    text = f"gap p50 {median(gaps_s) * 1000:.1f} ms" if gaps_s else "no hand-off worked"
    return text + (f", {num_failed} failed ({next(r.error for r in handoffs if r.error)})" if num_failed else "")
