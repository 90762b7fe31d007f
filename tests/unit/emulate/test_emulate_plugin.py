"""Naps in place of vLLM's busy waiting."""

from __future__ import annotations

import time
from types import SimpleNamespace

from kvshuttle.emulate.plugin import nap_while_waiting


class Socket:
    """Counts what is taken from it."""

    num_received = 0

    def recv(self, *, copy: bool) -> None:
        assert copy is False
        self.num_received += 1


class Condition:
    """As much of vLLM's as a wait touches."""

    busy_loop_s = 1.0

    def __init__(self, last_read: float, *, is_notified: bool) -> None:
        self.last_read = last_read
        self.timeouts_ms: list[int] = []
        self.local_notify_socket = Socket()
        self._is_notified = is_notified
        self.poller = SimpleNamespace(poll=self._poll)
        self.slept_ms: list[int | None] = []

    def wait(self, timeout_ms: int | None = None) -> None:
        """vLLM's own: spins at first, sleeps later."""
        self.slept_ms.append(timeout_ms)

    def _poll(self, timeout: int) -> list[tuple[Socket, int]]:
        self.timeouts_ms.append(timeout)
        return [(self.local_notify_socket, 1)] if self._is_notified else []


def quiet(last_read: float, *, is_notified: bool = False) -> Condition:
    """One of a class that naps."""
    napping = type("Napping", (Condition,), {})
    nap_while_waiting(napping)
    return napping(last_read, is_notified=is_notified)


def test_a_wait_soon_after_a_message_naps_for_a_millisecond() -> None:
    condition = quiet(time.monotonic())
    condition.wait(5000)
    assert (condition.timeouts_ms, condition.slept_ms, condition.local_notify_socket.num_received) == ([1], [], 0)


def test_a_notification_ends_the_nap_and_is_taken() -> None:
    condition = quiet(time.monotonic(), is_notified=True)
    condition.wait()
    assert condition.local_notify_socket.num_received == 1


def test_a_wait_long_after_the_last_message_is_vllms_own() -> None:
    condition = quiet(time.monotonic() - 5)
    condition.wait(5000)
    assert (condition.timeouts_ms, condition.slept_ms) == ([], [5000])
