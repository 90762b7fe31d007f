"""From a configuration to a plan: finds the model, the machine's facts and free ports."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvshuttle.config import secret_from
from kvshuttle.errors import ConfigError, LaunchFailed
from kvshuttle.launcher.machine import claim, claim_port, free_ports, is_port_free, this_machine
from kvshuttle.launcher.model import BUNDLED, ensure_model
from kvshuttle.launcher.model_config import read_model_config
from kvshuttle.launcher.plan import plan_fleet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvshuttle.config import LauncherConfig
    from kvshuttle.launcher.plan import FleetPlan, Machine

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_MAX_LOG_DIRS = 20
_KEEP_LOGS_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the launcher is given besides its knobs.

    ``report``: takes lines for a person. ``check_router``: takes what follows ``python -m kvshuttle`` in the router's
    command line; raises ``ConfigError`` when the router would refuse it.
    """

    env: Mapping[str, str]
    cache_dir: Path
    log_dir: Path
    state_path: Path | None
    report: Callable[[str], None]
    check_router: Callable[[Sequence[str]], None]


def prepare(config: LauncherConfig, around: Surroundings) -> FleetPlan:
    """The plan for this machine, with the model in place. Raises ``ConfigError`` or ``LaunchFailed``."""
    # Before the model, which can take a minute, and the engines, which take more.
    machine = this_machine()
    secret_from(around.env)
    _check_address(config)
    _check_plan(config, machine, around)
    _check_files(around)
    model = find_model(config.model, around.cache_dir, env=around.env, report=around.report)
    plan = plan_fleet(config, model, machine, free_ports(random.Random()), sys.executable)  # noqa: S311 - ports, no secrets
    plan = _kept_on_this_machine(plan, around.env)
    around.log_dir.mkdir(parents=True, exist_ok=True)
    if around.state_path is not None:
        around.state_path.parent.mkdir(parents=True, exist_ok=True)
    if around.log_dir.parent == _logs_in(around.cache_dir):
        delete_old_logs(around.log_dir.parent, time.time())
    return plan


def _kept_on_this_machine(plan: FleetPlan, env: Mapping[str, str]) -> FleetPlan:
    """UCX lets its peers in at every address of the machine unless it is told not to; an operator's word is left alone.

    A list of transports may have none that works on loopback, such as RDMA's.
    """
    if "UCX_NET_DEVICES" in env or "UCX_TLS" in env:
        return plan
    engines = (replace(engine, env={"UCX_NET_DEVICES": "lo", **engine.env}) for engine in plan.engines)
    return replace(plan, engines=tuple(engines))


def _check_address(config: LauncherConfig) -> None:
    if not is_port_free(config.host, 0):
        raise ConfigError(
            f"--host: {config.host} is not an address of this machine; use 127.0.0.1, or 0.0.0.0 for all addresses"
        )
    if config.port and not is_port_free(config.host, config.port):
        where = f"{config.host}:{config.port}"
        raise LaunchFailed(f"--port: {where} is taken or not permitted. Choose another, {_such_as(config.port)}.")


@contextlib.contextmanager
def claimed_port(config: LauncherConfig) -> Iterator[None]:
    """The port is ours also while nobody listens there yet. Raises ``LaunchFailed`` when it is another launcher's."""
    mark = claim_port(config.host, config.port) if config.port else None
    if config.port and mark is None:
        raise LaunchFailed(
            f"--port: another kvshuttle starts or serves at {config.host}:{config.port}."
            f" Wait until that one has ended, or choose another, {_such_as(config.port)}."
        )
    with mark or contextlib.nullcontext():
        yield


def _such_as(port: int) -> str:
    return f"e.g. `--port {port + 1}` (with make: `PORT={port + 1}`)"


