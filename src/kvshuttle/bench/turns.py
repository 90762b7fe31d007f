"""`kvshuttle bench turns`: conversations in closed loop through a router, with reuse of history and without."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from kvshuttle.bench.aiperf import AiperfOrder, ensure_aiperf, read_aiperf, run_aiperf
from kvshuttle.bench.countdown import Countdown
from kvshuttle.bench.inspection import save_metrics
from kvshuttle.bench.machine_facts import write_facts
from kvshuttle.bench.memory_watch import MemoryWatch
from kvshuttle.bench.plan_file import claim
from kvshuttle.bench.record_file import append_records
from kvshuttle.bench.router_log import wait_for_requests
from kvshuttle.bench.run_files import FACTS_FILE, RECORDS_FILE
from kvshuttle.bench.talk import Client, Talk
from kvshuttle.bench.turns_figures import kept_beside_cache, looks_since, ttft_s
from kvshuttle.bench.turns_fleet import (
    Host,
    Subject,
    check_pools,
    emulated_subject,
    plan_front_of_turns,
    plan_pair_of_turns,
    real_subject,
)
from kvshuttle.bench.turns_pair import RunningPair
from kvshuttle.bench.turns_plan import Answers, ClientName, EngineSetting, PrefillCache, TurnsCell, TurnsPlan
from kvshuttle.bench.turns_records import Record, TurnRecord, TurnsCellDone, read_turn_records, resume_turn_records
from kvshuttle.clock import now_s
from kvshuttle.emulate.profile import effective_profile
from kvshuttle.errors import TransportError
from kvshuttle.launcher.fleet import Fleet
from kvshuttle.launcher.machine import free_ports, this_machine
from kvshuttle.launcher.model import cache_dir_from
from kvshuttle.launcher.prepare import find_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from kvshuttle.bench.router_log import RequestLine
    from kvshuttle.launcher.plan import ProcessPlan

_ROUTER_TIMEOUT_S = 60.0
_SETTLE_TIMEOUT_S = 15.0


@dataclass(slots=True)
class _Run:
    """What all cells of one run share."""

    plan: TurnsPlan
    subject: Subject
    host: Host
    out_dir: Path
    env: Mapping[str, str]
    say: Callable[[str], None]
    countdown: Countdown
    aiperf: Path | None = None
    """The Python that has it; None where no cell needs it."""

    @property
    def records_path(self) -> Path:
        return self.out_dir / RECORDS_FILE


def run_turns(plan: TurnsPlan, out_dir: Path, *, env: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Measure what is not measured yet in ``out_dir``.

    Raises ``ConfigError`` when the directory holds a run with other knobs, ``LaunchFailed`` when engines do not start,
    ``TransportError`` when not even a short conversation works.
    """
    machine = this_machine()
    if plan.profile:
        profile = effective_profile(plan)
        check_pools(plan, profile.geometry.kv_bytes_per_token, machine)
        claim(plan, out_dir)
        subject = emulated_subject(plan, profile, out_dir / "model")
    else:
        model = find_model(plan.model, cache_dir_from(env), env=env, report=say)
        subject = real_subject(plan, model, machine)
        claim(plan, out_dir)
    host = Host(machine, free_ports(random.Random()), sys.executable)
    done = {record.cell for record in resume_turn_records(out_dir / RECORDS_FILE)}
    write_facts(out_dir / FACTS_FILE, subject.profile, is_continued=bool(done))
    waiting = [cell for cell in plan.cells if cell.name not in done]
    run = _Run(plan, subject, host, out_dir, env, say, Countdown(len(waiting)))
    if any(cell.client is ClientName.AIPERF for cell in waiting):
        run.aiperf = ensure_aiperf(cache_dir_from(env), env=env, say=say)
    say(f"{len(waiting)} of {len(plan.cells)} cells to measure, results in {out_dir}")
    for setting, cells in groupby(waiting, key=lambda cell: cell.engines):
        _measure_group(setting, list(cells), run)


