"""Clients that leave at any moment leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import TYPE_CHECKING

import pytest

from support.live import MODE_HEADER, MODEL_NAME, connect

if TYPE_CHECKING:
    from support.live import Live

NUM_DISCONNECTS = 20
LEASE_S = 6.0  # as in conftest

WINDOWS_S = {
    "before the prefill engine starts": (0.0, 0.02),
    "while the prefill engine computes": (0.1, 0.5),
    "around the hand-off": (0.8, 1.4),
    "anywhere": (0.0, 2.5),
}


MODES = ("pull", "push")


def headers_for(mode: str) -> dict[str, str]:
    return {"content-type": "application/json", MODE_HEADER: mode}


def leave_after(live: Live, delay_s: float, *, num_tokens: int, mode: str) -> None:
    """Send a streamed request and hang up after ``delay_s``, whatever has come by then."""
    body = {
        "model": MODEL_NAME,
        "prompt": live.token_ids(num_tokens),
        "max_tokens": 200,
        "temperature": 0,
        "stream": True,
    }
    with contextlib.closing(connect(live.url, timeout_s=30)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), headers_for(mode))
        assert isinstance(connection.sock, socket.socket)
        connection.sock.settimeout(max(delay_s, 0.001))
        with contextlib.suppress(TimeoutError):
            deadline_at_s = time.monotonic() + delay_s
            while (left_s := deadline_at_s - time.monotonic()) > 0:
                connection.sock.settimeout(left_s)
                connection.sock.recv(65536)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", WINDOWS_S)
def test_twenty_disconnects_in_a_window_leave_nothing_held(live: Live, window: str, mode: str) -> None:
    low_s, high_s = WINDOWS_S[window]
    for _ in range(NUM_DISCONNECTS):
        leave_after(live, live.rng.uniform(low_s, high_s), num_tokens=live.rng.choice((100, 300, 400)), mode=mode)
    assert live.wait_settled(timeout_s=LEASE_S + 10.0) == {}


@pytest.mark.parametrize("mode", MODES)
def test_leaving_in_the_middle_of_a_stream_leaves_nothing_held(live: Live, mode: str) -> None:
    for _ in range(NUM_DISCONNECTS):
        body = {"model": MODEL_NAME, "prompt": live.token_ids(140), "max_tokens": 300, "temperature": 0, "stream": True}
        with contextlib.closing(connect(live.url)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), headers_for(mode))
            response = connection.getresponse()
            assert response.status == 200
            assert response.readline().startswith(b"data:")
    assert live.wait_settled(timeout_s=LEASE_S + 10.0) == {}
