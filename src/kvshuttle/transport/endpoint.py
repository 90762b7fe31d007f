"""The side channel's reactor: small requests and one-way messages over ZMQ.

One thread owns an ``Endpoint`` and calls ``poll``; only ``wake`` may be called from elsewhere. An endpoint may listen
(ROUTER), and it keeps one DEALER per peer address, made on demand and closed when idle.

A message waits in *our* outbox until ZMQ has a live connection (IMMEDIATE), and is dropped there when its time
is up: a peer that comes back after minutes never gets requests that nobody waits for. What was already handed to
a connection when the peer died is dropped with the connection. A restarted peer at the same address is reached
by ZMQ's own reconnecting.

Bad input never ends the reactor: it is counted under a reason, logged at most every ``_LOG_INTERVAL_S``, and
answered with a refusal when the sender is authentic. Frames over ``MAX_FRAME_BYTES`` end their connection inside ZMQ,
uncounted.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import os
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import zmq

from kvshuttle.errors import ConfigError, PeerUnreachable, RemoteProtocolError, TransportError
from kvshuttle.transport.framing import (
    CORRELATION_LEN_BYTES,
    MAX_FRAME_BYTES,
    MAX_PAYLOAD_BYTES,
    Frame,
    Kind,
    ReplayWindow,
    Sealer,
    WrongTagError,
)
from kvshuttle.transport.links import Links, Outgoing

logger = logging.getLogger(__name__)

M = TypeVar("M")
Failure = TransportError | RemoteProtocolError
OnReply = Callable[[M | Failure], None]

_MAX_PORT = 65535
_MAX_PENDING = 4096
"""Requests in flight; one engine pair has a handful."""
_MAX_FRAMES_PER_POLL = 64
"""Read from one socket before timers get their turn."""
_RECEIVE_HIGH_WATER_FRAMES = 64
_LOG_INTERVAL_S = 10.0
_ONE_WAY_EXPIRY_S = 1.0


class Codec(Protocol[M]):
    """What the side channel must know of the messages it carries."""

    version: int

    def encode(self, message: M) -> bytes:
        """The bytes of a message."""
        ...

    def decode(self, payload: bytes) -> M:
        """The message, or ``RemoteProtocolError``."""
        ...

    def refusal(self, reason: str) -> M:
        """The answer to a request that cannot be handled."""
        ...

    def refusal_reason(self, message: M) -> str | None:
        """Why the peer refused; None when it did not."""
        ...


@dataclass(frozen=True, slots=True)
class _Pending(Generic[M]):
    address: str
    deadline_at_s: float
    timeout_s: float
    on_reply: OnReply[M]


class Endpoint(Generic[M]):
    """One party on the side channel.

    ``secret``: shared key, or None. ``sender``: our name in logs. ``handler``: answers a request; its answer to a
    one-way message is ignored. A handler's ``RemoteProtocolError`` is told to the peer, any other exception is not.
    """

    def __init__(
        self,
        *,
        codec: Codec[M],
        secret: bytes | None,
        sender: str,
        handler: Callable[[M], M | None],
        now_s: Callable[[], float],
    ) -> None:
        self._codec = codec
        self._sealer = Sealer(secret)
        self._sender = sender
        self._handler = handler
        self.now_s = now_s
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._router: zmq.Socket[bytes] | None = None
        self._links = Links(self._context, self._poller)
        self._pending: dict[bytes, _Pending[M]] = {}
        self._settled: list[tuple[OnReply[M], M | Failure]] = []
        self._replays = ReplayWindow()
        self._logged_at_s: dict[str, float] = {}
        self._wake_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._is_closed = False
        self.counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"links={len(self._links)} pending={len(self._pending)}"
        return f"<Endpoint {self._sender} {state}>"

    def bind(self, host: str, port: int) -> str:
        """Listen, and return the ``host:port`` to be reached at; port 0 picks a free one.

        Raises ``ConfigError`` when the host is not loopback and there is no secret, or the port is taken.
        """
        assert self._router is None, "an endpoint listens once"
        if not 0 <= port <= _MAX_PORT:
            raise ConfigError(f"side_channel_port: {port} is not between 0 and {_MAX_PORT}")
        resolved = _resolve(host, port)
        if not resolved.is_loopback and not self._sealer.is_keyed:
            raise ConfigError(
                f"side_channel_host: {host!r} is reachable from other machines; use a loopback address, or set"
                " KVSHUTTLE_SECRET to the same 16 or more bytes on every engine and the router"
            )
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        router.setsockopt(zmq.RCVHWM, _RECEIVE_HIGH_WATER_FRAMES)
        router.setsockopt(zmq.IPV6, int(resolved.version == 6))
        try:
            router.bind(f"tcp://{_bracketed(str(resolved))}:{port or '*'}")
        except zmq.ZMQError as error:
            router.close()
            raise ConfigError(f"side_channel_port: cannot listen on {host} port {port}: {error}") from error
        self._router = router
        self._poller.register(router, zmq.POLLIN)
        bound_port = router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        return f"{_bracketed(host)}:{bound_port}"

    def request(self, address: str, message: M, *, timeout_s: float, on_reply: OnReply[M]) -> None:
        """Ask a peer. ``on_reply`` is called exactly once, from ``poll`` or ``close``.

        It gets the reply, ``PeerUnreachable`` when ``timeout_s`` is over, or ``RemoteProtocolError`` when the peer
        refused.
        """
        if self._is_closed:
            self._call(on_reply, TransportError("the side channel is closed"))
            return
        if len(self._pending) >= _MAX_PENDING:
            self._settled.append((on_reply, TransportError(f"{_MAX_PENDING} requests are in flight already")))
            return
        correlation_id = secrets.token_bytes(CORRELATION_LEN_BYTES)
        deadline_at_s = self.now_s() + timeout_s
        try:
            self._enqueue(address, Kind.REQUEST, correlation_id, message, deadline_at_s)
        except TransportError as error:
            self._settled.append((on_reply, error))
            return
        self._pending[correlation_id] = _Pending(address, deadline_at_s, timeout_s, on_reply)

    def send(self, address: str, message: M) -> None:
        """Tell a peer something, at most once and only within the next second; failures are counted, never raised."""
        if self._is_closed:
            return
        correlation_id = secrets.token_bytes(CORRELATION_LEN_BYTES)
        try:
            self._enqueue(address, Kind.ONE_WAY, correlation_id, message, self.now_s() + _ONE_WAY_EXPIRY_S)
        except TransportError as error:
            self._complain("unsent", str(error))

    def poll(self, timeout_s: float | None) -> None:
        """Serve what arrives until something did, the timeout is over (None: no limit), or ``wake`` is called."""
        events = dict(self._poller.poll(self._wait_ms(timeout_s)))
        if self._wake_fd in events:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        if self._router is not None and self._router in events:
            self._serve(self._router)
        for link in self._links.in_events(events):
            for _ in range(_MAX_FRAMES_PER_POLL):
                data = link.receive()
                if data is None:
                    break
                self._on_reply_frame(link.address, data)
        now_s = self.now_s()
        self._expire(now_s)
        if num_expired := self._links.flush(now_s):
            self.counts["expired_unsent"] += num_expired
        self._links.close_idle(now_s, keep={pending.address for pending in self._pending.values()})
        settled, self._settled = self._settled, []
        for on_reply, reply in settled:
            self._call(on_reply, reply)

    def wake(self) -> None:
        """Make a running or the next ``poll`` return. The one method that any thread may call, also after ``close``."""
        with self._wake_lock:
            if not self._is_closed:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Drop everything; requests in flight get ``TransportError``. Idempotent."""
        with self._wake_lock:
            if self._is_closed:
                return
            self._is_closed = True
            os.close(self._wake_fd)
        self._links.close()
        if self._router is not None:
            self._router.close()
        self._context.term()
        settled = [*self._settled]
        settled += [
            (pending.on_reply, TransportError("the side channel is closed")) for pending in self._pending.values()
        ]
        self._pending.clear()
        self._settled.clear()
        for on_reply, reply in settled:
            self._call(on_reply, reply)

    def _enqueue(self, address: str, kind: Kind, correlation_id: bytes, message: M, expires_at_s: float) -> None:
        payload = self._codec.encode(message)
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise TransportError(f"a message of {len(payload)} bytes is over the limit of {MAX_PAYLOAD_BYTES}")
        data = self._sealer.seal(Frame(self._codec.version, kind, correlation_id, payload))
        self._links.enqueue(address, Outgoing(data, expires_at_s), self.now_s())

    def _wait_ms(self, timeout_s: float | None) -> int | None:
        if self._settled:
            return 0
        deadlines = [pending.deadline_at_s for pending in self._pending.values()]
        deadlines += self._links.deadlines_at_s()
        now_s = self.now_s()
        waits_s = [deadline_at_s - now_s for deadline_at_s in deadlines]
        if timeout_s is not None:
            waits_s.append(timeout_s)
        if not waits_s:
            return None
        # Rounded up: waking a fraction of a millisecond early would spin until the deadline.
        return max(0, math.ceil(min(waits_s) * 1000))

    def _serve(self, router: zmq.Socket[bytes]) -> None:
        for _ in range(_MAX_FRAMES_PER_POLL):
            try:
                parts = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(parts) != 2:
                self._complain("malformed", f"a message of {len(parts)} parts")
                continue
            answer = self._answer(parts[1])
            if answer is not None:
                # A peer that is gone or does not read its replies loses them; it has a timeout.
                with contextlib.suppress(zmq.ZMQError):
                    router.send_multipart([parts[0], answer], zmq.NOBLOCK)

    def _answer(self, data: bytes) -> bytes | None:
        try:
            frame = self._sealer.open(data)
        except RemoteProtocolError as error:
            self._complain("wrong_tag" if isinstance(error, WrongTagError) else "malformed", str(error))
            return None
        if frame.kind is Kind.REPLY:
            self._complain("malformed", "a reply where requests are expected")
            return None
        if self._sealer.is_keyed and self._replays.is_replay(frame.correlation_id):
            self._complain("replayed", "a request that was seen before")
            return None
        message = self._handled(frame)
        if frame.kind is Kind.ONE_WAY:
            return None
        payload = self._codec.encode(message)
        if len(payload) > MAX_PAYLOAD_BYTES:
            self._complain("oversize_reply", f"a reply of {len(payload)} bytes")
            payload = self._codec.encode(self._codec.refusal("the reply is too large"))
        return self._sealer.seal(Frame(self._codec.version, Kind.REPLY, frame.correlation_id, payload))

    def _handled(self, frame: Frame) -> M:
        if frame.version != self._codec.version:
            reason = f"protocol version {frame.version} is not {self._codec.version}"
            self._complain("wrong_version", reason)
            return self._codec.refusal(reason)
        try:
            message = self._codec.decode(frame.payload)
        except RemoteProtocolError as error:
            self._complain("undecodable", str(error))
            return self._codec.refusal(str(error))
        try:
            answer = self._handler(message)
        except RemoteProtocolError as error:
            self._complain("refused", str(error))
            return self._codec.refusal(str(error))
        except Exception:
            self.counts["handler_error"] += 1
            logger.exception("%s: the handler failed on %s", self._sender, type(message).__name__)
            return self._codec.refusal("internal error")
        return self._codec.refusal(f"{type(message).__name__} is not a request") if answer is None else answer

    def _on_reply_frame(self, address: str, data: bytes) -> None:
        try:
            frame = self._sealer.open(data)
        except RemoteProtocolError as error:
            self._complain("wrong_tag" if isinstance(error, WrongTagError) else "malformed", f"from {address}: {error}")
            return
        pending = self._pending.get(frame.correlation_id)
        if frame.kind is not Kind.REPLY or pending is None or pending.address != address:
            # Mostly replies that came after their request timed out.
            self.counts["unexpected_reply"] += 1
            return
        del self._pending[frame.correlation_id]
        self._settled.append((pending.on_reply, self._reply(address, frame)))

    def _reply(self, address: str, frame: Frame) -> M | Failure:
        if frame.version != self._codec.version:
            return RemoteProtocolError(f"{address} speaks protocol version {frame.version}, not {self._codec.version}")
        try:
            message = self._codec.decode(frame.payload)
        except RemoteProtocolError as error:
            self._complain("undecodable", f"from {address}: {error}")
            return error
        reason = self._codec.refusal_reason(message)
        return message if reason is None else RemoteProtocolError(f"{address} refused: {reason}")

    def _expire(self, now_s: float) -> None:
        overdue = [key for key, pending in self._pending.items() if pending.deadline_at_s <= now_s]
        for correlation_id in overdue:
            pending = self._pending.pop(correlation_id)
            error = PeerUnreachable(f"{pending.address} gave no answer in {pending.timeout_s:g} s")
            self._settled.append((pending.on_reply, error))

    def _call(self, on_reply: OnReply[M], reply: M | Failure) -> None:
        try:
            on_reply(reply)
        except Exception:
            self.counts["callback_error"] += 1
            logger.exception("%s: a reply callback failed", self._sender)

    def _complain(self, reason: str, detail: str) -> None:
        self.counts[reason] += 1
        now_s = self.now_s()
        if now_s - self._logged_at_s.get(reason, -_LOG_INTERVAL_S) >= _LOG_INTERVAL_S:
            self._logged_at_s[reason] = now_s
            logger.warning("%s: %s (%d so far): %s", self._sender, reason, self.counts[reason], detail[:200])


def _resolve(host: str, port: int) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    literal = host.removeprefix("[").removesuffix("]")
    try:
        found = socket.getaddrinfo(literal, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigError(
            f"side_channel_host: {host!r} port {port} is not an address of this machine: {error}"
        ) from error
    return ipaddress.ip_address(str(found[0][4][0]).partition("%")[0])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