def _measure_group(setting: EngineSetting, cells: Sequence[TurnsCell], run: _Run) -> None:
    """Cells that engines with the same arguments can serve, one after the other."""
    plan = run.plan
    prefill_blocks = plan.pool_blocks(plan.prefill_pool_tokens)
    if setting.prefill_cache is PrefillCache.LARGER:
        prefill_blocks += kept_beside_cache(plan, read_turn_records(run.records_path))
    run.say(f"{setting.system}, P's cache {setting.prefill_cache}: starting P with {prefill_blocks} blocks, and D")
    pair = plan_pair_of_turns(run.subject, plan, setting, prefill_blocks, run.host)
    log_dir = run.out_dir / "logs" / setting.name
    with Fleet(pair, env=run.env, log_dir=log_dir, report=run.say) as fleet:
        fleet.start(timeout_s=plan.startup_timeout_s)
        for cell in cells:
            _measure_cell(cell, pair.engines, prefill_blocks, run)


def _measure_cell(cell: TurnsCell, engines: tuple[ProcessPlan, ...], prefill_blocks: int, run: _Run) -> None:
    began_at_s = now_s()
    run.say(f"[{run.countdown.num_done + 1}/{run.countdown.num_cells}] {cell.text}")
    front = plan_front_of_turns(run.subject, run.plan, cell, engines, run.host)
    assert front.router is not None
    num_blocks = (prefill_blocks, run.plan.pool_blocks(run.plan.decode_pool_tokens))
    log_dir = run.out_dir / "logs" / cell.name
    with Fleet(front, env=run.env, log_dir=log_dir, report=lambda _: None) as fleet:
        fleet.start(timeout_s=_ROUTER_TIMEOUT_S)
        assert fleet.endpoint is not None
        pair = RunningPair(run.subject, cell, engines[0], engines[1], fleet.endpoint, num_blocks)
        pair.wait()
        bench = _Bench(run, cell, pair, fleet.log_path(front.router.name))
        bench.warm_up()
        records = bench.measure()
    save_metrics(run.out_dir, cell.name, engines)
    append_records(run.records_path, records)
    left = run.countdown.cell_done()
    run.say(f"  {_summary(records)}, {now_s() - began_at_s:.0f} s; {left}")


@dataclass(frozen=True, slots=True)
class _Held:
    """Conversations that are over. ``names``: of those that engines may have kept something of."""

    turns: list[TurnRecord]
    names: set[str]
    first_at_s: float
    duration_s: float


