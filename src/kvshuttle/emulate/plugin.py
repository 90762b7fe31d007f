"""What vLLM loads through its entry point ``vllm.general_plugins``, in every process: registers the emulated model."""

from __future__ import annotations

import os
import time
from typing import Any

from kvshuttle.emulate.model_dir import ARCHITECTURE
from kvshuttle.emulate.settings import NAPS_VARIABLE

_NAP_MS = 1


def register() -> None:
    """Tell vLLM of the model class, by name only: nothing is imported until an engine is started with it."""
    from vllm.model_executor.models.registry import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, "kvshuttle.emulate.model:EmulatedModel")
    if os.environ.get(NAPS_VARIABLE) == "1":
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

        nap_while_waiting(SpinCondition)


def nap_while_waiting(condition: Any) -> None:
    """Where vLLM's waits spin, for a second after each message, let them sleep a millisecond at a time.

    Not until they are notified: notifications are lost, and whoever trusts them waits for the next look.
    """
    wait = condition.wait

    def nap(self: Any, timeout_ms: int | None = None) -> None:
        if time.monotonic() > self.last_read + self.busy_loop_s:
            wait(self, timeout_ms)
        elif self.local_notify_socket in dict(self.poller.poll(timeout=_NAP_MS)):
            self.local_notify_socket.recv(copy=False)

    condition.wait = nap
