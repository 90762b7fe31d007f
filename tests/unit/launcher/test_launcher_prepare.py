"""Faults that are found before anything starts, and the logs that a start may delete."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path
from typing import Any

import pytest

from kvshuttle.cli import _check_router
from kvshuttle.config import LauncherConfig
from kvshuttle.errors import ConfigError, LaunchFailed
from kvshuttle.launcher.machine import claim_port, free_ports
from kvshuttle.launcher.prepare import (
    Surroundings,
    check_directory,
    claimed_port,
    default_log_dir,
    delete_old_logs,
    find_model,
    prepare,
)

NOW_S = 1_000_000_000.0
DAY_S = 86_400.0
NO_PID = 2**22 + 1
"""Above the highest that Linux gives."""


def surroundings(folder: Path, **changes: Any) -> Surroundings:
    values = {
        "env": {},
        "cache_dir": folder / "cache",
        "log_dir": folder / "logs",
        "state_path": None,
        "report": lambda line: None,
        "check_router": _check_router,
        **changes,
    }
    return Surroundings(**values)


def model_in(folder: Path) -> str:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return str(model)


def test_a_sound_configuration_is_planned_with_the_routers_arguments(tmp_path: Path) -> None:
    config = LauncherConfig(model=model_in(tmp_path), port=0, router_args=("--max-attempts", "2"))
    plan = prepare(config, surroundings(tmp_path, state_path=tmp_path / "new" / "state.json"))
    assert plan.router is not None
    assert plan.router.argv[-2:] == ("--max-attempts", "2")
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({"router_args": ("--max-attempts", "x")}, {}, "--router-arg: argument --max-attempts: invalid int"),
        ({"router_args": ("--max-attempts", "0")}, {}, "--router-arg: max_attempts: 1 or more"),
        ({"router_args": ("--frobnicate",)}, {}, "--router-arg: unrecognized arguments: --frobnicate"),
        ({"router_args": ("--help",)}, {}, "--router-arg: the router would end with code 0"),
        ({}, {"env": {"KVSHUTTLE_SECRET": "short"}}, "KVSHUTTLE_SECRET: at least 16 bytes"),
        ({}, {"log_dir": Path("/proc/x")}, "--log-dir: cannot write to /proc/x"),
        ({}, {"state_path": Path("/proc/x/y")}, "--state: cannot write to /proc/x"),
        ({}, {"state_path": Path("/tmp")}, "--state: /tmp is a directory"),
        ({}, {"state_path": Path("/tmp") / ("s" * 300)}, "--state: File name too long: /tmp/sss"),
        ({"host": "203.0.113.1"}, {}, "--host: 203.0.113.1 is not an address of this machine"),
        ({"host": "203.0.113.1", "port": 8000}, {}, "--host: 203.0.113.1 is not an address of this machine"),
        ({"host": "a" * 70}, {}, "--host: aaa"),
    ],
)
def test_a_fault_is_found_before_the_model_is_looked_for_and_deletes_no_logs(
    settings: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    logs = make_runs(tmp_path / "cache" / "logs", 25, changed_at_s=NOW_S)
    config = LauncherConfig(**{"model": "/nowhere", "port": 0, **settings})
    with pytest.raises(ConfigError) as raised:
        prepare(config, surroundings(tmp_path, **{"log_dir": default_log_dir(tmp_path / "cache", 1), **changes}))
    assert str(raised.value).startswith(message)
    assert all(log.exists() for log in logs)


def test_a_taken_port_is_blamed_on_the_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchFailed, match=f"--port: 127.0.0.1:{port} is taken"):
            prepare(LauncherConfig(model="/nowhere", port=port), surroundings(tmp_path))


@pytest.mark.parametrize(
    ("env", "expected"), [({}, "lo"), ({"UCX_NET_DEVICES": "eth7"}, None), ({"UCX_TLS": "rc,cuda_ipc"}, None)]
)
def test_transfers_stay_on_this_machine_unless_the_operator_says_something_of_them(
    env: dict[str, str], expected: str | None, tmp_path: Path
) -> None:
    plan = prepare(LauncherConfig(model=model_in(tmp_path), port=0), surroundings(tmp_path, env=env))
    assert [engine.env.get("UCX_NET_DEVICES") for engine in plan.engines] == [expected] * 2
    assert plan.router is not None
    assert "UCX_NET_DEVICES" not in plan.router.env


def test_a_port_that_another_launcher_is_starting_for_is_refused_until_that_one_has_ended() -> None:
    config = LauncherConfig(port=next(free_ports(random.Random())))
    refusal = f"--port: another kvshuttle starts or serves at 127.0.0.1:{config.port}"
    with claimed_port(config):
        with pytest.raises(LaunchFailed, match=refusal):
            claimed_port(config).__enter__()
        elsewhere = claim_port("127.0.0.2", config.port)
    again = claim_port("127.0.0.1", config.port)
    assert elsewhere is not None
    assert again is not None
    elsewhere.close()
    again.close()


def make_runs(logs: Path, num_runs: int, *, changed_at_s: float) -> list[Path]:
    """Directories of runs, the first the oldest, with one file each."""
    runs = []
    for index in range(num_runs):
        run = logs / f"20010909-0146{index:02d}-{NO_PID}"
        run.mkdir(parents=True)
        (run / "router.log").write_text("")
        touch(run / "router.log", changed_at_s + index)
        touch(run, changed_at_s + index)
        runs.append(run)
    return runs


def touch(path: Path, at_s: float) -> None:
    os.utime(path, (at_s, at_s))


def test_a_start_deletes_the_oldest_logs_in_the_cache(tmp_path: Path) -> None:
    runs = make_runs(tmp_path / "cache" / "logs", 22, changed_at_s=NOW_S)
    log_dir = default_log_dir(tmp_path / "cache", NO_PID)
    prepare(LauncherConfig(model=model_in(tmp_path), port=0), surroundings(tmp_path, log_dir=log_dir))
    assert [run.exists() for run in runs] == [False] * 3 + [True] * 19
    assert log_dir.exists()


def test_logs_outside_of_the_cache_are_never_deleted(tmp_path: Path) -> None:
    runs = make_runs(tmp_path / "elsewhere", 25, changed_at_s=NOW_S)
    around = surroundings(tmp_path, log_dir=tmp_path / "elsewhere" / "mine")
    prepare(LauncherConfig(model=model_in(tmp_path), port=0), around)
    assert all(run.exists() for run in runs)


def test_logs_that_changed_within_a_day_are_kept_however_many_there_are(tmp_path: Path) -> None:
    runs = make_runs(tmp_path, 30, changed_at_s=NOW_S - DAY_S + 60)
    delete_old_logs(tmp_path, NOW_S)
    assert all(run.exists() for run in runs)


def test_an_old_directory_with_a_file_that_is_still_written_is_kept(tmp_path: Path) -> None:
    runs = make_runs(tmp_path, 30, changed_at_s=NOW_S - 3 * DAY_S)
    touch(runs[0] / "router.log", NOW_S - 60)
    delete_old_logs(tmp_path, NOW_S)
    assert runs[0].exists()
    assert sum(run.exists() for run in runs) == 20


def test_the_logs_of_a_launcher_that_still_runs_are_kept_though_it_was_silent_for_days(tmp_path: Path) -> None:
    runs = make_runs(tmp_path, 30, changed_at_s=NOW_S - 3 * DAY_S)
    quiet = runs[0].rename(tmp_path / f"20010909-014600-{os.getpid()}")
    delete_old_logs(tmp_path, NOW_S)
    assert quiet.exists()
    assert not runs[1].exists()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/nowhere", "--model: /nowhere is neither a directory nor one of the bundled models"),
        ("empty", "--model: .*empty holds no config.json; give the directory of a model"),
        ("broken", "--model: .*config.json: Expecting value.*; give the directory of a whole model"),
        ("list", "--model: .*config.json holds list, no object"),
    ],
)
def test_a_start_that_is_refused_leaves_no_directories_behind(model: str, message: str, tmp_path: Path) -> None:
    for name, text in (("empty", None), ("broken", ""), ("list", "[]")):
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "config.json").write_text(text)
    there = sorted(tmp_path.iterdir())
    around = surroundings(tmp_path, log_dir=tmp_path / "a" / "logs", state_path=tmp_path / "b" / "c" / "state.json")
    with pytest.raises(ConfigError, match=message):
        prepare(LauncherConfig(model=str(tmp_path / model), port=0), around)
    assert sorted(tmp_path.iterdir()) == there


def test_a_directory_that_is_only_looked_at_stays_as_it_is(tmp_path: Path) -> None:
    check_directory("--out", tmp_path / "new" / "run")
    check_directory("--out", tmp_path)
    assert list(tmp_path.iterdir()) == []
    for wrong in (tmp_path / ("n" * 300) / "run", tmp_path / "a\0b"):
        with pytest.raises(ConfigError, match=r"^--out: cannot write to .*; choose another place"):
            check_directory("--out", wrong)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", ["~no such user/x", "m" * 5000, "a\0b"])
def test_a_model_that_no_path_can_be_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--model: "):
        find_model(model, tmp_path, env={}, report=lambda _: None)
