"""Carries out a schedule of faults on a running fleet, and starts again what died."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from kvshuttle.bench.churn_faults import ROUTER, Fault, FaultKind
from kvshuttle.bench.churn_records import DIED, OutageRecord
from kvshuttle.clock import now_s
from kvshuttle.launcher.processes import signal_group

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvshuttle.bench.churn_records import Journal
    from kvshuttle.launcher.fleet import Fleet

_PAUSE_AFTER_DEATH_S = 2.0
_ROUTER_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Running:
    """A process. ``life``: how often it was started."""

    name: str
    pid: int
    life: int = 1


@dataclass(slots=True)
class _Stopped:
    """A process group under SIGSTOP."""

    group: int
    until_s: float
    outage: OutageRecord


@dataclass(slots=True)
class Outages:
    """Owns the fleet while it is under load. ``began_at_s``: from when on everything is dated."""

    fleet: Fleet
    faults: list[Fault]
    journal: Journal
    say: Callable[[str], None]
    began_at_s: float
    startup_timeout_s: float
    running: list[Running] = field(default_factory=list)
    """All processes that were started, as they are now; another list after each change."""
    _num_outages: int = 0
    _down: dict[str, tuple[float, OutageRecord]] = field(default_factory=dict)
    """By name: when to start it."""
    _starting: dict[str, tuple[float, OutageRecord]] = field(default_factory=dict)
    """By name: since when."""
    _stopped: dict[str, _Stopped] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.running = [Running(each.name, self.fleet.pid(each.name)) for each in self.fleet.plan.processes]

    @property
    def is_over(self) -> bool:
        """No fault is left, and nothing is down, starting or stopped."""
        return not (self.faults or self._down or self._starting or self._stopped)

    @property
    def healthy(self) -> list[str]:
        """Processes that nothing is known to be wrong with."""
        names = [process.name for process in self.fleet.plan.processes]
        return [name for name in names if name not in self._down | self._starting | self._stopped]

    def advance(self) -> None:
        """Do what is due. Called often, by one thread."""
        self.note_deaths()
        while self.faults and self.faults[0].at_s <= self._since():
            self._strike(self.faults.pop(0))
        for name, stopped in list(self._stopped.items()):
            if self._since() >= stopped.until_s:
                self._continue(name)
        for name, (at_s, outage) in list(self._down.items()):
            if self._since() >= at_s:
                del self._down[name]
                self.fleet.spawn(name)
                self._on_start(name)
                self._starting[name] = self._since(), outage
        for name, (since_s, outage) in list(self._starting.items()):
            if name not in self._stopped and self.fleet.check(name):
                del self._starting[name]
                self._end(outage)
            elif self._since() - since_s > self.startup_timeout_s:
                self._end(outage, "it did not become healthy in time")
                del self._starting[name]
                self.fleet.kill(name)

    def note_deaths(self) -> None:
        """Write down who died by itself. Before any fault: who is killed then did not."""
        for name in [name for name in self.fleet.dead() if name not in self._down]:
            self._on_death(name)

    def _strike(self, fault: Fault) -> None:
        if fault.kind is FaultKind.RESTART:
            self._restart_router()
            return
        free = self.healthy if fault.kind is FaultKind.STOP else [*self.healthy, *self._starting, *self._stopped]
        for name in fault.victims([each for each in free if each != ROUTER]):
            if fault.kind is FaultKind.STOP:
                group = self.fleet.pid(name)
                outage = self._begin(name, fault.kind, f"for {fault.for_s:.1f} s")
                os.killpg(group, signal.SIGSTOP)
                self._stopped[name] = _Stopped(group, self._since() + fault.for_s, outage)
            else:
                self._kill(name, fault.for_s)

    def _kill(self, name: str, pause_s: float) -> None:
        detail = (
            "while it started" if name in self._starting else "while it was stopped" if name in self._stopped else ""
        )
        others = [each for each in self._starting if each != name]
        detail = detail or (f"while {', '.join(others)} started" if others else "")
        outage = self._begin(name, FaultKind.KILL, detail)
        self.fleet.kill(name)
        self._forget(name)
        self._down[name] = self._since() + pause_s, outage

    def _restart_router(self) -> None:
        outage = self._begin(ROUTER, FaultKind.RESTART, "")
        # Where it has died by itself just now, it is started here.
        _, death = self._down.pop(ROUTER, (0.0, None))
        self._forget(ROUTER)
        self.fleet.restart(ROUTER, timeout_s=_ROUTER_TIMEOUT_S)
        self._on_start(ROUTER)
        for each in (outage, death):
            if each is not None:
                self._end(each)

    def _on_death(self, name: str) -> None:
        outage = self._begin(name, DIED, self.fleet.death_notice(name)[-600:])
        self._forget(name)
        self._down[name] = self._since() + _PAUSE_AFTER_DEATH_S, outage

    def _on_start(self, name: str) -> None:
        pid = self.fleet.pid(name)
        self.running = [Running(name, pid, each.life + 1) if each.name == name else each for each in self.running]

    def _forget(self, name: str) -> None:
        """It is dead: what was under way with it is over."""
        if name in self._starting:
            self._end(self._starting.pop(name)[1])
        if name in self._stopped:
            self._end(self._stopped.pop(name).outage)

    def _continue(self, name: str) -> None:
        stopped = self._stopped.pop(name)
        signal_group(stopped.group, signal.SIGCONT)
        self._end(stopped.outage)

    def _begin(self, name: str, kind: str, detail: str) -> OutageRecord:
        self._num_outages += 1
        outage = OutageRecord(number=self._num_outages, name=name, kind=str(kind), began_s=self._since(), detail=detail)
        self.journal.write(outage)
        self.say(f"  {outage.began_s:.0f} s: {kind} {name}{f', {detail}' if detail else ''}".splitlines()[0])
        return outage

    def _end(self, outage: OutageRecord, detail: str = "") -> None:
        ended = msgspec.structs.replace(outage, ended_s=self._since(), detail=detail or outage.detail)
        self.journal.write(ended)

    def _since(self) -> float:
        return now_s() - self.began_at_s
