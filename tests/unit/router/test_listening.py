"""What the router says when it cannot listen: which setting is wrong, and what to put there."""

from __future__ import annotations

import errno
import socket

import pytest

from kvshuttle.config import RouterConfig
from kvshuttle.router.app import _cannot_listen


@pytest.mark.parametrize(
    ("host", "error", "told"),
    [
        (
            "h",
            socket.gaierror(-2, "Name or service not known"),
            "host: cannot listen on h port 8000: [Errno -2] Name or",
        ),
        (
            "h" * 400,
            UnicodeError("label too long"),
            f"host: cannot listen on {'h' * 40}... (400 characters) port 8000: l",
        ),
        ("203.0.113.1", OSError(errno.EADDRNOTAVAIL, "not ours"), "host: cannot listen on 203.0.113.1 port 8000: "),
        ("127.0.0.1", OSError(errno.EADDRINUSE, "in use"), "port: cannot listen on 127.0.0.1 port 8000: "),
        ("127.0.0.1", PermissionError(errno.EACCES, "denied"), "port: cannot listen on 127.0.0.1 port 8000: "),
    ],
)
def test_the_setting_is_named_that_keeps_the_router_from_listening(host: str, error: OSError, told: str) -> None:
    config = RouterConfig.from_mapping({"prefill": ["http://a:1,a:2"], "decode": ["http://b:1,b:2"], "host": host})
    message = str(_cannot_listen(config, error))
    assert message.startswith(told)
    fix = "such as 127.0.0.1" if told.startswith("host") else "choose another, or 0 for a free one"
    assert message.endswith(fix)
