"""The side channel in a thread of its own, so that peers are answered while the engine computes or sleeps."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter, deque
from typing import TYPE_CHECKING, Generic, TypeVar

from kvshuttle.errors import KvshuttleError, TransportError
from kvshuttle.transport.endpoint import Codec, Endpoint, Failure, OnReply

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Codec", "Endpoint", "Failure", "OnReply", "SideChannelThread"]

logger = logging.getLogger(__name__)

M = TypeVar("M")

_MAX_SUBMITTED = 10_000
_RETRY_S = 1.0
"""After a failure of the owner's tick or of ZMQ itself: soon, but no spinning."""


class SideChannelThread(Generic[M]):
    """Runs an ``Endpoint`` in a daemon thread, which alone touches it.

    ``tick``: called after each poll with the instant; returns when it wants to be called next at the latest, or None.
    Its exceptions, and those of submitted functions, are logged and counted in ``counts``, and the thread goes on.
    Between deadlines it sleeps.
    """

    def __init__(
        self, endpoint: Endpoint[M], *, tick: Callable[[float], float | None] | None = None, name: str = "side-channel"
    ) -> None:
        self._endpoint = endpoint
        self._tick = tick
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock = threading.Lock()
        self._submitted: deque[Callable[[Endpoint[M]], None]] = deque()
        self._is_stopping = False
        self.counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<SideChannelThread {self._thread.name} {'alive' if self._thread.is_alive() else 'stopped'}>"

    def start(self) -> None:
        """Start serving. From here on only the thread may touch the endpoint."""
        self._thread.start()

    def submit(self, function: Callable[[Endpoint[M]], None]) -> None:
        """Run ``function`` in the thread soon; callable from any thread.

        Raises ``TransportError`` when the thread is stopping or far behind.
        """
        with self._lock:
            if self._is_stopping:
                raise TransportError("the side channel is stopped")
            if len(self._submitted) >= _MAX_SUBMITTED:
                raise TransportError(f"the side channel is {_MAX_SUBMITTED} submissions behind")
            self._submitted.append(function)
        self._endpoint.wake()

    async def request_async(self, address: str, message: M, *, timeout_s: float) -> M:
        """Ask a peer from an event loop. Raises ``TransportError`` or ``RemoteProtocolError``."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[M] = loop.create_future()

        def settle(reply: M | Failure) -> None:
            if future.done():
                return
            if isinstance(reply, KvshuttleError):
                future.set_exception(reply)
            else:
                future.set_result(reply)

        def on_reply(reply: M | Failure) -> None:
            # The loop may be closed by the time a late reply comes; nobody waits for it then.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, reply)

        self.submit(lambda endpoint: endpoint.request(address, message, timeout_s=timeout_s, on_reply=on_reply))
        return await future

    def stop(self, timeout_s: float) -> bool:
        """Run what was submitted, close the endpoint and join; False when that took too long. Idempotent."""
        with self._lock:
            self._is_stopping = True
        if self._thread.ident is None:
            self._run_submitted()
            self._endpoint.close()
            return True
        self._endpoint.wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        deadline_at_s: float | None = self._endpoint.now_s()
        while not self._is_stopping:
            deadline_at_s = self._step(deadline_at_s)
        self._run_submitted()
        self._endpoint.close()

    def _step(self, deadline_at_s: float | None) -> float | None:
        try:
            self._endpoint.poll(None if deadline_at_s is None else max(0.0, deadline_at_s - self._endpoint.now_s()))
        except Exception:  # noqa: BLE001 - logged in _count
            self._count("poll_error")
            return self._endpoint.now_s() + _RETRY_S
        self._run_submitted()
        if self._tick is None:
            return None
        now_s = self._endpoint.now_s()
        try:
            return self._tick(now_s)
        except Exception:  # noqa: BLE001 - logged in _count
            self._count("tick_error")
            return now_s + _RETRY_S

    def _run_submitted(self) -> None:
        while self._submitted:
            function = self._submitted.popleft()
            try:
                function(self._endpoint)
            except Exception:  # noqa: BLE001 - logged in _count
                self._count("submission_error")

    def _count(self, reason: str) -> None:
        self.counts[reason] += 1
        logger.exception("%s: %s", self._thread.name, reason)
