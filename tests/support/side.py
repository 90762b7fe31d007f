"""Ask an engine's side channel one thing, as a router or peer would."""

from __future__ import annotations

import asyncio
import os

from kvshuttle.clock import now_s
from kvshuttle.handoff.messages import Message, Refused
from kvshuttle.handoff.wire import MessageCodec
from kvshuttle.transport.endpoint import Endpoint
from kvshuttle.transport.side_channel import SideChannelThread


def ask_side(address: str, message: Message, *, timeout_s: float = 20.0) -> Message:
    """One request, one reply. Raises what the endpoint reports."""
    secret = os.environ.get("KVSHUTTLE_SECRET", "").encode() or None
    endpoint: Endpoint[Message] = Endpoint(
        codec=MessageCodec(), secret=secret, sender="test", handler=lambda _: Refused("a test"), now_s=now_s
    )
    thread = SideChannelThread(endpoint)
    thread.start()
    try:
        return asyncio.run(thread.request_async(address, message, timeout_s=timeout_s))
    finally:
        thread.stop(timeout_s=20.0)
