"""A set of engines and a router on this machine, started and stopped together. For ``up``, ``demo``, tests and scripts.

::

    plan = plan_fleet(LauncherConfig(), model_path, this_machine(), free_ports(random.Random()), sys.executable)
    with Fleet(plan, env=os.environ, log_dir=Path("logs"), report=print) as fleet:
        fleet.start(timeout_s=300)
        fleet.kill("prefill-0")
        fleet.restart("prefill-0", timeout_s=120)
"""

from __future__ import annotations

import http.client
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from kvshuttle.errors import LaunchFailed
from kvshuttle.launcher.processes import Child, Guard, stop_all
from kvshuttle.launcher.state import STATE_VERSION, FleetState, ProcessState, RestartCommand, write_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from kvshuttle.launcher.plan import FleetPlan, ProcessPlan

_POLL_S = 0.25
_PROBE_TIMEOUT_S = 2.0
_PROGRESS_EVERY_S = 10.0


@dataclass(slots=True)
class _Slot:
    """One place in the fleet and the process that fills it now."""

    plan: ProcessPlan
    child: Child | None = None
    is_healthy: bool = False
    num_starts: int = 0

    @property
    def status(self) -> str:
        if self.child is None or self.child.poll() is not None:
            return "dead"
        return "healthy" if self.is_healthy else "starting"


