"""`kvshuttle bench churn`: more load than engines can carry, while they are killed and stopped at random."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvshuttle.bench.churn_faults import ROUTER, plan_faults
from kvshuttle.bench.churn_fleet import plan_churn_fleet
from kvshuttle.bench.churn_load import Windows
from kvshuttle.bench.churn_outages import Outages
from kvshuttle.bench.churn_records import BUG_COUNTERS, AskRecord, How, Journal, RoutedRecord, read_churn_records
from kvshuttle.bench.churn_report import read_verdict
from kvshuttle.bench.churn_rest import Rest, end_record
from kvshuttle.bench.churn_talk import Asker, Talker
from kvshuttle.bench.churn_watch import Watch
from kvshuttle.bench.load import BENCH_SERVE_OWN_PROMPTS, LoadGenerator, write_prompt_tokenizer
from kvshuttle.bench.machine_facts import write_facts
from kvshuttle.bench.plan_file import claim
from kvshuttle.bench.record_file import has_records
from kvshuttle.bench.router_calls import wait_for_pair
from kvshuttle.bench.router_log import read_request_lines
from kvshuttle.bench.run_files import FACTS_FILE, RECORDS_FILE, TOKENIZER_DIR
from kvshuttle.clock import now_s
from kvshuttle.emulate.model_dir import write_model_dir
from kvshuttle.emulate.profile import effective_profile
from kvshuttle.errors import ConfigError, LaunchFailed, TransportError
from kvshuttle.launcher.fleet import Fleet
from kvshuttle.launcher.machine import this_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from kvshuttle.bench.churn_plan import ChurnPlan
    from kvshuttle.launcher.plan import FleetPlan

_PAIRS_TIMEOUT_S = 60.0
_STEP_S = 0.2
_CLIENTS_TIMEOUT_S = 300.0
"""After the load's end, for what clients still wait for."""
_SETTLE_S = 5.0
"""Engines' connections to clients that left, and the router's to engines, are closed by then."""


@dataclass(slots=True)
class _Run:
    """What one run works with."""

    plan: ChurnPlan
    out_dir: Path
    say: Callable[[str], None]
    fleet_plan: FleetPlan
    fleet: Fleet
    load: LoadGenerator
    journal: Journal
    began_at_s: float = 0.0
    is_over: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        endpoint = self.fleet.endpoint
        assert endpoint is not None
        return endpoint


def run_churn(plan: ChurnPlan, out_dir: Path, *, env: Mapping[str, str], say: Callable[[str], None]) -> bool:
    """One run, whole. What is found is written down and judged; returns whether it passes.

    One that is cut off, by a signal or because engines do not answer, does not pass. Raises ``ConfigError`` when the
    directory holds a run already, ``LaunchFailed`` when engines do not start.
    """
    if has_records(out_dir / RECORDS_FILE):
        raise ConfigError(f"--out: {out_dir} holds a run already, which cannot go on; choose another directory")
    profile = effective_profile(plan)
    plan.check_machine(this_machine(), profile.geometry.kv_bytes_per_token)
    claim(plan, out_dir)
    write_model_dir(out_dir / "model", profile, max_model_len=plan.max_model_len)
    write_prompt_tokenizer(out_dir / TOKENIZER_DIR, out_dir / "model")
    write_facts(out_dir / FACTS_FILE, profile, is_continued=False)
    fleet_plan = plan_churn_fleet(plan, out_dir / "model", profile.geometry.dtype)
    with (
        Fleet(fleet_plan, env=env, log_dir=out_dir / "logs", report=say) as fleet,
        LoadGenerator(env=env, log_path=out_dir / "logs" / "load.log", program=BENCH_SERVE_OWN_PROMPTS) as load,
    ):
        run = _Run(plan, out_dir, say, fleet_plan, fleet, load, Journal(out_dir / RECORDS_FILE))
        say(f"starting {len(fleet_plan.engines)} engines and the router, results in {out_dir}")
        load.start()
        fleet.start(timeout_s=plan.startup_timeout_s)
        wait_for_pair(run.url, timeout_s=_PAIRS_TIMEOUT_S)
        try:
            _carry_out(run)
        except (LaunchFailed, TransportError, KeyboardInterrupt) as error:
            say(f"cut off: {error or 'by a signal'}")
    verdict = read_verdict(out_dir)
    say(verdict.text)
    return verdict.is_pass


