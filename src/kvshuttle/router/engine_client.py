"""HTTP to one engine: a pool of keep-alive connections on ``asyncio.Protocol``.

A request is sent once: whether it may be repeated is for the caller to know, who repeats it with a fresh
transfer id. Connections are taken newest first and dropped before the engine would close them itself, so that
hardly any request meets a closing connection.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import httptools

from kvshuttle.router.exchange import Exchange, FailureReason, LegError, ResponseHead

if TYPE_CHECKING:
    import ssl

    from kvshuttle.router.http_text import Headers

_MAX_HEAD_BYTES = 262_144


class EngineConnection(asyncio.Protocol):
    """One keep-alive connection; carries one exchange at a time."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._headers: Headers = []
        self._num_head_bytes = 0
        self._parts: list[bytes] = []
        self._is_interim = self._is_whole = self._is_paused = False
        self._is_reusable = self._is_unwanted = False
        self.idle_since_s = 0.0

    def start(self, exchange: Exchange, request: bytes) -> None:
        """Send a request; its answer goes to ``exchange``."""
        assert self._exchange is None, "one exchange at a time"
        assert self._transport is not None, "a pool hands out live connections"
        self._exchange = exchange
        self._transport.write(request)

    @property
    def is_alive(self) -> bool:
        """True while the socket is open."""
        return self._transport is not None and not self._transport.is_closing()

    def abandon(self) -> None:
        """The exchange is given up: close at once."""
        self._exchange = None
        self.close()

    def close(self) -> None:
        """Close without waiting for anything, or as soon as there is something to close."""
        self._is_unwanted = True
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Stop reading."""
        if self._transport is not None and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self._transport is not None and self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the socket."""
        self._transport = cast("asyncio.Transport", transport)
        self._pool.on_made(self)
        if self._is_unwanted:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine closed, died, or we closed."""
        self._transport = None
        self._pool.on_lost(self)
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if exc is None and exchange.head is not None and exchange.head.is_until_close:
            exchange.on_end()
        else:
            exchange.fail(FailureReason.RESET, "the engine closed the connection before its answer was whole")

    def data_received(self, data: bytes) -> None:
        """Feed the parser, then hand on everything this read brought in one piece."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._break("an answer that is not valid HTTP/1.1")
            return
        exchange = self._exchange
        if exchange is None:
            self.close()  # bytes that nobody asked for
            return
        if self._parts:
            parts, self._parts = self._parts, []
            exchange.on_data(parts[0] if len(parts) == 1 else b"".join(parts))
        if self._is_whole:
            self._finish(exchange)

    # --- httptools ---

    def on_message_begin(self) -> None:
        """An answer begins; a second one to the same request is none."""
        if self._is_whole:
            raise ValueError("two answers to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or a trailer, which is of no use here."""
        self._num_head_bytes += len(name) + len(value)
        if self._num_head_bytes > _MAX_HEAD_BYTES:
            raise ValueError("head too long")
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is whole; 1xx heads announce another one."""
        status = self._parser.get_status_code()
        headers, self._headers, self._num_head_bytes = self._headers, [], 0
        self._is_interim = status < 200
        if self._is_interim or self._exchange is None:
            return
        self._exchange.on_head(ResponseHead(status, headers))

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        self._parts.append(data)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        self._is_whole = not self._is_interim
        # To be asked here and not later: the parser forgets it when it begins to look for the next answer.
        self._is_reusable = self._parser.should_keep_alive()

    # --- private ---

    def _finish(self, exchange: Exchange) -> None:
        self._exchange = None
        self._is_whole = False
        self._headers, self._num_head_bytes = [], 0
        self.resume()
        if self._is_reusable:
            self._pool.give_back(self)
        else:
            self.close()
        exchange.on_end()

    def _break(self, detail: str) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.fail(FailureReason.MALFORMED, detail)
        self.close()


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Bounds of an engine's pool."""

    max_connections: int
    idle_s: float
    connect_timeout_s: float
    max_response_bytes: int


class EnginePool:
    """Connections to one engine: the newest idle one is used first, so that surplus ones grow old and are closed."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, limits: PoolLimits) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._idle: dict[EngineConnection, None] = {}
        self._open: set[EngineConnection] = set()
        self._num_connecting = 0
        authority = f"[{host}]" if ":" in host else host
        self.host_header = f"{authority}:{port}".encode()

    def __repr__(self) -> str:
        return f"<EnginePool open={len(self._open)} idle={len(self._idle)}>"

    async def send(self, request: bytes) -> Exchange:
        """Send a request over an idle or a new connection. Raises ``LegError`` when there is none to be had."""
        connection = self._take_idle() or await self._connect()
        exchange = Exchange(connection, self._loop, self._limits.max_response_bytes)
        connection.start(exchange, request)
        return exchange

    def give_back(self, connection: EngineConnection) -> None:
        """A connection whose exchange has ended well."""
        connection.idle_since_s = self._loop.time()
        self._idle[connection] = None

    def on_made(self, connection: EngineConnection) -> None:
        """A connection is open."""
        self._open.add(connection)

    def on_lost(self, connection: EngineConnection) -> None:
        """A connection has closed."""
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def close_idle(self, older_than_s: float = 0.0) -> None:
        """Close idle connections, all or only old ones."""
        limit_s = self._loop.time() - older_than_s
        for connection in [idle for idle in self._idle if idle.idle_since_s <= limit_s]:
            del self._idle[connection]
            connection.close()

    def _take_idle(self) -> EngineConnection | None:
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.is_alive and self._loop.time() - connection.idle_since_s < self._limits.idle_s:
                return connection
            connection.close()
        return None

    async def _connect(self) -> EngineConnection:
        if len(self._open) + self._num_connecting >= self._limits.max_connections:
            raise LegError(FailureReason.CAPACITY, "all connections to the engine are in use")
        self._num_connecting += 1
        connection, is_wanted = EngineConnection(self), False
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                await self._loop.create_connection(lambda: connection, self._host, self._port, ssl=self._tls)
            is_wanted = True
        except TimeoutError as error:
            # A full backlog looks like this too, so the engine is not taken for dead.
            raise LegError(FailureReason.TIMEOUT, "no connection in time") from error
        except (OSError, UnicodeError) as error:  # the latter for names that DNS cannot hold
            raise LegError(FailureReason.CONNECT, f"cannot connect: {type(error).__name__}") from error
        finally:
            self._num_connecting -= 1
            if not is_wanted:
                # It may be open already, or be about to, when whoever asked for it has gone away. uvloop then closes
                # the socket without a word to its protocol.
                connection.close()
                self.on_lost(connection)
        return connection
