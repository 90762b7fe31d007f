"""The router's face to clients: HTTP/1.1 connections on ``asyncio.Protocol``.

One connection answers its requests one after the other, in order. Requests that arrive early (pipelining) are parsed
and wait; reading stops only when many do, because a closed connection is noticed by reading. A client that
disconnects, also by closing just its sending side, cancels its running request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

from kvshuttle.router.http_text import RETRY_AFTER, DateHeader, Headers, Request, header_lines, status_line
from kvshuttle.router.openai import error_body
from kvshuttle.router.request_parser import Refusal, RequestParser

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from kvshuttle.config import RouterConfig

logger = logging.getLogger(__name__)

_MAX_WAITING = 16
_LINGER_S = 2.0
_MAX_SWEEP_S = 1.0

Handler = Callable[[Request, "Responder"], Awaitable[None]]


class Responder:
    """Answers one request: either ``send`` once, or ``start``, ``write`` …, then ``finish`` or ``abort``."""

    __slots__ = (
        "_connection",
        "_is_chunked",
        "_request",
        "id_header",
        "is_finished",
        "is_started",
        "num_bytes",
        "status",
    )

    def __init__(self, connection: ClientConnection, request: Request) -> None:
        self._connection = connection
        self._request = request
        self._is_chunked = False
        self.id_header: Headers = []
        """What names the request in errors of the router's own; the handler sets it."""
        self.is_started = False
        self.is_finished = False
        self.num_bytes = 0
        self.status = 0

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer."""
        self._begin(status)
        framing = b"" if status == 204 else b"content-length: %d\r\n" % len(body)
        head = self._head(status, headers, framing)
        is_head = self._request.method == b"HEAD"
        self.num_bytes += 0 if is_head else len(body)
        self._connection.write(head if is_head else head + body)
        self.is_finished = True

    def start(self, status: int, headers: Headers, data: bytes) -> None:
        """Begin a streamed answer with its first bytes."""
        self._begin(status)
        self._is_chunked = not self._request.is_http_10
        framing = b"transfer-encoding: chunked\r\n"
        if not self._is_chunked:
            framing = b""
            self._request.is_keep_alive = False
        self.num_bytes += len(data)
        # An empty chunk would end the answer.
        self._connection.write(self._head(status, headers, framing) + (self._frame(data) if data else b""))

    def write(self, data: bytes) -> None:
        """Further bytes of a streamed answer; never empty."""
        self.num_bytes += len(data)
        self._connection.write(self._frame(data))

    def finish(self) -> None:
        """The streamed answer is whole."""
        self.is_finished = True
        if self._is_chunked:
            self._connection.write(b"0\r\n\r\n")

    def abort(self) -> None:
        """The streamed answer stays unfinished: close without the last chunk, so that no client takes it for whole."""
        self.is_finished = True
        self._request.is_keep_alive = False

    def watch_flow(self, on_pause: Callable[[], None] | None, on_resume: Callable[[], None] | None) -> None:
        """Call these when the client's buffer is full and when it has room again; at once if it is full now."""
        self._connection.watch_flow(on_pause, on_resume)

    @property
    def is_cut_off(self) -> bool:
        """True when the request was cancelled because the router stops: its client is there and can be told."""
        return self._connection.is_cut_off

    @property
    def is_paused(self) -> bool:
        """True while the client leaves a full buffer unread."""
        return self._connection.is_write_paused

    def _begin(self, status: int) -> None:
        assert not self.is_started, "one answer per request"
        self.is_started = True
        self.status = status

    def _head(self, status: int, headers: Headers, framing: bytes) -> bytes:
        if self._connection.is_closing:
            self._request.is_keep_alive = False
        connection = b"" if self._request.is_keep_alive else b"connection: close\r\n"
        if self._request.is_keep_alive and self._request.is_http_10:
            connection = b"connection: keep-alive\r\n"
        date = self._connection.server.date.line()
        return b"".join((status_line(status), header_lines(headers), date, connection, framing, b"\r\n"))

    def _frame(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data


class ClientConnection(asyncio.Protocol):
    """One client connection."""

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.is_write_paused = False
        self.is_cut_off = False
        self._config = server.config
        self._transport: asyncio.Transport | None = None
        self._parser = RequestParser(server.config)
        self._task: asyncio.Task[None] | None = None
        self._on_pause: Callable[[], None] | None = None
        self._on_resume: Callable[[], None] | None = None
        self._since_s = server.loop.time()
        self._paused_at_s = 0.0
        self._is_reading = True
        self._is_lingering = False
        self.is_closing = False

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=self._config.client_buffer_bytes)
        if self.server.admit(self):
            return
        self._parser.refuse(Refusal(503, "The router has too many connections."))
        self._advance()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - why it went changes nothing
        """The client is gone; its request is cancelled."""
        self.server.forget(self)
        self._transport = None
        self._on_pause = self._on_resume = None
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        """The client does not read as fast as its answer comes."""
        self.is_write_paused = True
        self._paused_at_s = self.server.loop.time()
        if self._on_pause is not None:
            self._on_pause()

    def resume_writing(self) -> None:
        """It has caught up."""
        self.is_write_paused = False
        if self._on_resume is not None:
            self._on_resume()

    def data_received(self, data: bytes) -> None:
        """Parse, and answer what is whole."""
        parser = self._parser
        if not (parser.is_receiving or parser.arrived or self._task):
            self._since_s = self.server.loop.time()
        parser.feed(data)
        self._advance()
        is_full = len(parser.arrived) > _MAX_WAITING or parser.num_arrived_bytes > self._config.max_body_bytes
        if is_full and self._is_reading and self._transport is not None:
            self._is_reading = False
            self._transport.pause_reading()

    # --- answering ---

    def write(self, data: bytes) -> None:
        """Send bytes to the client; ignored once it is gone."""
        if self._transport is not None:
            self._transport.write(data)

    def watch_flow(self, on_pause: Callable[[], None] | None, on_resume: Callable[[], None] | None) -> None:
        """See ``Responder.watch_flow``."""
        self._on_pause, self._on_resume = on_pause, on_resume
        if self.is_write_paused and on_pause is not None:
            on_pause()

    def sweep(self, now_s: float) -> None:
        """Enforce the connection's own deadlines."""
        if self._transport is None:
            return
        waited_s = now_s - self._since_s
        if self.is_write_paused and now_s - self._paused_at_s > self._config.slow_client_timeout_s:
            self._transport.abort()
        elif self._is_lingering:
            if waited_s > _LINGER_S:
                self._transport.abort()
        elif self._task is not None:
            return
        elif self._parser.is_receiving:
            if waited_s > self._config.request_timeout_s:
                self._parser.refuse(Refusal(408, "The request did not arrive in time."))
                self._advance()
        elif waited_s > self._config.keep_alive_s:
            self._transport.close()

    def close_soon(self) -> None:
        """Close now when no request is running; otherwise after the running one."""
        self.is_closing = True
        if self._task is None and self._transport is not None:
            self._transport.close()

    def cut_off(self) -> None:
        """Cancel the running request, which may still tell its client why; then close."""
        if self._task is None:
            self.abort()
            return
        self.is_cut_off = True
        self._task.cancel()

    def abort(self) -> None:
        """Drop the connection, which cancels its running request."""
        if self._transport is not None:
            self._transport.abort()

    # --- private ---

    def _advance(self) -> None:
        """Start on the next arrival, if nothing runs."""
        if self._task is not None or self._transport is None or self._is_lingering:
            return
        if self._parser.arrived:
            arrival = self._parser.take()
            if isinstance(arrival, Refusal):
                self._send_refusal(arrival)
            else:
                self._task = self.server.spawn(self._answer(arrival))
        elif self._parser.wants_continue:
            self._parser.wants_continue = False
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def _answer(self, request: Request) -> None:
        responder = Responder(self, request)
        try:
            await self.server.handler(request, responder)
        except asyncio.CancelledError:
            if not self.is_cut_off:
                self.abort()
            raise
        except Exception:
            logger.exception("unhandled error while answering %r", request.path[:64])
            if not responder.is_started:
                body = error_body("Internal error of the router.", status=500, kind="InternalServerError")
                responder.send(500, [(b"content-type", b"application/json"), *responder.id_header], body)
            elif not responder.is_finished:
                responder.abort()
        finally:
            self._task = None
            self._on_pause = self._on_resume = None
            self._after(request)

    def _after(self, request: Request) -> None:
        if self._transport is None:
            return
        if not request.is_keep_alive or self.is_closing:
            self._transport.close()
            return
        self._since_s = self.server.loop.time()
        self._advance()
        if not self._is_reading and len(self._parser.arrived) <= _MAX_WAITING // 2:
            self._is_reading = True
            self._transport.resume_reading()

    def _send_refusal(self, refusal: Refusal) -> None:
        assert self._transport is not None
        self.server.on_refused(refusal.status)
        kind = "BadRequestError" if refusal.status < 500 else "ServiceUnavailableError"
        body = error_body(refusal.message, status=refusal.status, kind=kind)
        headers = header_lines([RETRY_AFTER] if refusal.status == 503 else [])
        framing = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.write(status_line(refusal.status) + self.server.date.line() + headers + framing + body)
        # Closing with unread input would reset the connection, and the client might never see the answer.
        self._is_lingering = True
        self._since_s = self.server.loop.time()
        if self._transport.can_write_eof():
            self._transport.write_eof()


