"""Outgoing side-channel connections: one DEALER per peer address, with an outbox of our own."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq

from kvshuttle.errors import PeerUnreachable, TransportError
from kvshuttle.transport.framing import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet

_MAX_LINKS = 256
_MAX_OUTBOX_FRAMES = 256
_IDLE_CLOSE_S = 300.0
_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 1000
_HEARTBEAT_MS = 5000
_HEARTBEAT_TIMEOUT_MS = 10000
"""A host that vanishes without a word would hold its connection for minutes of TCP retries otherwise."""
_HIGH_WATER_FRAMES = 64


_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]|[A-Za-z0-9]([\w.-]*\w)?):(\d{1,5})", re.ASCII)


def is_address(address: str) -> bool:
    """Whether ``address`` is ``host:port``. ZMQ itself would take a port modulo 65536, and more than an address."""
    match = _ADDRESS.fullmatch(address)
    return match is not None and 0 < int(match[4]) <= 65535


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A sealed frame, not worth sending any more at ``expires_at_s``."""

    data: bytes
    expires_at_s: float


class Link:
    """The connection to one address."""

    __slots__ = ("_outbox", "_poller", "_socket", "address", "used_at_s")

    def __init__(self, address: str, context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller, now_s: float) -> None:
        if not is_address(address):
            raise PeerUnreachable(f"{address[:100]!r} is not a host:port")
        self.address = address
        self.used_at_s = now_s
        self._outbox: deque[Outgoing] = deque()
        self._poller = poller
        self._socket = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IMMEDIATE, 1),
            (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
            (zmq.SNDHWM, _HIGH_WATER_FRAMES),
            (zmq.RCVHWM, _HIGH_WATER_FRAMES),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS),
            (zmq.IPV6, int("[" in address)),
        ):
            self._socket.setsockopt(option, value)
        try:
            self._socket.connect(f"tcp://{address}")
        except zmq.ZMQError as error:
            self._socket.close()
            raise PeerUnreachable(f"{address}: {error}") from error
        poller.register(self._socket, zmq.POLLIN)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """What the poller reports."""
        return self._socket

    @property
    def num_waiting(self) -> int:
        """Frames that no connection has taken yet."""
        return len(self._outbox)

    def next_expiry_at_s(self) -> float | None:
        """When the first waiting frame expires."""
        return min((outgoing.expires_at_s for outgoing in self._outbox), default=None)

    def put(self, outgoing: Outgoing) -> None:
        """Queue a frame. Raises ``TransportError`` when the peer has taken none for too long."""
        if len(self._outbox) >= _MAX_OUTBOX_FRAMES:
            raise TransportError(f"{self.address}: {_MAX_OUTBOX_FRAMES} messages wait for a connection already")
        self._outbox.append(outgoing)

    def flush(self, now_s: float) -> int:
        """Send what a connection takes; returns how many frames expired unsent."""
        if not self._outbox:
            return 0
        num_before = len(self._outbox)
        self._outbox = deque(outgoing for outgoing in self._outbox if outgoing.expires_at_s > now_s)
        num_expired = num_before - len(self._outbox)
        while self._outbox:
            try:
                self._socket.send(self._outbox[0].data, zmq.NOBLOCK)
            except zmq.Again:
                break
            self._outbox.popleft()
        # Writable interest only while something waits: a connected idle socket is always writable.
        self._poller.modify(self._socket, zmq.POLLIN | (zmq.POLLOUT if self._outbox else 0))
        return num_expired

    def receive(self) -> bytes | None:
        """The next frame, or None."""
        try:
            parts = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return parts[0] if len(parts) == 1 else b""

    def close(self) -> None:
        """Drop the connection and everything in it."""
        self._poller.unregister(self._socket)
        self._socket.close()


class Links:
    """All links of an endpoint, by address; bounded, closed when unused."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller) -> None:
        self._context = context
        self._poller = poller
        self._by_address: dict[str, Link] = {}

    def __len__(self) -> int:
        return len(self._by_address)

    def enqueue(self, address: str, outgoing: Outgoing, now_s: float) -> None:
        """Send to an address, now or as soon as it is connected. Raises ``TransportError``."""
        link = self._by_address.get(address)
        if link is None:
            if len(self._by_address) >= _MAX_LINKS:
                raise TransportError(f"connected to {_MAX_LINKS} peers already, none for {address}")
            link = self._by_address[address] = Link(address, self._context, self._poller, now_s)
        link.used_at_s = now_s
        link.put(outgoing)
        link.flush(now_s)

    def in_events(self, events: Mapping[object, int]) -> list[Link]:
        """Links with something to read."""
        return [link for link in self._by_address.values() if events.get(link.socket, 0) & zmq.POLLIN]

    def flush(self, now_s: float) -> int:
        """Flush every link; returns how many frames expired unsent."""
        return sum(link.flush(now_s) for link in self._by_address.values())

    def deadlines_at_s(self) -> Iterable[float]:
        """Instants at which ``flush`` or ``close_idle`` has something to do."""
        for link in self._by_address.values():
            expiry_at_s = link.next_expiry_at_s()
            yield link.used_at_s + _IDLE_CLOSE_S if expiry_at_s is None else expiry_at_s

    def close_idle(self, now_s: float, *, keep: AbstractSet[str]) -> None:
        """Close links unused for five minutes, except those whose replies are awaited."""
        for link in tuple(self._by_address.values()):
            if now_s - link.used_at_s < _IDLE_CLOSE_S or link.num_waiting:
                continue
            if link.address in keep:
                link.used_at_s = now_s
                continue
            del self._by_address[link.address]
            link.close()

    def close(self) -> None:
        """Close every link."""
        for link in self._by_address.values():
            link.close()
        self._by_address.clear()
