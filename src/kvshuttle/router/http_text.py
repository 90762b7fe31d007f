"""HTTP/1.1 as bytes: requests, answers, and which headers may cross the router. Pure except for the date."""

from __future__ import annotations

import time
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus

Headers = list[tuple[bytes, bytes]]
"""In order of arrival; names in lower case."""

MODE_HEADER = b"x-kvshuttle-mode"
"""How a client may choose its own request's mode."""

CONVERSATION_HEADER = b"x-kvshuttle-conversation"
"""Tells the client the name of its conversation, by which it can be looked at and forgotten."""

RETRY_AFTER = (b"retry-after", b"1")
"""Goes with every 503 of the router's own: engines are looked at about once a second."""

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_TO_ENGINE = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"http2-settings",
    b"x-request-id",
    # Answers are scanned for internal ids, so they must come uncompressed.
    b"accept-encoding",
    # Steers between the data-parallel ranks of one engine, which is not the client's to choose.
    b"x-data-parallel-rank",
    MODE_HEADER,
}
_NOT_TO_CLIENT = HOP_BY_HOP | {b"server", b"date", b"content-length", b"x-request-id", b"alt-svc"}

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


@dataclass(slots=True)
class Request:
    """A client's whole request. ``path`` is without the query; ``is_http_10`` clients get no chunked answers."""

    method: bytes
    path: bytes
    headers: Headers
    body: bytes
    is_keep_alive: bool
    is_http_10: bool

    def header(self, name: bytes) -> bytes | None:
        """The first header of that (lower-case) name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


def status_line(status: int) -> bytes:
    """The first line of an answer; unknown statuses get no phrase."""
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def header_lines(headers: Headers) -> bytes:
    """Headers as they stand on the wire, without the closing blank line."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def for_engine(headers: Headers) -> bytes:
    """The client's headers that an engine may see, as lines."""
    named = _named_by_connection(headers)
    dropped = _NOT_TO_ENGINE | named if named else _NOT_TO_ENGINE
    return header_lines([header for header in headers if header[0] not in dropped])


def for_client(headers: Headers) -> Headers:
    """An engine's headers that a client may see; length, date and server are the router's own."""
    named = _named_by_connection(headers)
    dropped = _NOT_TO_CLIENT | named if named else _NOT_TO_CLIENT
    return [header for header in headers if header[0] not in dropped]


def engine_request(method: bytes, path: bytes, host: bytes, headers: bytes, body: bytes) -> bytes:
    """A request to an engine. ``headers``: whole lines."""
    length = b"content-length: %d\r\n" % len(body) if body or method == b"POST" else b""
    return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b%b\r\n%b" % (method, path, host, headers, length, body)


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    for name, value in headers:
        if name == b"connection" and value.lower() not in (b"keep-alive", b"close"):
            return frozenset(token.strip().lower() for token in value.split(b","))
    return frozenset()


class DateHeader:
    """The ``date`` header line, made anew once a second."""

    __slots__ = ("_at_s", "_line")

    def __init__(self) -> None:
        self._at_s = 0
        self._line = b""

    def line(self) -> bytes:
        """The line for now."""
        at_s = int(time.time())
        if at_s != self._at_s:
            self._at_s = at_s
            self._line = f"date: {formatdate(at_s, usegmt=True)}\r\n".encode()
        return self._line
