"""What the router logs of each request, joined with what its client saw by the request's id."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from kvshuttle.clock import now_s

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

_MARK = b"kvshuttle.router.requests: "
_POLL_S = 0.05


class RequestLine(msgspec.Struct, frozen=True):
    """As much of a line as benchmarks use; the router's ``Receipt`` says what each field is."""

    request_id: str
    mode: str = ""
    history: str = ""
    num_cached_tokens: int = 0
    failures: list[str] = []
    stages_s: dict[str, float] = {}
    outcome: str = ""
    status: int = 0


_DECODER = msgspec.json.Decoder(RequestLine)


def read_request_lines(path: Path) -> dict[str, RequestLine]:
    """All requests in a router's log, by id; a line that is not whole yet is left out."""
    data = path.read_bytes() if path.exists() else b""
    lines = {}
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        _, mark, text = line.partition(_MARK)
        if mark:
            request = _DECODER.decode(text)
            lines[request.request_id] = request
    return lines


def wait_for_requests(path: Path, ids: Collection[str], *, timeout_s: float) -> dict[str, RequestLine]:
    """The same, once all of ``ids`` are there or the time is over: a line follows its answer."""
    deadline_at_s = now_s() + timeout_s
    while True:
        lines = read_request_lines(path)
        if lines.keys() >= set(ids) or now_s() > deadline_at_s:
            return lines
        time.sleep(_POLL_S)
