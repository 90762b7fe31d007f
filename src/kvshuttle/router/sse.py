"""The little that the router must understand of server-sent events. Pure.

Before the first data event the head of a stream is read closely, since until then a failure can still become a
retry or a real status code. After it, bytes pass through whole and unread, but never half an event: when the
engine dies in the middle of one, the client gets our error event instead of garbage.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from kvshuttle.router.openai import has_transfer_params, scrub_answer

_MAX_HELD_BYTES = 1 << 20
"""An event longer than this is passed on in parts."""
_PARAMS = b"_transfer_params"
_DONE = (b"data: [DONE]\n\n", b"data: [DONE]\r\n\r\n", b"data:[DONE]\n\n")


@dataclass(frozen=True, slots=True)
class StreamError:
    """An error that an engine reports as its first event, with status 200 already sent."""

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

    ``feed`` returns what may be sent now, ``rest`` what is left when the stream ended well. ``is_torn``: an event too
    long to hold has been passed on in part. ``is_done``: the last event was ``[DONE]``, after which nothing follows.
    """

    __slots__ = ("_held", "is_done", "is_torn")

    def __init__(self) -> None:
        self._held = b""
        self.is_done = False
        self.is_torn = False

    def feed(self, data: bytes) -> bytes:
        """The whole events in what was held and ``data``; b"" when there is none yet."""
        if self._held:
            data = self._held + data
            self._held = b""
        if data.endswith((b"\n\n", b"\r\n\r\n")):
            self.is_torn = False
            self.is_done = data.endswith(_DONE)
        else:
            data = self._hold_partial(data)
        if _PARAMS in data:
            return _scrub_events(data)
        return data

    def rest(self) -> bytes:
        """What is held, scrubbed; the stream has ended without a blank line."""
        held, self._held = self._held, b""
        return _scrub_events(held) if _PARAMS in held else held

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


def _scrub_events(data: bytes) -> bytes:
    if not has_transfer_params(data):
        return data
    lines = data.split(b"\n")
    for index, line in enumerate(lines):
        if line.startswith(b"data:") and has_transfer_params(line):
            ending = b"\r" if line.endswith(b"\r") else b""
            lines[index] = b"data: " + scrub_answer(line[5:].strip()) + ending
    return b"\n".join(lines)
