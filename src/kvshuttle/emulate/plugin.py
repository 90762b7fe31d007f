"""What vLLM loads through its entry point ``vllm.general_plugins``, in every process: registers the emulated model."""

from __future__ import annotations

import os
import time
from typing import Any

from kvshuttle.emulate.model_dir import ARCHITECTURE
from kvshuttle.emulate.settings import QUIET_VARIABLE

_NAP_MS = 1


def register() -> None:
    """Tell vLLM of the model class, by name only: nothing is imported until an engine is started with it."""
    from vllm.model_executor.models.registry import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, "kvshuttle.emulate.model:EmulatedModel")
    if os.environ.get(QUIET_VARIABLE):
        _sleep_while_waiting()


def _sleep_while_waiting() -> None:
    """Readers of vLLM's shared-memory queues sleep until they are notified: by default they first spin for a second.

    For a millisecond at a time, since notifications can be lost; what then waits for the next one waits five seconds.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    wait = SpinCondition.wait

    def quiet_wait(self: Any, timeout_ms: int | None = None) -> None:
        if time.monotonic() > self.last_read + self.busy_loop_s:
            wait(self, timeout_ms)
        elif self.local_notify_socket in dict(self.poller.poll(timeout=_NAP_MS)):
            self.local_notify_socket.recv(copy=False)

    SpinCondition.wait = quiet_wait
