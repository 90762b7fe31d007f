"""One request to an engine and its answer, as its reader sees them.

A reader first waits for the head and for buffered bytes, and may then hand the rest to a sink that is called
straight from the socket. Every way to fail ends as one ``LegError`` with a reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from kvshuttle.errors import TransportError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from kvshuttle.router.http_text import Headers


class Wire(Protocol):
    """What an exchange needs of the connection that carries it."""

    def pause(self) -> None:
        """Stop reading."""
        ...

    def resume(self) -> None:
        """Read again."""
        ...

    def abandon(self) -> None:
        """Close at once; nobody waits for the answer."""
        ...


class FailureReason(StrEnum):
    """Why a leg failed. Also the metric label."""

    CONNECT = "connect"
    """Refused or no route: nobody listens."""
    CAPACITY = "capacity"
    """All connections to the engine are in use."""
    RESET = "reset"
    """The connection ended before the answer did."""
    TIMEOUT = "timeout"
    STATUS = "status"
    """Answered 5xx, or told of an error in an event."""
    MALFORMED = "malformed"
    TOO_LARGE = "too_large"
    ENGINE_DOWN = "engine_down"
    """The engine stopped answering probes while the leg ran."""


class LegError(TransportError):
    """A leg did not bring an answer; ``reason`` says how, ``status`` is the engine's HTTP status or 0."""

    def __init__(self, reason: FailureReason, detail: str, *, status: int = 0) -> None:
        super().__init__(detail)
        self.reason = reason
        self.status = status


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Status and headers of an engine's answer."""

    status: int
    headers: Headers

    @property
    def is_until_close(self) -> bool:
        """True when nothing but the end of the connection ends the body."""
        return not (self.header(b"content-length") or self.header(b"transfer-encoding"))

    def header(self, name: bytes) -> bytes:
        """The first header of that (lower-case) name, or b""."""
        for key, value in self.headers:
            if key == name:
                return value
        return b""


class Exchange:
    """One request to an engine and its answer as it arrives. ``close`` must be called in every case."""

    __slots__ = (
        "_chunks",
        "_connection",
        "_error",
        "_limit_bytes",
        "_loop",
        "_num_bytes",
        "_sink",
        "_timer",
        "_waiter",
        "head",
        "is_ended",
    )

    def __init__(self, connection: Wire, loop: asyncio.AbstractEventLoop, limit_bytes: int) -> None:
        self._connection: Wire | None = connection
        self._loop = loop
        self._limit_bytes = limit_bytes
        self._chunks: list[bytes] = []
        self._num_bytes = 0
        self._sink: Callable[[bytes], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: LegError | None = None
        self.head: ResponseHead | None = None
        self.is_ended = False

    # --- for the reader ---

    async def read_head(self) -> ResponseHead:
        """Status and headers. Raises ``LegError``."""
        while self.head is None:
            await self._change()
        return self.head

    async def read_some(self) -> bytes:
        """The bytes that have arrived since the last call, at least one; b"" at the end. Raises ``LegError``."""
        while not self._chunks and not self.is_ended:
            await self._change()
        return self._take()

    async def read_all(self) -> bytes:
        """The whole rest of the body. Raises ``LegError``."""
        while not self.is_ended:
            await self._change()
        return self._take()

    async def forward(self, sink: Callable[[bytes], None]) -> None:
        """Call ``sink`` with every further read until the end. Raises ``LegError``."""
        rest = self._take()
        if rest:
            sink(rest)
        self._sink = sink
        while not self.is_ended:
            await self._change()

    def set_deadline(self, timeout_s: float, stage: str) -> None:
        """Fail after ``timeout_s`` from now; replaces an earlier deadline."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(timeout_s, self._expire, stage)

    def pause(self) -> None:
        """Stop reading from the engine; its own flow control does the rest."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """Read again."""
        if self._connection is not None:
            self._connection.resume()

    def close(self) -> None:
        """End it. An answer that is not whole costs its connection, which is how an engine learns to abort."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._sink = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abandon()

    def fail(self, reason: FailureReason, detail: str, *, status: int = 0) -> None:
        """End it with an error, from outside or by its connection. The first error stays."""
        if self._error is None and not self.is_ended:
            self._error = LegError(reason, detail, status=status)
            self._sink = None
            self._wake()

    # --- for the connection ---

    def on_head(self, head: ResponseHead) -> None:
        """Status and headers are there."""
        self.head = head
        self._wake()

    def on_data(self, data: bytes) -> None:
        """One read's worth of body."""
        if self._sink is not None:
            self._sink(data)
            return
        self._chunks.append(data)
        self._num_bytes += len(data)
        if self._num_bytes > self._limit_bytes:
            self.fail(FailureReason.TOO_LARGE, f"an answer of more than {self._limit_bytes} bytes")
        self._wake()

    def on_end(self) -> None:
        """The answer is whole and its connection free again."""
        self._connection = None
        # An answer that failed before its end, by its length for instance, stays failed.
        self.is_ended = self._error is None
        self._wake()

    # --- private ---

    def _take(self) -> bytes:
        chunks, self._chunks = self._chunks, []
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def _change(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _expire(self, stage: str) -> None:
        self.fail(FailureReason.TIMEOUT, f"{stage}: no answer in time")
