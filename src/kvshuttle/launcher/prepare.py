"""From a configuration to a plan: finds the model, the machine's facts and free ports."""

from __future__ import annotations

import random
import re
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvshuttle.errors import ConfigError, LaunchFailed
from kvshuttle.launcher.machine import free_ports, is_port_free, this_machine
from kvshuttle.launcher.model import BUNDLED, ensure_model
from kvshuttle.launcher.plan import plan_fleet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvshuttle.config import LauncherConfig
    from kvshuttle.launcher.plan import FleetPlan

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_MAX_LOG_DIRS = 20


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the launcher is given besides its knobs. ``report``: takes lines for a person."""

    env: Mapping[str, str]
    cache_dir: Path
    log_dir: Path
    state_path: Path | None
    report: Callable[[str], None]


def prepare(config: LauncherConfig, around: Surroundings) -> FleetPlan:
    """The plan for this machine, with the model in place. Raises ``ConfigError`` or ``LaunchFailed``."""
    # Before the model, which can take a minute.
    if config.port and not is_port_free(config.host, config.port):
        raise LaunchFailed(
            f"--port: {config.host}:{config.port} is taken or not an address of this machine."
            f" Choose another, e.g. `--port {config.port + 1}` (with make: `PORT={config.port + 1}`)."
        )
    machine = this_machine()
    machine.computes_on_gpu(config.device)
    model = find_model(config.model, around)
    return plan_fleet(config, model, machine, free_ports(random.Random()), sys.executable)  # noqa: S311 - ports, no secrets


def find_model(model: str, around: Surroundings) -> Path | str:
    """A directory, or the name of a model that vLLM fetches itself. Raises ``ConfigError`` when it is neither."""
    if model in BUNDLED:
        return ensure_model(BUNDLED[model], around.cache_dir, env=around.env, report=around.report)
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"--model: {path} holds no config.json; give the directory of a model")
        return path.absolute()
    if _HUB_NAME.fullmatch(model):
        return model
    raise ConfigError(f"--model: {model} is neither a directory nor one of the bundled models ({', '.join(BUNDLED)})")


def default_log_dir(cache_dir: Path, launcher_pid: int) -> Path:
    """A fresh directory for one run's logs; older runs' beyond the newest few are deleted."""
    logs = cache_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    runs = sorted((path for path in logs.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for old in runs[: -_MAX_LOG_DIRS + 1]:
        shutil.rmtree(old, ignore_errors=True)
    return logs / f"{time.strftime('%Y%m%d-%H%M%S')}-{launcher_pid}"
