"""How busy this machine and some of its processes are, from the kernel's own counters. For reports."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_IDLE_COLUMNS = (3, 4)
"""Idle, and idle while something waits for a disk."""
_GROUP_COLUMN = 2
"""Of a process's stat, after its name."""
_CPU_COLUMNS = slice(11, 13)
"""User and system time of a process, from its state on."""


def machine_busy_s() -> float:
    """CPU seconds that all cores together have been busy since the machine started."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - sum(ticks[column] for column in _IDLE_COLUMNS)) / _TICKS_PER_S


def process_cpu_s(pid: int) -> float:
    """CPU seconds that one process has used, all its threads together. Raises ``OSError`` when it is gone."""
    return sum(int(word) for word in _stat(pid)[_CPU_COLUMNS]) / _TICKS_PER_S


def group_of(leader: int) -> list[int]:
    """All processes of a group."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if _group(pid) == leader]


def group_cpu_s(leader: int) -> float:
    """CPU seconds that the processes of a group have used, of those that still run."""
    total_s = 0.0
    for pid in group_of(leader):
        with contextlib.suppress(OSError):
            total_s += process_cpu_s(pid)
    return total_s


def _group(pid: int) -> int | None:
    try:
        return int(_stat(pid)[_GROUP_COLUMN])
    except OSError:
        return None  # it ended between listing and reading


def _stat(pid: int) -> list[str]:
    # The name may hold anything, parentheses too; what follows its last one are numbers.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
