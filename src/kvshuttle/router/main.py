"""Runs the router with its real side channel; what ``kvshuttle router`` calls."""

from __future__ import annotations

import functools
import gc
import logging
import resource
from typing import TYPE_CHECKING

import uvloop

from kvshuttle.clock import now_s
from kvshuttle.handoff.messages import Message, Refused
from kvshuttle.handoff.wire import MessageCodec
from kvshuttle.router.app import serve_until_signalled
from kvshuttle.transport.side_channel import Endpoint, SideChannelThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvshuttle.config import RouterConfig

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 5.0
_GC_THRESHOLD = 10_000


class SideChannel:
    """The router's end of the side channel: it asks, and answers nobody."""

    def __init__(self, secret: bytes | None) -> None:
        endpoint: Endpoint[Message] = Endpoint(
            codec=MessageCodec(), secret=secret, sender="router", handler=_refuse, now_s=now_s
        )
        self._thread = SideChannelThread(endpoint, name="router-side-channel")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop it."""
        self._thread.stop(_STOP_TIMEOUT_S)

    async def request(self, address: str, message: Message, timeout_s: float) -> Message:
        """Ask an engine. Raises ``TransportError`` or ``RemoteProtocolError``."""
        return await self._thread.request_async(address, message, timeout_s=timeout_s)


def run_router(config: RouterConfig, *, secret: bytes | None = None, ready: Callable[[int], None] | None = None) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit code: 1 when requests were cut off at the end.

    ``ready`` gets the port once clients can connect. Raises ``ConfigError`` when the address cannot be had.
    """
    settle_process()
    channel = SideChannel(secret)
    channel.start()
    announce = ready or functools.partial(logger.info, "listening on %s port %d", config.host)
    try:
        is_clean = uvloop.run(serve_until_signalled(config, channel, announce))
    finally:
        channel.stop()
    return 0 if is_clean else 1


def settle_process() -> None:
    """Settings of a process that serves many connections: open files, and a garbage collector that looks less often."""
    _raise_open_files_limit()
    # What exists now stays; and requests make garbage that needs no collector.
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 20, 20)


def _refuse(_message: Message) -> Message:
    return Refused(reason="the router answers no requests")


def _raise_open_files_limit() -> None:
    """Every request holds two or three sockets, and the usual soft limit is 1024 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
