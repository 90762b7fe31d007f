"""From a client's bytes to whole requests, within limits. No IO: bytes in, ``Request`` or ``Refusal`` out.

httptools checks the syntax; this class checks sizes and what the router does not support. After a
``Refusal`` nothing more is parsed, since where the next request would begin is unknown.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httptools

from kvshuttle.router.http_text import Headers, Request, header_lines

if TYPE_CHECKING:
    from kvshuttle.config import RouterConfig

_MAX_URL_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer to something that never became a request; the connection ends after it."""

    status: int
    message: str


class _RefusedError(Exception):
    """Leaves a parser callback with the refusal that it means."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.refusal = Refusal(status, message)


class RequestParser:
    """Parses one connection's input.

    ``arrived``: whole requests in order, and at most one refusal, at the end. ``is_receiving``: part of a request
    is there. ``wants_continue``: the client waits for ``100 Continue`` before it sends a body.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.arrived: deque[Request | Refusal] = deque()
        self.num_arrived_bytes = 0
        self.is_refused = False
        self.wants_continue = False
        self._config = config
        self._parser = httptools.HttpRequestParser(self)
        self._is_in_head = self._is_in_body = False
        self._headers: Headers = []
        self._body: list[bytes] = []
        self.on_message_begin()
        self._is_in_head = False

    @property
    def is_receiving(self) -> bool:
        """True between a request's first byte and its last."""
        return self._is_in_head or self._is_in_body

    def feed(self, data: bytes) -> None:
        """Parse more input; it is ignored after a refusal."""
        if self.is_refused:
            return
        if self._is_in_head:
            # Counted by reads, because httptools tells of a header only when it is whole.
            self._num_head_bytes += len(data)
        try:
            self._feed(data)
            if self._is_in_head and self._num_head_bytes > self._config.max_header_bytes:
                self.refuse(Refusal(431, self._head_too_long()))
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, _RefusedError):
                self.refuse(cause.refusal)
            else:
                self.refuse(Refusal(400, "The request is not valid HTTP/1.1."))

    def take(self) -> Request | Refusal:
        """The next arrival."""
        arrival = self.arrived.popleft()
        if isinstance(arrival, Request):
            self.num_arrived_bytes -= len(arrival.body)
        return arrival

    def refuse(self, refusal: Refusal) -> None:
        """Parse no more; the refusal comes after the requests that are whole already."""
        self.is_refused = True
        self.wants_continue = self._is_in_head = self._is_in_body = False
        self._body = []
        self.arrived.append(refusal)

    # --- httptools ---

    def on_message_begin(self) -> None:
        """A request's first byte."""
        self._url = self._method = b""
        self._headers = []
        self._body = []
        self._num_head_bytes = self._num_header_bytes = self._num_body_bytes = 0
        self._is_keep_alive = self._is_http_10 = False
        self._is_in_head = True

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        self._url += url
        if len(self._url) > _MAX_URL_BYTES:
            raise _RefusedError(414, f"The URL is longer than {_MAX_URL_BYTES} bytes.")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer, which is ignored."""
        if not self._is_in_head:
            return
        self._num_header_bytes += len(name) + len(value) + 4
        if self._num_header_bytes > self._config.max_header_bytes:
            raise _RefusedError(431, self._head_too_long())
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._is_in_head = False
        self._is_in_body = True
        self._method = self._parser.get_method()
        self._is_http_10 = self._parser.get_http_version() != "1.1"
        self._is_keep_alive = self._parser.should_keep_alive()
        num_hosts = 0
        for name, value in self._headers:
            if name == b"content-length" and int(value) > self._config.max_body_bytes:
                raise _RefusedError(413, self._body_too_long())
            if name == b"content-encoding" and value.lower() != b"identity":
                raise _RefusedError(415, "Compressed request bodies are not supported.")
            if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                raise _RefusedError(501, "Of transfer encodings only chunked is supported.")
            if name == b"expect":
                self._expect(value)
            num_hosts += name == b"host"
        if not num_hosts and not self._is_http_10:
            raise _RefusedError(400, "The Host header is missing.")
        if num_hosts > 1:
            raise _RefusedError(400, "There is more than one Host header.")

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        self.wants_continue = False
        self._num_body_bytes += len(data)
        if self._num_body_bytes > self._config.max_body_bytes:
            raise _RefusedError(413, self._body_too_long())
        self._body.append(data)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._is_in_body = self.wants_continue = False
        if self._parser.should_upgrade():
            return  # _feed parses it again without the offer to upgrade
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        self.num_arrived_bytes += len(body)
        self.arrived.append(
            Request(self._method, _path(self._url), self._headers, body, self._is_keep_alive, self._is_http_10)
        )

    # --- private ---

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._without_upgrade(data[upgrade.args[0] :])
            else:
                return

    def _without_upgrade(self, rest: bytes) -> bytes:
        """We take up no offer to upgrade, so the request stands as if there were none."""
        self._parser = httptools.HttpRequestParser(self)
        if self._method == b"CONNECT":
            self.refuse(Refusal(405, "CONNECT is not allowed here."))
            return b""
        dropped = (b"upgrade", b"connection", b"http2-settings")
        lines = header_lines([header for header in self._headers if header[0] not in dropped])
        return b"%b %b HTTP/1.1\r\n%b\r\n" % (self._method, self._url, lines) + rest

    def _expect(self, value: bytes) -> None:
        if value.lower() != b"100-continue":
            raise _RefusedError(417, "The only expectation supported is 100-continue.")
        self.wants_continue = not self._is_http_10

    def _head_too_long(self) -> str:
        return f"The request's head is longer than {self._config.max_header_bytes} bytes."

    def _body_too_long(self) -> str:
        return f"The request body is longer than {self._config.max_body_bytes} bytes."


def _path(url: bytes) -> bytes:
    """The path of an origin-form or absolute-form target."""
    path = url.partition(b"?")[0]
    if path.startswith((b"http://", b"https://")):
        path = b"/" + path.split(b"/", 3)[3] if path.count(b"/") >= 3 else b"/"
    return path
