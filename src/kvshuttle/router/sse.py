"""The little that the router must understand of server-sent events. Pure.

Before the first data event the head of a stream is read closely, since until then a failure can still become a
retry or a real status code. After it, bytes pass through whole and unread, but never half an event: when the
engine dies in the middle of one, the client gets our error event instead of garbage. Only what looks like an error
event is read: an engine whose worker died says so in one, and then ends the stream as if it were whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

from kvshuttle.router.openai import scrub_answer
from kvshuttle.router.usage import COUNT

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_HELD_BYTES = 1 << 20
"""An event longer than this is passed on in parts."""
_PARAMS = b"_transfer_params"
_ERROR = b'"error"'
"""Inside JSON strings its quotes would be escaped."""
_DONE = (b"data: [DONE]\n\n", b"data: [DONE]\r\n\r\n", b"data:[DONE]\n\n")


@dataclass(frozen=True, slots=True)
class StreamError:
    """An error that an engine reports as an event, with status 200 already sent."""

    status: int
    body: bytes


class StreamHead:
    """Collects a stream's beginning until its first data event says whether it is an answer or an error."""

    __slots__ = ("_data", "_scanned")

    def __init__(self) -> None:
        self._data = b""
        self._scanned = 0

    def feed(self, data: bytes) -> bool | StreamError:
        """Add a read. True: an answer has begun, take ``data``; False: not yet known."""
        self._data += data
        while True:
            end, next_start = _event_end(self._data, self._scanned)
            if end < 0:
                return len(self._data) > _MAX_HELD_BYTES
            payload = _payload(self._data[self._scanned : end])
            self._scanned = next_start
            if payload is not None:
                return _as_error(payload) or True

    @property
    def data(self) -> bytes:
        """Everything fed, untouched."""
        return self._data


class EventTail:
    """Passes a stream through in whole events, without ``…_transfer_params``.

    ``put_right``: edits the data of events that count cached tokens; without it they stay as they are.

    ``feed`` returns what may be sent now, ``rest`` what is left when the stream ended well. ``is_torn``: an event too
    long to hold has been passed on in part. ``is_done``: the last event was ``[DONE]``, after which nothing follows.
    ``error``: what the engine told in an event, which is passed on, and nothing after it.
    """

    __slots__ = ("_held", "_put_right", "error", "is_done", "is_torn")

    def __init__(self, put_right: Callable[[bytes], bytes] | None = None) -> None:
        self._put_right = put_right
        self._held = b""
        self.error: StreamError | None = None
        self.is_done = False
        self.is_torn = False

    def feed(self, data: bytes) -> bytes:
        """The whole events in what was held and ``data``; b"" when there is none yet, and behind an error."""
        if self.error is not None:
            return b""
        if self._held:
            data = self._held + data
            self._held = b""
        if data.endswith((b"\n\n", b"\r\n\r\n")):
            self.is_torn = False
            self.is_done = data.endswith(_DONE)
        else:
            data = self._hold_partial(data)
        return self._edited(data)

    def rest(self) -> bytes:
        """What is held, edited like the rest; the stream has ended without a blank line."""
        held, self._held = self._held, b""
        return self._edited(held)

    def _edited(self, data: bytes) -> bytes:
        if _ERROR in data:
            data = self._up_to_error(data)
        if _PARAMS in data:
            data = _edit_events(data, _PARAMS, scrub_answer)
        if self._put_right is not None and COUNT in data:
            data = _edit_events(data, COUNT, self._put_right)
        return data

    def _up_to_error(self, data: bytes) -> bytes:
        start = 0
        while self.error is None:
            end, next_start = _event_end(data, start)
            payload = _payload(data[start : end if end >= 0 else len(data)])
            self.error = _as_error(payload) if payload else None
            if end < 0:
                return data
            start = next_start
        self._held, self.is_done = b"", False
        return data[:start]

    def _hold_partial(self, data: bytes) -> bytes:
        newline, crlf = data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n")
        cut = max(newline + 2 if newline >= 0 else 0, crlf + 4 if crlf >= 0 else 0)
        if cut:
            self.is_torn = False
        if len(data) - cut > _MAX_HELD_BYTES:
            self.is_torn = True
            return data
        self._held = data[cut:]
        return data[:cut]


def error_event(body: bytes) -> bytes:
    """An error as an event, for a stream that cannot go on."""
    return b"data: " + body + b"\n\n"


def _event_end(data: bytes, start: int) -> tuple[int, int]:
    """Where the event that starts at ``start`` ends, and where the next begins; (-1, start) when it is not whole."""
    found = [(at, at + len(mark)) for mark in (b"\n\n", b"\r\n\r\n") if (at := data.find(mark, start)) >= 0]
    return min(found, default=(-1, start))


def _payload(event: bytes) -> bytes | None:
    """The event's data, or None for comments and other events without any."""
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def _as_error(payload: bytes) -> StreamError | None:
    if b'"error"' not in payload:
        return None
    try:
        content = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return None
    error = content.get("error") if isinstance(content, dict) else None
    if not error:
        return None
    code = error.get("code") if isinstance(error, dict) else None
    if not isinstance(code, int) or not 400 <= code <= 599:
        code = 500
    return StreamError(code, payload)


def _edit_events(data: bytes, mark: bytes, edit: Callable[[bytes], bytes]) -> bytes:
    """``data`` with the payloads that contain ``mark`` edited; those that ``edit`` leaves alone are not touched."""
    lines = data.split(b"\n")
    for index, line in enumerate(lines):
        if line.startswith(b"data:") and mark in line:
            payload = line[5:].strip()
            edited = edit(payload)
            if edited != payload:
                lines[index] = b"data: " + edited + (b"\r" if line.endswith(b"\r") else b"")
    return b"\n".join(lines)
