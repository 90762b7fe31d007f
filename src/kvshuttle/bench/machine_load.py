"""How busy this machine and one of its processes are, from the kernel's own counters. For reports."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_IDLE_COLUMNS = (3, 4)
"""Idle, and idle while something waits for a disk."""
_CPU_COLUMNS = slice(11, 13)
"""User and system time of a process, after its name and state."""


def machine_busy_s() -> float:
    """CPU seconds that all cores together have been busy since the machine started."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - sum(ticks[column] for column in _IDLE_COLUMNS)) / _TICKS_PER_S


def process_cpu_s(pid: int) -> float:
    """CPU seconds that one process has used, all its threads together. Raises ``OSError`` when it is gone."""
    # The name may hold anything, parentheses too; what follows its last one are numbers.
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(word) for word in words[_CPU_COLUMNS]) / _TICKS_PER_S
