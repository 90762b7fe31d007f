"""A vLLM plugin for engines on few cores: processes that wait for each other sleep instead of spinning.

An engine core that waits for its workers' step, and a worker that waits for its next one, spin with ``sched_yield``
for a second before they sleep. On a GPU host that costs idle cores and saves microseconds a step. Where two engines
share a handful of cores it takes them from the forward pass of the other engine, and on some kernels the spinning
thread itself then waits for seconds until it runs again (decision 0008).

vLLM loads every plugin in all its processes; this one changes nothing unless ``KVSHUTTLE_QUIET_WAITS=1``.
"""

from __future__ import annotations

import logging
import os
from typing import Any

logger = logging.getLogger(__name__)

SWITCH = "KVSHUTTLE_QUIET_WAITS"
"""Environment variable: ``1`` to sleep; anything else leaves vLLM as it is."""
_MAX_SLEEP_MS = 200
"""vLLM's own idle mode trusts that no notification is lost. So often is looked again, should one be."""


def register() -> None:
    """Entry point in ``vllm.general_plugins``."""
    if os.environ.get(SWITCH) != "1":
        return
    try:
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    except ImportError:
        logger.warning("kvshuttle: %s=1 has no effect on this vLLM: it has no SpinCondition", SWITCH)
        return
    quieten(SpinCondition)


def quieten(condition: Any) -> None:
    """Make waits on this class of conditions sleep from the first read on. Doing it twice does nothing."""
    record_read, wait = condition.record_read, condition.wait
    if getattr(condition, "is_quiet", False):
        return

    def record_read_then_sleep(self: Any) -> None:
        record_read(self)
        # Not from the start: until the first read a reader may not be subscribed yet to what would wake it.
        self.busy_loop_s = 0

    def wait_in_pieces(self: Any, timeout_ms: int | None = None) -> None:
        wait(self, timeout_ms=_MAX_SLEEP_MS if timeout_ms is None else min(timeout_ms, _MAX_SLEEP_MS))

    condition.record_read = record_read_then_sleep
    condition.wait = wait_in_pieces
    condition.is_quiet = True