def _check_plan(config: LauncherConfig, machine: Machine, around: Surroundings) -> None:
    """Plan with made-up ports, to learn whether the machine and the router take the arguments."""
    trial = plan_fleet(config, config.model, machine, itertools.count(1), sys.executable)
    if trial.router is None:
        return
    try:
        around.check_router(trial.router.argv[3:])
    except ConfigError as error:
        raise ConfigError(f"--router-arg: {error}" if config.router_args else str(error)) from error


def _check_files(around: Surroundings) -> None:
    """Try to write where the logs and the state file are to be."""
    check_directory("--log-dir", around.log_dir)
    if around.state_path is None:
        return
    check_directory("--state", around.state_path.parent)
    try:
        is_dir = around.state_path.is_dir()
    except OSError as error:  # a name that is too long
        raise ConfigError(f"--state: {error.strerror}: {around.state_path}; give another file") from error
    if is_dir:
        raise ConfigError(f"--state: {around.state_path} is a directory; give a file")


@contextlib.contextmanager
def claimed_directory(option: str, directory: Path) -> Iterator[Path]:
    """A directory to write to that no other process has meanwhile. Raises ``ConfigError`` naming ``option``."""
    check_directory(option, directory)
    # Containers that share a network may each have a directory of that name.
    mark = claim(f"directory {Path('/proc/self/ns/mnt').readlink()} {directory.resolve()}")
    if mark is None:
        raise ConfigError(
            f"{option}: another kvshuttle writes to {directory}; wait for it, or choose another directory"
        )
    with mark:
        yield directory


def check_directory(option: str, directory: Path) -> None:
    """Try to write into a directory that need not be there yet. Raises ``ConfigError`` naming ``option``.

    What is made for it is taken away again: other settings may turn out to be wrong, and then nothing is left behind.
    """
    made: list[Path] = []
    try:
        made += [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{option}: cannot write to {directory}: {why}; choose another place") from error
    finally:
        for path in made:
            with contextlib.suppress(OSError, ValueError):  # not made, or not empty any more
                path.rmdir()


def find_model(model: str, cache_dir: Path, *, env: Mapping[str, str], report: Callable[[str], None]) -> Path | str:
    """A directory, or the name of a model that vLLM fetches itself. Raises ``ConfigError`` when it is neither."""
    if model in BUNDLED:
        return ensure_model(BUNDLED[model], cache_dir, env=env, report=report)
    try:
        path = Path(model).expanduser()
        is_dir = path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # no such user, too long, or a null character
        raise ConfigError(f"--model: {error}; give the directory of a model, or the name of one") from error
    if is_dir:
        read_model_config(path)
        return path.absolute()
    if _HUB_NAME.fullmatch(model):
        return model
    raise ConfigError(f"--model: {model} is neither a directory nor one of the bundled models ({', '.join(BUNDLED)})")


def default_log_dir(cache_dir: Path, launcher_pid: int) -> Path:
    """A fresh directory for one run's logs; not made yet."""
    return _logs_in(cache_dir) / f"{time.strftime('%Y%m%d-%H%M%S')}-{launcher_pid}"


def delete_old_logs(logs: Path, now_s: float) -> None:
    """Delete directories of earlier runs in ``logs`` beyond the newest few, unless they may still be in use.

    Kept is what changed within a day before ``now_s`` (a Unix time), and what a process that still runs was named for.
    """
    runs = sorted((_changed_at_s(path), path) for path in logs.iterdir() if path.is_dir())
    for changed_at_s, old in runs[:-_MAX_LOG_DIRS]:
        is_running = Path("/proc", old.name.rpartition("-")[2] or "-").exists()
        if now_s - changed_at_s > _KEEP_LOGS_S and not is_running:
            shutil.rmtree(old, ignore_errors=True)


def _logs_in(cache_dir: Path) -> Path:
    return cache_dir / "logs"


def _changed_at_s(directory: Path) -> float:
    """When the newest file in ``directory`` changed. One that changes while we look counts as new."""
    try:
        return max(path.stat().st_mtime for path in (directory, *directory.rglob("*")))
    except OSError:
        return math.inf
