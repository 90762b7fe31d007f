"""NIXL between two processes, one of which dies or stops. UCX over TCP needs the holder's help, so it shows most."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.nixl

TESTS = Path(__file__).parents[1]
LOOPBACK_IN_HEX = "0100007F"
"""127.0.0.1 as the kernel writes it."""


def told(prefix: str, module: str, *arguments: str, **variables: str) -> str:
    """The line that a program of ours prints behind ``prefix``. ``variables``: all that it knows of UCX."""
    pytest.importorskip("nixl_cu12", reason="NIXL is not installed")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    environ |= {"PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent / "src"))), **variables}
    words = [sys.executable, "-m", module, *arguments]
    run = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=180, check=False)
    found = [line.removeprefix(prefix) for line in run.stdout.splitlines() if line.startswith(prefix)]
    assert len(found) == 1, run.stdout + run.stderr
    return found[0]


def seen(scenario: str, transports: str) -> dict[str, Any]:
    """What a scenario of ``support.dying_peer`` reports, with UCX limited to ``transports`` ("" for its own choice)."""
    variables = {"UCX_TLS": transports} if transports else {}
    result: dict[str, Any] = json.loads(told("RESULT ", "support.dying_peer", scenario, **variables))
    return result


def test_an_agent_that_is_kept_to_loopback_listens_nowhere_else() -> None:
    assert told("LISTENING ", "support.listening", UCX_NET_DEVICES="lo") == LOOPBACK_IN_HEX


@pytest.mark.parametrize("transports", ["", "tcp"])
def test_a_read_from_a_killed_peer_fails_at_once(transports: str) -> None:
    result = seen("kill_before", transports)
    assert result["first"] == "done", result
    assert result["status"] == "failed", result
    assert result["error"], result
    assert result.get("elapsed_s", 0.0) < 15.0, result
    assert result["is_released"], result


def test_a_read_whose_peer_is_killed_half_way_fails_at_once() -> None:
    result = seen("kill_during", "tcp")
    assert result["while_stopped"] == "pending", result
    assert result["status"] == "failed", result
    assert result["elapsed_s"] < 15.0, result
    assert result["is_released"], result


def test_a_read_from_a_stopped_peer_is_kept_until_its_late_bytes_have_landed() -> None:
    result = seen("stop_and_remove", "tcp")
    assert result["status"] == "failed", result
    assert not result["is_released_while_stopped"], result
    assert result["num_late_bytes"] > 0, result
    assert result["is_released"], result
    assert result["num_bytes_after_release"] == 0, result
    assert result["again"] == "done", result
