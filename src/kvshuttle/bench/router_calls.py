"""What a benchmark asks a router beside requests: whether it has a pair of engines, and to forget conversations."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from kvshuttle.clock import now_s
from kvshuttle.errors import PeerUnreachable

if TYPE_CHECKING:
    from collections.abc import Iterable

_TIMEOUT_S = 10.0
_POLL_S = 0.1


def wait_for_pair(url: str, *, timeout_s: float) -> None:
    """A router serves as soon as it knows a decode engine; wait until it also knows who can hand off to it.

    Raises ``PeerUnreachable`` when it does not come to that.
    """
    deadline_at_s = now_s() + timeout_s
    while True:
        health = _call(url, "GET", "/health", {})
        if health.get("pairs", 0) > 0:
            return
        if now_s() > deadline_at_s:
            raise PeerUnreachable(f"{url}: the router has no pair of engines: {health}")
        time.sleep(_POLL_S)


def forget(url: str, names: Iterable[str], *, api_key: str) -> None:
    """Have engines let go of what they keep of conversations of whoever shows ``api_key``."""
    for name in names:
        path = f"/v1/kvshuttle/conversations/{quote(name, safe='')}"
        _call(url, "DELETE", path, {"authorization": f"Bearer {api_key}"})


def fetch_json(url: str, path: str) -> dict[str, Any]:
    """What a router or an engine answers to a GET. Raises ``PeerUnreachable``."""
    return _call(url, "GET", path, {})


def _call(url: str, method: str, path: str, headers: dict[str, str]) -> dict[str, Any]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S)
    try:
        with contextlib.closing(connection):
            connection.request(method, path, headers=headers)
            answer = json.loads(connection.getresponse().read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise PeerUnreachable(f"{url}{path}: {type(error).__name__}: {error}") from error
    if not isinstance(answer, dict):
        raise PeerUnreachable(f"{url}{path}: answers what is no JSON object")
    return answer