@dataclass(slots=True)
class _Bench:
    """One cell: engines and a router that run, and the conversations to hold there."""

    run: _Run
    cell: TurnsCell
    pair: RunningPair
    front_log: Path

    def warm_up(self) -> None:
        """A short conversation, forgotten when it is over. In two turns with more than a block each all connections are
        made, which no user waits for twice."""
        plan = replace(
            self.run.plan, conversations=1, turns=2, first_tokens=300, turn_tokens=200, output_tokens=8, think_s=0.0
        )
        talk = self._talk(plan, 0, f"{self.cell.name} warm-up", now_s(), lambda: False)
        records = talk.run(lambda _: None)
        talk.client.close()
        if records[-1].error:
            raise TransportError(f"{self.cell.text}: a first short conversation failed: {records[-1].error}")
        self.pair.forget(talk.names)

    def measure(self) -> list[Record]:
        """All conversations at once, to their ends."""
        before, began_at_s = self.pair.counters(), now_s()
        with MemoryWatch(
            self.cell.name, self.pair.prefill, self.pair.decode, self.pair.keeper_url, began_at_s
        ) as watch:
            held = self._hold_by_aiperf() if self.cell.client is ClientName.AIPERF else self._hold(began_at_s)
            load_average = os.getloadavg()[0]
            # What the last answers leave shows after another step, which this brings.
            after = self.pair.counters()
        joined = self._joined(held.turns)
        self.pair.forget(held.names)
        pools = self.pair.pools()
        done = TurnsCellDone(
            self.cell.name,
            duration_s=held.duration_s,
            prefill_blocks=pools[0].num_blocks,
            decode_blocks=pools[1].num_blocks,
            block_size_tokens=pools[1].block_size_tokens,
            block_len_bytes=pools[1].block_len_bytes,
            local_hit_tokens=after.local_hit_tokens - before.local_hit_tokens,
            history_tokens=after.history_tokens - before.history_tokens,
            preemptions=after.preemptions - before.preemptions,
            load_average=load_average,
        )
        return [*joined, *looks_since(watch.records, held.first_at_s - began_at_s), done]

    def _hold(self, began_at_s: float) -> _Held:
        """By as many threads with OpenAI's client."""
        plan, is_over = self.run.plan, threading.Event()
        talks = [
            self._talk(plan, number, self.cell.name, began_at_s, is_over.is_set) for number in range(plan.conversations)
        ]
        progress = _Progress(plan, self.run.say)
        with ThreadPoolExecutor(len(talks)) as executor:
            try:
                waiting = [executor.submit(talk.run, progress.on_turn) for talk in talks]
                turns = [record for future in waiting for record in future.result()]
            finally:
                is_over.set()
        for talk in talks:
            talk.client.close()
        return _Held(turns, {name for talk in talks for name in talk.names}, began_at_s, now_s() - began_at_s)

    def _hold_by_aiperf(self) -> _Held:
        """By aiperf, which takes a while to start and to end; that is not counted."""
        run, cell = self.run, self.cell
        assert run.aiperf is not None
        raw_dir = run.out_dir / "raw" / cell.name
        is_streaming = cell.answers is Answers.STREAMED
        order = AiperfOrder(self.pair.url, run.subject.name, str(run.subject.model), cell.name, run.plan, is_streaming)
        run_aiperf(run.aiperf, order, run.subject.write, raw_dir, env=run.env)
        held = read_aiperf(raw_dir, run.plan, run.subject.write, cell.name)
        duration_s = max(record.sent_at_s + record.total_s for record in held.turns)
        return _Held(held.turns, held.names, held.first_at_s, duration_s)

    def _talk(
        self, plan: TurnsPlan, number: int, salt: str, began_at_s: float, is_stopping: Callable[[], bool]
    ) -> Talk:
        client = Client(
            self.pair.url,
            self.run.subject.name,
            salt=salt,
            is_streaming=self.cell.answers is Answers.STREAMED,
            # Our router recognises conversations; the proxy must be told.
            conversation="" if self.pair.is_ours else f"{salt} {number}",
        )
        return Talk(plan, number, self.run.subject.write, client, self.cell.name, began_at_s, is_stopping)

    def _joined(self, turns: Sequence[TurnRecord]) -> list[TurnRecord]:
        """With what the router has logged of them."""
        ids = {record.request_id for record in turns if record.request_id}
        lines = wait_for_requests(self.front_log, ids, timeout_s=_SETTLE_TIMEOUT_S)
        return [
            record if (line := lines.get(record.request_id)) is None else _with_line(record, line) for record in turns
        ]


def _with_line(record: TurnRecord, line: RequestLine) -> TurnRecord:
    return msgspec.structs.replace(
        record,
        prefill_s=line.stages_s.get("prefill", record.prefill_s),
        stages_s=line.stages_s,
        cached_tokens=line.num_cached_tokens,
        mode=line.mode,
        history=line.history,
        failures=line.failures,
    )


class _Progress:
    """Says of each turn when all conversations have had it. Called by the threads of all of them."""

    def __init__(self, plan: TurnsPlan, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._say = say
        self._lock = threading.Lock()
        self._turns: defaultdict[int, list[TurnRecord]] = defaultdict(list)

    def on_turn(self, record: TurnRecord) -> None:
        """A turn is over."""
        with self._lock:
            if record.error:
                self._say(f"  conversation {record.conversation} failed in turn {record.turn}: {record.error}")
                return
            turns = self._turns[record.turn]
            turns.append(record)
            if len(turns) == self._plan.conversations:
                tokens = median(each.prompt_tokens for each in turns)
                self._say(f"  turn {record.turn} of {self._plan.turns}: {tokens:,.0f} tokens, {_speed(turns)}")


def _summary(records: Sequence[Record]) -> str:
    turns = [record for record in records if isinstance(record, TurnRecord)]
    whole = [record for record in turns if not record.error]
    text = _speed(whole) if whole else "no turn worked"
    num_failed = sum(bool(record.error) for record in turns)
    return text + (f", {num_failed} conversations failed" if num_failed else "")


def _speed(turns: Sequence[TurnRecord]) -> str:
    ttfts_s = [value for record in turns if (value := ttft_s(record)) is not None]
    name, values_s = ("TTFT", ttfts_s) if ttfts_s else ("whole answer", [record.total_s for record in turns])
    return f"{name} p50 {median(values_s) * 1000:,.0f} ms"