class HttpServer:
    """Listens, keeps the connections and enforces their deadlines."""

    def __init__(self, config: RouterConfig, handler: Handler, on_refused: Callable[[int], None]) -> None:
        self.config = config
        self.handler = handler
        self.on_refused = on_refused
        self.loop = asyncio.get_running_loop()
        self.date = DateHeader()
        self._connections: set[ClientConnection] = set()
        self._requests: set[asyncio.Task[None]] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<HttpServer connections={len(self._connections)}>"

    async def start(self) -> int:
        """Listen; returns the port. Raises ``OSError`` when the address cannot be had."""
        self._server = await self.loop.create_server(
            lambda: ClientConnection(self), self.config.host, self.config.port, backlog=1024
        )
        self._sweeper = self.loop.create_task(self._sweep())
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def admit(self, connection: ClientConnection) -> bool:
        """Keep a new connection; False when there are too many, and it should be told so."""
        self._connections.add(connection)
        self._is_empty.clear()
        return len(self._connections) <= self.config.max_connections

    def forget(self, connection: ClientConnection) -> None:
        """A connection has closed."""
        self._connections.discard(connection)
        if not self._connections:
            self._is_empty.set()

    def spawn(self, answering: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a request."""
        task = self.loop.create_task(answering)
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)
        return task

    async def drain(self, timeout_s: float) -> bool:
        """Take no more requests and let running ones end; True when all did in time. The others are cut off."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close_soon()
        is_clean = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        except TimeoutError:
            is_clean = False
            await self._cut_off()
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._requests:
            # Those whose clients are gone have been cancelled, and have handles to release.
            await asyncio.wait(self._requests, timeout=_LINGER_S)
        return is_clean

    async def _cut_off(self) -> None:
        """Cancel what still runs; clients that read have a moment to see how it ended."""
        for connection in list(self._connections):
            connection.cut_off()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                await self._is_empty.wait()
        for connection in list(self._connections):
            connection.abort()

    async def _sweep(self) -> None:
        shortest_s = min(self.config.keep_alive_s, self.config.request_timeout_s, self.config.slow_client_timeout_s)
        while True:
            await asyncio.sleep(min(_MAX_SWEEP_S, shortest_s / 4))
            now_s = self.loop.time()
            for connection in list(self._connections):
                connection.sweep(now_s)
