"""Fleets of small HTTP servers in place of engines: they start in a moment and answer ``/health``."""

from __future__ import annotations

import os
import random
import sys
import time
from typing import TYPE_CHECKING

from kvshuttle.launcher.fleet import Fleet
from kvshuttle.launcher.machine import free_ports
from kvshuttle.launcher.plan import FleetPlan, ProcessPlan, Role

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SERVER = """
import http.server, os

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

http.server.ThreadingHTTPServer.allow_reuse_address = True
http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["TINY_PORT"])), Handler).serve_forever()
"""

_PORTS = free_ports(random.Random())


def plan_of(name: str, script: str = SERVER, *, argv: tuple[str, ...] | None = None) -> ProcessPlan:
    """A process that runs ``script``, which finds its port in ``TINY_PORT``."""
    port = next(_PORTS)
    return ProcessPlan(
        name=name,
        role=Role(name.partition("-")[0]),
        argv=argv or (sys.executable, "-c", script),
        env={"TINY_PORT": str(port)},
        host="127.0.0.1",
        port=port,
    )


def tiny_fleet(
    *plans: ProcessPlan,
    log_dir: Path,
    report: Callable[[str], None],
    state_path: Path | None = None,
    stop_timeout_s: float = 5.0,
) -> Fleet:
    """A fleet of ``plans``, not started; a plan of role router is started last."""
    return Fleet(
        fleet_plan_of(*plans),
        env=os.environ,
        log_dir=log_dir,
        report=report,
        state_path=state_path,
        stop_timeout_s=stop_timeout_s,
    )


def fleet_plan_of(*plans: ProcessPlan) -> FleetPlan:
    """``plans`` as a fleet's plan."""
    routers = [plan for plan in plans if plan.role is Role.ROUTER]
    return FleetPlan("tiny", tuple(plan for plan in plans if plan.role is not Role.ROUTER), *routers)


def wait_until(is_true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for a condition. Raises ``AssertionError`` when it does not come true in time."""
    deadline_at_s = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline_at_s, "did not come true in time"
        time.sleep(0.05)
