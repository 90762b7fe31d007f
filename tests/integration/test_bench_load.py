"""The load generator as a process: how its failures are told."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from kvshuttle.bench.load import run_load
from kvshuttle.errors import LaunchFailed
from kvshuttle.launcher.plan import ProcessPlan, Role

if TYPE_CHECKING:
    from pathlib import Path


def run(program: str, tmp_path: Path, *, timeout_s: float = 20.0) -> None:
    plan = ProcessPlan("load", Role.ROUTER, (sys.executable, "-c", program), {}, "127.0.0.1", 0)
    run_load(plan, env=os.environ, log_path=tmp_path / "load.log", timeout_s=timeout_s)


def test_a_load_generator_that_fails_tells_why(tmp_path: Path) -> None:
    run("print('well')", tmp_path)
    with pytest.raises(LaunchFailed, match=r"(?s)^load ended with exit code 3.*no such data set"):
        run("print('no such data set'); exit(3)", tmp_path)


def test_a_load_generator_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(LaunchFailed, match=r"^the load generator did not end within 1 s"):
        run("import time; time.sleep(60)", tmp_path, timeout_s=0.6)
