"""``kvshuttle up``: start the fleet, say where it serves, look after it until a signal comes."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import TYPE_CHECKING

from kvshuttle.launcher.fleet import Fleet
from kvshuttle.launcher.prepare import claimed_port, prepare
from kvshuttle.launcher.restarts import RestartSchedule

if TYPE_CHECKING:
    from types import FrameType

    from kvshuttle.config import LauncherConfig
    from kvshuttle.launcher.plan import FleetPlan
    from kvshuttle.launcher.prepare import Surroundings

_WATCH_EVERY_S = 0.5


class StopSignal:
    """Notes that a person or a service manager wants the end. A second signal ends everything at once."""

    def __init__(self) -> None:
        self.is_set = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the signal; True when it has come."""
        deadline_at_s = time.monotonic() + timeout_s
        while not self.is_set and time.monotonic() < deadline_at_s:
            time.sleep(0.05)
        return self.is_set

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.is_set:
            # The guard ends what we leave behind.
            os._exit(128 + number)
        self.is_set = True


def run_up(config: LauncherConfig, around: Surroundings) -> int:
    """Serve until SIGINT, SIGTERM or SIGHUP; returns the exit code. Raises ``ConfigError`` or ``LaunchFailed``."""
    stop = StopSignal()
    with claimed_port(config):
        return serve_plan(prepare(config, around), config, around, stop)


def serve_plan(plan: FleetPlan, config: LauncherConfig, around: Surroundings, stop: StopSignal) -> int:
    """Start ``plan``, look after it until ``stop``, end it. Raises ``LaunchFailed`` when it does not start."""
    with open_fleet(plan, config, around) as fleet:
        announce_start(plan, around)
        fleet.start(timeout_s=config.startup_timeout_s, is_cancelled=lambda: stop.is_set)
        if plan.router is not None:
            around.report(serving_notice(plan.model_name, plan.router.url, around))
        _look_after(fleet, config, around, stop)
        around.report("stopping")
    around.report("everything has stopped")
    return 0


def open_fleet(plan: FleetPlan, config: LauncherConfig, around: Surroundings) -> Fleet:
    """The fleet of ``plan``, not started yet."""
    return Fleet(
        plan,
        env=around.env,
        log_dir=around.log_dir,
        report=around.report,
        state_path=around.state_path,
        stop_timeout_s=config.stop_timeout_s,
    )


def announce_start(plan: FleetPlan, around: Surroundings) -> None:
    """Say what is being started, since it takes a minute until the next line."""
    engines = ", ".join(
        f"{engine.name} (cores {_cores(engine.cores)})" if engine.cores else engine.name for engine in plan.engines
    )
    around.report(f"starting {engines}; this takes about a minute. Logs: {around.log_dir}")


def serving_notice(model_name: str, url: str, around: Surroundings) -> str:
    """The endpoint and a command to paste."""
    body = {
        "model": model_name,
        "stream": True,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    return "\n".join(
        [
            "",
            f"Serving {model_name} at {url}/v1",
            "",
            "Try it:",
            "",
            f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' \\",
            f"    -d '{json.dumps(body)}'",
            "",
            f"Logs: {around.log_dir}    Ctrl-C stops everything.",
        ]
    )


def _look_after(fleet: Fleet, config: LauncherConfig, around: Surroundings, stop: StopSignal) -> None:
    """Notice deaths, and start what died again, until the signal comes."""
    schedule = RestartSchedule()
    told: set[str] = set()
    starting_since_s: dict[str, float] = {}
    while not stop.wait(_WATCH_EVERY_S):
        now_s = time.monotonic()
        for name in [name for name in fleet.dead() if name not in told]:
            told.add(name)
            starting_since_s.pop(name, None)
            around.report(fleet.death_notice(name))
            fleet.write_state()
            delay_s = schedule.on_death(name, now_s=now_s) if config.is_restarting else None
            if delay_s is None:
                around.report(f"{name} stays down; the others go on")
            else:
                around.report(f"{name} is started again in {delay_s:.0f} s")
        for name in schedule.take_due(now_s=now_s):
            fleet.spawn(name)
            told.discard(name)
            starting_since_s[name] = now_s
        for name, since_s in list(starting_since_s.items()):
            if fleet.check(name):
                del starting_since_s[name]
                schedule.on_healthy(name, now_s=now_s)
                around.report(f"{name} is healthy again after {now_s - since_s:.0f} s")
            elif now_s - since_s > config.startup_timeout_s:
                # Ended here, it is told of and tried again like any other death.
                around.report(f"{name} did not become healthy within {config.startup_timeout_s:.0f} s")
                fleet.kill(name)


def _cores(cores: tuple[int, ...]) -> str:
    """``0-3,8`` for 0, 1, 2, 3 and 8."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