class Fleet:
    """Processes by name (``prefill-0``, ``decode-0``, ``router``). One thread owns it.

    ``env``: environment of every process, plus what its plan adds. ``report``: takes lines of progress for a person.
    Leaving the context stops everything.
    """

    def __init__(
        self,
        plan: FleetPlan,
        *,
        env: Mapping[str, str],
        log_dir: Path,
        report: Callable[[str], None],
        state_path: Path | None = None,
        stop_timeout_s: float = 15.0,
    ) -> None:
        self.plan = plan
        self._slots = {process.name: _Slot(process) for process in plan.processes}
        assert len(self._slots) == len(plan.processes), "names are unique"
        self._env = dict(env)
        self._log_dir = log_dir
        self._report = report
        self._state_path = state_path
        self._stop_timeout_s = stop_timeout_s
        self._guard: Guard | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        slots = ", ".join(f"{name} {slot.status}" for name, slot in self._slots.items())
        return f"<Fleet {slots}>"

    def start(self, *, timeout_s: float, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Start all engines at once, then the router, and return when everything is healthy.

        Raises ``LaunchFailed``, with the end of the log of the process that is to blame. What was started stays until
        ``stop``.
        """
        deadline_at_s = time.monotonic() + timeout_s
        engines = [engine.name for engine in self.plan.engines]
        for name in engines:
            self.spawn(name)
        self.wait_healthy(engines, timeout_s=timeout_s, is_cancelled=is_cancelled)
        if self.plan.router is not None:
            self.spawn(self.plan.router.name)
            left_s = max(1.0, deadline_at_s - time.monotonic())
            self.wait_healthy([self.plan.router.name], timeout_s=left_s, is_cancelled=is_cancelled)

    def spawn(self, name: str) -> None:
        """Start one process, which must not be running, at its own ports. Does not wait for it."""
        slot = self._slots[name]
        assert slot.status == "dead", f"{name} is running already"
        self._log_dir.mkdir(parents=True, exist_ok=True)
        if self._guard is None:
            self._guard = Guard(self._env)
        slot.child = Child(slot.plan, env=self._env, log_path=self.log_path(name), guard=self._guard)
        slot.is_healthy = False
        slot.num_starts += 1
        self.write_state()

    def wait_healthy(
        self, names: Iterable[str], *, timeout_s: float, is_cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        """Return when all of ``names`` answer their health check.

        Raises ``LaunchFailed`` when one ends or time runs out.
        """
        waiting = list(names)
        started_at_s = time.monotonic()
        told_at_s = started_at_s
        while waiting:
            now_s = time.monotonic()
            for name in [name for name in waiting if self.check(name)]:
                waiting.remove(name)
                self._report(f"{name} is healthy after {now_s - started_at_s:.0f} s")
            self._raise_if_dead(waiting)
            if is_cancelled():
                raise LaunchFailed("stopped before everything was healthy")
            if now_s - started_at_s > timeout_s:
                raise LaunchFailed(self._timeout_notice(waiting, timeout_s))
            if now_s - told_at_s >= _PROGRESS_EVERY_S:
                told_at_s = now_s
                self._report(f"  waiting for {', '.join(waiting)}, {now_s - started_at_s:.0f} s")
            if waiting:
                time.sleep(_POLL_S)

    def check(self, name: str) -> bool:
        """Ask a process whether it is healthy, once."""
        slot = self._slots[name]
        is_healthy = slot.status != "dead" and _answers_ok(f"{slot.plan.url}/health")
        if is_healthy != slot.is_healthy:
            slot.is_healthy = is_healthy
            self.write_state()
        return is_healthy

    def kill(self, name: str) -> None:
        """``kill -9`` a process and everything it started; returns when they are gone."""
        self._child(name).kill()
        self.write_state()

    def restart(self, name: str, *, timeout_s: float) -> None:
        """Start a process again at the same ports, ending it first if need be, and wait until it is healthy."""
        child = self._child(name)
        stop_all([child], timeout_s=self._stop_timeout_s)
        self.spawn(name)
        self.wait_healthy([name], timeout_s=timeout_s)

    def dead(self) -> list[str]:
        """Names of started processes that have ended."""
        return [name for name, slot in self._slots.items() if slot.child is not None and slot.status == "dead"]

    def status(self, name: str) -> str:
        """``starting``, ``healthy`` (when last checked) or ``dead``."""
        return self._slots[name].status

    def death_notice(self, name: str) -> str:
        """How a process ended, for a person."""
        return self._child(name).death_notice()

    def pid(self, name: str) -> int:
        """Process id of a started process, which is its group's number too."""
        return self._child(name).pid

    def plan_of(self, name: str) -> ProcessPlan:
        """Ports, arguments and addresses of a process."""
        return self._slots[name].plan

    def log_path(self, name: str) -> Path:
        """Where a process's output goes; restarts append."""
        return self._log_dir / f"{name}.log"

    @property
    def endpoint(self) -> str | None:
        """Where clients go; None without a router."""
        return None if self.plan.router is None else self.plan.router.url

    def stop(self) -> None:
        """End everything, the router first. Idempotent."""
        running = [slot.child for slot in self._slots.values() if slot.child is not None]
        if self.plan.router is not None:
            router = self._slots[self.plan.router.name].child
            if router is not None:
                stop_all([router], timeout_s=self._stop_timeout_s)
        stop_all(running, timeout_s=self._stop_timeout_s)
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        if self._state_path is not None:
            self._state_path.unlink(missing_ok=True)

    def state(self) -> FleetState:
        """What the state file says."""
        processes = [
            ProcessState(
                name=name,
                role=slot.plan.role.value,
                status=slot.status,
                url=slot.plan.url,
                side_channel=slot.plan.side_address or None,
                pid=slot.child.pid,
                cores=list(slot.plan.cores),
                num_starts=slot.num_starts,
                log=str(self.log_path(name)),
                restart=RestartCommand(list(slot.plan.argv), dict(slot.plan.env)),
            )
            for name, slot in self._slots.items()
            if slot.child is not None
        ]
        return FleetState(STATE_VERSION, os.getpid(), self.plan.model_name, self.endpoint, processes)

    def write_state(self) -> None:
        """Bring the state file up to date, if there is one."""
        if self._state_path is not None:
            write_state(self._state_path, self.state())

    def _child(self, name: str) -> Child:
        child = self._slots[name].child
        assert child is not None, f"{name} was never started"
        return child

    def _raise_if_dead(self, names: Iterable[str]) -> None:
        for name in names:
            if self.status(name) == "dead":
                raise LaunchFailed(self.death_notice(name))

    def _timeout_notice(self, names: list[str], timeout_s: float) -> str:
        first = self._child(names[0])
        return (
            f"{', '.join(names)} not healthy within {timeout_s:.0f} s; raise --startup-timeout-s if it is only slow."
            f" {first.death_notice()}"
        )


def _answers_ok(url: str) -> bool:
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=_PROBE_TIMEOUT_S)
    try:
        connection.request("GET", parts.path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
