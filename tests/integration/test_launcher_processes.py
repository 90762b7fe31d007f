"""Real processes under the launcher: small servers in place of engines."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvshuttle.errors import LaunchFailed
from kvshuttle.launcher.machine import free_ports, is_port_free
from kvshuttle.launcher.processes import is_group_alive
from kvshuttle.launcher.state import read_state
from support.tiny_fleet import SERVER, plan_of, tiny_fleet, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvshuttle.launcher.fleet import Fleet

STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVER
WITH_GRANDCHILD = (
    "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n" + SERVER
)
DYING = "import sys\nprint('OSError: Address already in use', flush=True)\nsys.exit(3)\n"
DEAF = "import time\nprint('loading', flush=True)\ntime.sleep(600)\n"
LAUNCHER = """
import sys, time
from pathlib import Path
from support.tiny_fleet import plan_of, tiny_fleet

fleet = tiny_fleet(plan_of("prefill-0", sys.argv[2]), log_dir=Path(sys.argv[1]), report=lambda _: None)
fleet.start(timeout_s=60)
print(fleet.pid("prefill-0"), flush=True)
time.sleep(600)
"""


@pytest.fixture
def open_fleet(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    """Makes fleets of tiny servers; stops them all afterwards."""
    fleets: list[Fleet] = []

    def make(*plans: object, state: bool = False, said: list[str] | None = None, stop_timeout_s: float = 5.0) -> Fleet:
        fleet = tiny_fleet(
            *plans,
            log_dir=tmp_path / "logs",
            report=(said if said is not None else []).append,
            state_path=tmp_path / "state.json" if state else None,
            stop_timeout_s=stop_timeout_s,
        )
        fleets.append(fleet)
        return fleet

    yield make
    for fleet in fleets:
        fleet.stop()


def test_a_fleet_starts_says_where_everything_is_and_stops(open_fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    said: list[str] = []
    fleet = open_fleet(plan_of("prefill-0"), plan_of("decode-0"), state=True, said=said)
    fleet.start(timeout_s=60)
    state = read_state(tmp_path / "state.json")
    assert [(process.name, process.status, process.num_starts) for process in state.processes] == [
        ("prefill-0", "healthy", 1),
        ("decode-0", "healthy", 1),
    ]
    groups = [process.pid for process in state.processes]
    assert all(is_group_alive(group) for group in groups)
    assert Path(state.processes[0].log).read_text().startswith("--- ")
    assert any(line.startswith("decode-0 is healthy after") for line in said)
    fleet.stop()
    assert not any(is_group_alive(group) for group in groups)
    assert not (tmp_path / "state.json").exists()


def test_the_restart_command_of_the_state_file_starts_the_same_server(
    open_fleet: Callable[..., Fleet], tmp_path: Path
) -> None:
    fleet = open_fleet(plan_of("prefill-0"), state=True)
    fleet.start(timeout_s=60)
    (process,) = read_state(tmp_path / "state.json").processes
    fleet.kill("prefill-0")
    with subprocess.Popen(process.restart.argv, env={**os.environ, **process.restart.env}) as started:
        try:
            wait_until(lambda: fleet_answers(process.url))
        finally:
            started.terminate()


def test_a_killed_process_is_started_again_at_the_same_port(open_fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    fleet = open_fleet(plan_of("prefill-0"), plan_of("decode-0"), state=True)
    fleet.start(timeout_s=60)
    before = fleet.pid("prefill-0")
    other = fleet.pid("decode-0")
    fleet.kill("prefill-0")
    assert fleet.dead() == ["prefill-0"]
    assert "SIGKILL" in fleet.death_notice("prefill-0")
    fleet.restart("prefill-0", timeout_s=60)
    assert fleet.pid("prefill-0") != before
    assert fleet.pid("decode-0") == other
    restarted = read_state(tmp_path / "state.json").processes[0]
    assert (restarted.status, restarted.num_starts, restarted.pid) == ("healthy", 2, fleet.pid("prefill-0"))
    assert restarted.url == fleet.plan_of("prefill-0").url


def test_a_process_that_dies_at_start_is_named_with_the_end_of_its_log_and_what_to_do(
    open_fleet: Callable[..., Fleet],
) -> None:
    fleet = open_fleet(plan_of("prefill-0"), plan_of("decode-0", DYING))
    with pytest.raises(LaunchFailed) as failed:
        fleet.start(timeout_s=60)
    text = str(failed.value)
    assert text.startswith("decode-0 ended with exit code 3")
    assert "OSError: Address already in use" in text
    assert "=> another process has the port" in text


def test_a_process_that_never_gets_healthy_is_named_when_time_is_up(open_fleet: Callable[..., Fleet]) -> None:
    fleet = open_fleet(plan_of("prefill-0", DEAF))
    with pytest.raises(LaunchFailed, match=r"prefill-0 not healthy within 1 s; raise --startup-timeout-s"):
        fleet.start(timeout_s=1)


def test_a_command_that_does_not_exist_is_a_readable_failure(open_fleet: Callable[..., Fleet]) -> None:
    fleet = open_fleet(plan_of("prefill-0", argv=("/nowhere/python",)))
    with pytest.raises(LaunchFailed, match="prefill-0 could not be started"):
        fleet.start(timeout_s=1)


def test_starting_can_be_cancelled(open_fleet: Callable[..., Fleet]) -> None:
    fleet = open_fleet(plan_of("prefill-0", DEAF))
    with pytest.raises(LaunchFailed, match="stopped before"):
        fleet.start(timeout_s=60, is_cancelled=lambda: True)


def test_what_a_dead_process_had_started_is_ended_with_it(open_fleet: Callable[..., Fleet]) -> None:
    fleet = open_fleet(plan_of("prefill-0", WITH_GRANDCHILD))
    fleet.start(timeout_s=60)
    group = fleet.pid("prefill-0")
    os.kill(group, signal.SIGKILL)
    wait_until(lambda: fleet.dead() == ["prefill-0"])
    wait_until(lambda: not is_group_alive(group))


def test_a_process_that_ignores_the_polite_signal_is_ended_by_force(open_fleet: Callable[..., Fleet]) -> None:
    fleet = open_fleet(plan_of("prefill-0", STUBBORN), plan_of("decode-0"), stop_timeout_s=0.5)
    fleet.start(timeout_s=60)
    group = fleet.pid("prefill-0")
    started_at_s = time.monotonic()
    fleet.stop()
    assert not is_group_alive(group)
    assert 0.5 <= time.monotonic() - started_at_s < 20


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path), WITH_GRANDCHILD], stdout=subprocess.PIPE, env=env, text=True
    ) as launcher:
        assert launcher.stdout is not None
        group = int(launcher.stdout.readline())
        assert is_group_alive(group)
        launcher.kill()
    wait_until(lambda: not is_group_alive(group))


def test_free_ports_are_free_different_and_below_those_of_outgoing_connections() -> None:
    lowest_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    generator = free_ports(random.Random(7))
    ports = [next(generator) for _ in range(50)]
    assert len(set(ports)) == 50
    assert all(1024 < port < max(lowest_outgoing, 32_000) for port in ports)
    assert all(is_port_free("127.0.0.1", port) for port in ports)


def test_a_port_that_somebody_listens_on_is_not_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert not is_port_free("127.0.0.1", taken.getsockname()[1])


def fleet_answers(url: str) -> bool:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
