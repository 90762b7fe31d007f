"""``kvshuttle up`` looking after small servers in place of engines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvshuttle.launcher.processes import is_group_alive
from kvshuttle.launcher.state import FleetState, read_state
from support.tiny_fleet import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPT = """
import os, sys
from pathlib import Path
from support.tiny_fleet import *
from kvshuttle.config import LauncherConfig
from kvshuttle.launcher.prepare import Surroundings
from kvshuttle.launcher.up import StopSignal, serve_plan

folder = Path(sys.argv[1])
say = lambda line: print(line, flush=True)
around = Surroundings(dict(os.environ), folder, folder / "logs", folder / "state.json", say, lambda words: None)
plan = fleet_plan_of(plan_of("prefill-0"), plan_of("decode-0"), plan_of("router"))
config = LauncherConfig(is_restarting=sys.argv[2] == "restart", stop_timeout_s=5.0)
sys.exit(serve_plan(plan, config, around, StopSignal()))
"""


class Up:
    """A launcher process that serves tiny servers."""

    def __init__(self, folder: Path, mode: str) -> None:
        self._state_path = folder / "state.json"
        self.output = folder / "output"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SCRIPT, str(folder), mode],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            )
        wait_until(lambda: "Ctrl-C stops everything" in self.output.read_text())

    def state(self) -> FleetState:
        return read_state(self._state_path)

    def groups(self) -> list[int]:
        return [process.pid for process in self.state().processes]

    def status(self, name: str) -> tuple[str, int]:
        (found,) = [process for process in self.state().processes if process.name == name]
        return found.status, found.num_starts


@pytest.fixture
def up(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Up]:
    """Serving; ended afterwards, whatever the test did."""
    started = Up(tmp_path, getattr(request, "param", "restart"))
    yield started
    started.process.kill()
    started.process.wait()


def test_it_prints_the_endpoint_and_a_curl_to_paste(up: Up) -> None:
    output = up.output.read_text()
    assert up.state().endpoint is not None
    assert f"curl -N {up.state().endpoint}/v1/chat/completions" in output
    assert msgspec.json.decode(output.partition("-d '")[2].partition("'")[0])["model"] == "tiny"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything_it_started(up: Up, number: signal.Signals) -> None:
    groups = up.groups()
    up.process.send_signal(number)
    assert up.process.wait(timeout=60) == 0
    assert not any(is_group_alive(group) for group in groups)
    assert "everything has stopped" in up.output.read_text()


def test_a_process_that_dies_is_told_of_and_started_again_while_the_others_go_on(up: Up) -> None:
    before = {process.name: process.pid for process in up.state().processes}
    os.killpg(before["decode-0"], signal.SIGKILL)
    wait_until(lambda: up.status("decode-0") == ("healthy", 2))
    after = {process.name: process.pid for process in up.state().processes}
    assert after["decode-0"] != before["decode-0"]
    assert (after["prefill-0"], after["router"]) == (before["prefill-0"], before["router"])
    output = up.output.read_text()
    assert "decode-0 was ended by SIGKILL" in output
    assert "decode-0 is started again in 1 s" in output


@pytest.mark.parametrize("up", ["leave"], indirect=True)
def test_without_restarting_a_death_is_only_told_of(up: Up) -> None:
    group = up.state().processes[0].pid
    os.killpg(group, signal.SIGKILL)
    wait_until(lambda: "prefill-0 stays down; the others go on" in up.output.read_text())
    wait_until(lambda: up.status("prefill-0") == ("dead", 1))
    assert up.status("decode-0") == ("healthy", 1)
    assert up.status("router") == ("healthy", 1)
