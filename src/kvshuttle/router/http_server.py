"""The router's face to clients: HTTP/1.1 on ``asyncio.Protocol`` and httptools.

One connection answers its requests one after the other, in order. Requests that arrive early (pipelining) are parsed
and wait; reading stops only when many do, because a closed connection is noticed by reading. A client that
disconnects, also by closing just its sending side, cancels its running request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import httptools

from kvshuttle.router.http_text import DateHeader, Headers, Request, header_lines, status_line
from kvshuttle.router.openai import error_body

if TYPE_CHECKING:
    from kvshuttle.config import RouterConfig

logger = logging.getLogger(__name__)

_MAX_WAITING = 16
_MAX_URL_BYTES = 8192
_LINGER_S = 2.0
_SWEEP_S = 1.0

Handler = Callable[[Request, "Responder"], Awaitable[None]]


@dataclass(slots=True)
class Refusal:
    """An answer to something that never became a request; the connection ends after it."""

    status: int
    message: str


class _Refused(Exception):  # noqa: N818 - not an error of ours: it leaves a parser callback
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.refusal = Refusal(status, message)


class Responder:
    """Answers one request: either ``send`` once, or ``start``, ``write`` …, then ``finish`` or ``abort``."""

    __slots__ = ("_connection", "_is_chunked", "_request", "is_finished", "is_started", "num_bytes", "status")

    def __init__(self, connection: ClientConnection, request: Request) -> None:
        self._connection = connection
        self._request = request
        self._is_chunked = False
        self.is_started = False
        self.is_finished = False
        self.num_bytes = 0
        self.status = 0

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer."""
        self._begin(status)
        head = self._head(status, headers, b"content-length: %d\r\n" % len(body))
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
        self._connection.write(self._head(status, headers, framing) + self._frame(data))

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
    def is_paused(self) -> bool:
        """True while the client leaves a full buffer unread."""
        return self._connection.is_write_paused

    def _begin(self, status: int) -> None:
        assert not self.is_started, "one answer per request"
        self.is_started = True
        self.status = status

    def _head(self, status: int, headers: Headers, framing: bytes) -> bytes:
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
        self._config = server.config
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Request | Refusal] = deque()
        self._task: asyncio.Task[None] | None = None
        self._on_pause: Callable[[], None] | None = None
        self._on_resume: Callable[[], None] | None = None
        self._paused_at_s = 0.0
        self._is_reading = True
        self._is_lingering = False
        self._owes_continue = False
        self._since_s = server.loop.time()
        self._reset_message()
        self._is_in_head = self._is_in_body = False

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=self._config.client_buffer_bytes)
        self.server.connections.add(self)
        if len(self.server.connections) > self._config.max_connections:
            self._refuse(Refusal(503, "Too many connections to the router."))

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        self._transport = None
        self._waiting.clear()
        self._on_pause = self._on_resume = None
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self.is_write_paused = True
        self._paused_at_s = self.server.loop.time()
        if self._on_pause is not None:
            self._on_pause()

    def resume_writing(self) -> None:
        self.is_write_paused = False
        if self._on_resume is not None:
            self._on_resume()

    def data_received(self, data: bytes) -> None:
        if self._is_lingering:
            return
        if not (self._is_in_head or self._is_in_body or self._waiting or self._task):
            self._since_s = self.server.loop.time()
        if self._is_in_head:
            self._num_head_bytes += len(data)
        try:
            self._feed(data)
            if self._is_in_head and self._num_head_bytes > self._config.max_header_bytes:
                raise _Refused(431, f"The request's head is longer than {self._config.max_header_bytes} bytes.")
        except _Refused as refused:
            self._refuse(refused.refusal)
        except httptools.HttpParserError as error:
            cause = error.__context__
            refusal = (
                cause.refusal if isinstance(cause, _Refused) else Refusal(400, "The request is not valid HTTP/1.1.")
            )
            self._refuse(refusal)
        if len(self._waiting) > _MAX_WAITING and self._is_reading and self._transport is not None:
            self._is_reading = False
            self._transport.pause_reading()

    # --- httptools ---

    def on_message_begin(self) -> None:
        self._reset_message()
        self._is_in_head = True

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > _MAX_URL_BYTES:
            raise _Refused(414, f"The URL is longer than {_MAX_URL_BYTES} bytes.")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            return  # a trailer
        self._num_parsed_bytes += len(name) + len(value) + 4
        if self._num_parsed_bytes > self._config.max_header_bytes:
            raise _Refused(431, f"The request's headers are longer than {self._config.max_header_bytes} bytes.")
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._is_in_body = True
        self._method = self._parser.get_method()
        self._is_http_10 = self._parser.get_http_version() != "1.1"
        self._is_keep_alive = self._parser.should_keep_alive()
        has_host = False
        for name, value in self._headers:
            if name == b"content-length" and int(value) > self._config.max_body_bytes:
                raise _Refused(413, self._too_large())
            if name == b"content-encoding" and value.lower() != b"identity":
                raise _Refused(415, "Compressed request bodies are not supported.")
            if name == b"expect":
                self._expect(value)
            has_host = has_host or name == b"host"
        if not has_host and not self._is_http_10:
            raise _Refused(400, "The Host header is missing.")

    def on_body(self, data: bytes) -> None:
        self._num_body_bytes += len(data)
        if self._num_body_bytes > self._config.max_body_bytes:
            raise _Refused(413, self._too_large())
        self._body.append(data)

    def on_message_complete(self) -> None:
        self._is_in_body = self._owes_continue = False
        if self._parser.should_upgrade() and self._method != b"CONNECT":
            return  # _feed parses it again without the offer to upgrade
        path = self._url.partition(b"?")[0]
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        request = Request(self._method, path, self._headers, body, self._is_keep_alive, self._is_http_10)
        self._waiting.append(request)
        self._advance()

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
        elif self._task is not None or self._waiting:
            return
        elif self._is_in_head or self._is_in_body:
            if waited_s > self._config.request_timeout_s:
                self._refuse(Refusal(408, "The request did not arrive in time."))
        elif waited_s > self._config.keep_alive_s:
            self._transport.close()

    def close_if_idle(self) -> None:
        """Close now when no request is running; otherwise after the running one."""
        self._is_closing = True
        if self._task is None and self._transport is not None:
            self._transport.close()

    def cancel(self) -> None:
        """Drop the running request and the connection."""
        if self._transport is not None:
            self._transport.abort()

    # --- private ---

    _is_closing = False

    def _reset_message(self) -> None:
        self._url = b""
        self._method = b""
        self._headers: Headers = []
        self._body: list[bytes] = []
        self._num_head_bytes = self._num_parsed_bytes = self._num_body_bytes = 0
        self._is_keep_alive = False
        self._is_http_10 = False

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._without_upgrade(data[upgrade.args[0] :])
            else:
                return

    def _without_upgrade(self, rest: bytes) -> bytes:
        """We offer no upgrade, so the request stands as if it had not been asked for."""
        self._parser = httptools.HttpRequestParser(self)
        if self._method == b"CONNECT":
            return b""
        dropped = (b"upgrade", b"connection", b"http2-settings")
        lines = header_lines([header for header in self._headers if header[0] not in dropped])
        return b"%b %b HTTP/1.1\r\n%b\r\n" % (self._method, self._url, lines) + rest

    def _expect(self, value: bytes) -> None:
        if value.lower() != b"100-continue":
            raise _Refused(417, "The only expectation supported is 100-continue.")
        self._owes_continue = True
        self._pay_continue()

    def _pay_continue(self) -> None:
        if self._owes_continue and self._task is None and not self._waiting:
            self._owes_continue = False
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _too_large(self) -> str:
        return f"The request body is longer than {self._config.max_body_bytes} bytes."

    def _refuse(self, refusal: Refusal) -> None:
        self._is_in_head = self._is_in_body = False
        self._is_lingering = True
        self._waiting.append(refusal)
        self._advance()

    def _advance(self) -> None:
        if self._task is not None or not self._waiting or self._transport is None:
            return
        item = self._waiting.popleft()
        if isinstance(item, Refusal):
            self._send_refusal(item)
            return
        self._task = self.server.loop.create_task(self._answer(item))

    async def _answer(self, request: Request) -> None:
        responder = Responder(self, request)
        try:
            await self.server.handler(request, responder)
        except asyncio.CancelledError:
            if self._transport is not None:
                self._transport.abort()
            raise
        except Exception:
            logger.exception("unhandled error while answering %s", request.path[:64])
            if not responder.is_started:
                body = error_body("Internal error of the router.", status=500, kind="InternalServerError")
                responder.send(500, [(b"content-type", b"application/json")], body)
            elif not responder.is_finished:
                responder.abort()
        finally:
            self._task = None
            self._on_pause = self._on_resume = None
            self._next(request)

    def _next(self, request: Request) -> None:
        if self._transport is None:
            return
        if not request.is_keep_alive or self._is_closing:
            self._transport.close()
            return
        self._since_s = self.server.loop.time()
        self._advance()
        self._pay_continue()
        if not self._is_reading and len(self._waiting) <= _MAX_WAITING // 2:
            self._is_reading = True
            self._transport.resume_reading()

    def _send_refusal(self, refusal: Refusal) -> None:
        assert self._transport is not None
        self.server.on_refused(refusal.status)
        kind = "BadRequestError" if refusal.status < 500 else "ServiceUnavailableError"
        body = error_body(refusal.message, status=refusal.status, kind=kind)
        head = status_line(refusal.status) + self.server.date.line()
        self.write(
            b"%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (head, len(body), body)
        )
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
        self.connections: set[ClientConnection] = set()
        self.date = DateHeader()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<HttpServer connections={len(self.connections)}>"

    async def start(self) -> int:
        """Listen; returns the port. Raises ``OSError`` when the address cannot be had."""
        self._server = await self.loop.create_server(
            lambda: ClientConnection(self), self.config.host, self.config.port, backlog=1024
        )
        self._sweeper = self.loop.create_task(self._sweep())
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def drain(self, timeout_s: float) -> bool:
        """Take no more requests and let running ones end; True when all did in time."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.close_if_idle()
        deadline_at_s = self.loop.time() + timeout_s
        while self.connections and self.loop.time() < deadline_at_s:
            await asyncio.sleep(0.05)
        is_clean = not self.connections
        for connection in list(self.connections):
            connection.cancel()
        if self._sweeper is not None:
            self._sweeper.cancel()
        return is_clean

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            now_s = self.loop.time()
            for connection in list(self.connections):
                connection.sweep(now_s)