def _carry_out(run: _Run) -> None:
    """Load and faults, then rest."""
    plan, run.began_at_s = run.plan, now_s()
    asker = Asker(run.url, run.began_at_s)
    tokenizer_dir = run.out_dir / TOKENIZER_DIR
    windows = Windows(plan, run.load, run.journal, run.out_dir, tokenizer_dir, run.url, run.say, run.began_at_s)
    run.say("measuring what the engines can do before the first fault")
    capacity = windows.measure_capacity()
    began_s = now_s() - run.began_at_s
    run.say(f"they answer {capacity:.2f} requests/s; {plan.minutes:g} minutes of load and faults begin")
    faults = [replace(fault, at_s=began_s + fault.at_s) for fault in plan_faults(plan)]
    outages = Outages(run.fleet, faults, run.journal, run.say, run.began_at_s, plan.startup_timeout_s)
    watch = Watch(
        run.fleet_plan.processes, lambda: outages.running, lambda: outages.healthy, run.journal, run.began_at_s
    )
    watch.look()
    with watch:
        clients = ThreadPoolExecutor(1 + plan.conversations, "churn-client")
        asking = [clients.submit(windows.run_until, began_s + plan.duration_s, capacity, run.is_over.is_set)]
        for number in range(plan.conversations):
            talker = Talker(plan, number, asker, run.journal, run.is_over.is_set, run.is_over.wait)
            asking.append(clients.submit(talker.run))
        try:
            _under_load(run, outages, asking, end_at_s=run.began_at_s + began_s + plan.duration_s)
        finally:
            run.is_over.set()
            clients.shutdown(wait=False)
        run.say("the load is over; waiting until nothing is held any more")
        _rest(run, watch, asker, outages)
        asker.close()


def _under_load(run: _Run, outages: Outages, asking: Sequence[Future[None]], *, end_at_s: float) -> None:
    """Until the time is over, everything has come up again, and every client has its answer."""
    while now_s() < end_at_s or not outages.is_over:
        outages.advance()
        for client in asking:
            if client.done():
                client.result()  # where it ended by an exception, nobody asks any more
        time.sleep(_STEP_S)
        if now_s() > end_at_s + run.plan.startup_timeout_s:
            raise LaunchFailed(f"not everything came up again: {run.fleet!r}")
        if now_s() > end_at_s:
            run.is_over.set()
    run.is_over.set()
    deadline_at_s = now_s() + _CLIENTS_TIMEOUT_S
    while not all(client.done() for client in asking):
        outages.advance()
        time.sleep(_STEP_S)
        if now_s() > deadline_at_s:
            raise LaunchFailed(f"clients still wait {_CLIENTS_TIMEOUT_S:.0f} s after the load's end")
    for client in asking:
        client.result()


def _rest(run: _Run, watch: Watch, asker: Asker, outages: Outages) -> None:
    rest = Rest(run.plan, run.fleet_plan, run.journal, run.began_at_s)
    found = rest.wait()
    run.say(f"  {'nothing is left' if not found.left else f'left: {found.left}'} after {found.took_s:.0f} s")
    time.sleep(_SETTLE_S)
    watch.look()
    last = rest.ask_in_each_mode(asker)
    run.say(f"  {sum(ask.how is How.RIGHT for ask in last)} of {len(last)} last requests are answered well")
    run.journal.write(*_routed(run))
    outages.note_deaths()
    looks = watch.look()
    bugs = {
        f"{look.name} {name}": look.gauges[name] for look in looks for name in BUG_COUNTERS if look.gauges.get(name)
    }
    run.journal.write(end_record(run.out_dir / "logs", bugs))


def _routed(run: _Run) -> list[RoutedRecord]:
    """What the router's log says of requests that failed."""
    lines = read_request_lines(run.fleet.log_path(ROUTER))
    asks = [record for record in read_churn_records(run.journal.path) if isinstance(record, AskRecord)]
    return [
        RoutedRecord(
            request_id=ask.request_id,
            outcome=line.outcome,
            status=line.status,
            failures=line.failures,
            total_s=line.stages_s.get("total", 0.0),
        )
        for ask in asks
        if ask.how not in (How.RIGHT, How.LEFT) and (line := lines.get(ask.request_id)) is not None
    ]
