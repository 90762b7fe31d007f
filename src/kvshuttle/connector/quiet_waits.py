"""A vLLM plugin for engines on few cores: processes that wait for each other sleep instead of spinning.

An engine core that waits for its workers' step, and a worker that waits for its next one, spin with ``sched_yield``
for a second before they sleep. On a GPU host that costs idle cores and saves microseconds a step. Where two engines
share a handful of cores it takes them from the forward pass of the other engine, and on some kernels the spinning
thread itself then waits for seconds until it runs again (decision 0008).

A wait ends by the notification that vLLM sends with each message, or by looking again after a moment.

vLLM loads every plugin in all its processes; this one changes nothing unless ``KVSHUTTLE_QUIET_WAITS=1``.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from kvshuttle.config import QUIET_WAITS_VARIABLE

logger = logging.getLogger(__name__)

_AWAKE_S = 1.0
"""As long after a message as vLLM would spin for the next one."""
_NAP_MS = 1
_SLEEP_MS = 200
"""How long a wait trusts that it will be notified, within ``_AWAKE_S`` and after it. ZMQ drops a notification that
finds an earlier one still on its way, so some are lost when messages follow each other quickly."""


def register() -> None:
    """Entry point in ``vllm.general_plugins``."""
    if os.environ.get(QUIET_WAITS_VARIABLE) != "1":
        return
    try:
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    except ImportError:
        logger.warning("kvshuttle: %s=1 has no effect on this vLLM: it has no SpinCondition", QUIET_WAITS_VARIABLE)
        return
    quieten(SpinCondition)


def quieten(condition: Any) -> None:
    """Make waits on this class of conditions sleep, for moments first. Doing it twice does nothing."""
    if getattr(condition, "is_quiet", False):
        return
    record_read, wait = condition.record_read, condition.wait

    def record_read_then_sleep(self: Any) -> None:
        record_read(self)
        # Not from the start: until the first read a reader may not be subscribed yet to what would wake it.
        self.busy_loop_s = 0

    def wait_for_moments(self: Any, timeout_ms: int | None = None) -> None:
        trusted_ms = _NAP_MS if time.monotonic() < self.last_read + _AWAKE_S else _SLEEP_MS
        wait(self, timeout_ms=trusted_ms if timeout_ms is None else min(timeout_ms, trusted_ms))

    condition.record_read = record_read_then_sleep
    condition.wait = wait_for_moments
    condition.is_quiet = True
