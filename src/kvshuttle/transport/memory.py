"""An in-process transport that moves real bytes: the verified fake of NIXL.

It copies between addresses of this process with ``memmove`` and is strict where NIXL is: unregistered memory,
unequal lengths, unknown, removed, closed and restarted peers, metadata that is older than a registration.
Bytes move a part per call, so that half-done transfers are seen. A fabric can ``crash`` an agent (kill -9) and
``stop`` one (SIGSTOP), and then shows what NIXL really does: a transfer with a stopped peer stays pending, and bytes
still land after ``remove_peer`` when the peer goes on.

One lock per fabric: agents may live in different threads.
"""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvshuttle import clock
from kvshuttle.errors import LocalProtocolError, PeerUnreachable, TransferFailed, TransportError
from kvshuttle.ids import mint
from kvshuttle.transport import Operation, PeerName, Transfer, TransferStatus
from kvshuttle.transport.posted import PostedTransfer
from kvshuttle.transport.spans import check_pairs, check_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray


class _Span(msgspec.Struct, frozen=True, array_like=True):
    address: int
    len_bytes: int
    device: str
    device_id: int


class _Card(msgspec.Struct, frozen=True):
    name: str
    life: str
    spans: tuple[_Span, ...]


class MemoryFabric:
    """What connects the ``MemoryTransport`` agents of one process.

    ``num_steps``: into how many parts a transfer is cut; one part moves per call of its owner.
    """

    def __init__(self, *, num_steps: int = 2) -> None:
        self.num_steps = num_steps
        self.lock = threading.RLock()
        self._agents: dict[str, MemoryTransport] = {}
        self._stopped: set[str] = set()

    def __repr__(self) -> str:
        return f"<MemoryFabric agents={sorted(self._agents)} stopped={sorted(self._stopped)}>"

    def join(self, agent: MemoryTransport) -> None:
        """Connect an agent. Raises ``LocalProtocolError`` when its name is taken."""
        with self.lock:
            if agent.name in self._agents:
                raise LocalProtocolError(f"there is an agent named {agent.name} already")
            self._agents[agent.name] = agent

    def leave(self, agent: MemoryTransport) -> None:
        """Disconnect an agent."""
        with self.lock:
            if self._agents.get(agent.name) is agent:
                del self._agents[agent.name]
            self._stopped.discard(agent.name)

    def crash(self, name: str) -> None:
        """The agent's process is killed: it is closed, and every transfer with it fails and has ended."""
        with self.lock:
            self._agents[name].close()

    def stop(self, name: str) -> None:
        """The agent's process stops running, but does not die: transfers with it make no progress."""
        with self.lock:
            assert name in self._agents, name
            self._stopped.add(name)

    def resume(self, name: str) -> None:
        """A stopped process goes on."""
        with self.lock:
            self._stopped.discard(name)

    def is_stopped(self, name: str) -> bool:
        """Whether the agent makes no progress."""
        return name in self._stopped

    def find(self, card: _Card) -> MemoryTransport | None:
        """The living agent that a card is of; None when that life of it is over."""
        agent = self._agents.get(card.name)
        return agent if agent is not None and agent.life == card.life else None


class MemoryTransfer(PostedTransfer):
    """A posted in-process transfer: its rows, how many were moved, and what to tell the peer afterwards."""

    __slots__ = ("card", "local", "notification", "num_moved", "remote")

    card: _Card
    local: NDArray[np.int64]
    remote: NDArray[np.int64]
    notification: bytes
    num_moved: int


class MemoryTransport:
    """An agent on a ``MemoryFabric``; implements ``Transport``. ``now_s``: clock of the transfers' durations."""

    def __init__(self, fabric: MemoryFabric, name: str, *, now_s: Callable[[], float] = clock.now_s) -> None:
        self._fabric = fabric
        self._name = name
        self._now_s = now_s
        self._spans: list[_Span] = []
        self._cards: dict[PeerName, _Card] = {}
        self._unreleased: dict[int, MemoryTransfer] = {}
        self._inbox: list[tuple[str, bytes]] = []
        self._is_closed = False
        self.life = mint("life")
        fabric.join(self)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"peers={len(self._cards)} unreleased={len(self._unreleased)}"
        return f"<MemoryTransport {self._name} {state}>"

    @property
    def name(self) -> str:
        """The agent's own unique name, as it appears in peers' notifications."""
        return self._name

    def register(self, spans: NDArray[np.int64], *, device: str, device_id: int) -> None:
        """Make memory usable by transfers; peers see it in metadata taken afterwards."""
        check_spans(spans)
        self._require_open()
        self._spans += [_Span(int(address), int(len_bytes), device, device_id) for address, len_bytes in spans]

    def metadata(self) -> bytes:
        """What a peer needs for ``add_peer``; call after ``register``."""
        self._require_open()
        return msgspec.msgpack.encode(_Card(self._name, self.life, tuple(self._spans)))

    def add_peer(self, metadata: bytes) -> PeerName:
        """Make a peer's registered memory addressable. Raises ``TransportError`` for bytes that are no metadata."""
        self._require_open()
        try:
            card = msgspec.msgpack.decode(metadata, type=_Card)
        except msgspec.DecodeError as error:
            raise TransportError(f"peer metadata of {len(metadata)} bytes: {error}") from error
        if card.name == self._name:
            raise TransportError("an agent is no peer of its own")
        peer = PeerName(card.name)
        self._cards[peer] = card
        return peer

    def remove_peer(self, peer: PeerName) -> None:
        """Forget a peer. Transfers to it that are pending fail, but ``release`` keeps them until they have ended."""
        self._require_open()
        self._cards.pop(peer, None)
        for transfer in self._unreleased.values():
            if transfer.peer == peer:
                transfer.finish(TransferStatus.FAILED, self._now_s(), "the peer was removed")

    def post(
        self,
        operation: Operation,
        peer: PeerName,
        local: NDArray[np.int64],
        remote: NDArray[np.int64],
        *,
        device: str,
        device_id: int,
        remote_device_id: int,
        notification: bytes = b"",
    ) -> MemoryTransfer:
        """Start a transfer. Raises ``PeerUnreachable`` for an unknown peer, ``TransferFailed`` for alien memory."""
        self._require_open()
        num_bytes = check_pairs(local, remote)
        card = self._card(peer)
        _require_registered(local, self._spans, device, device_id, self._name)
        _require_registered(remote, card.spans, device, remote_device_id, peer)
        transfer = MemoryTransfer(
            operation, peer, num_descriptors=len(local), num_bytes=num_bytes, posted_at_s=self._now_s()
        )
        transfer.card, transfer.local, transfer.remote = card, local.copy(), remote.copy()
        transfer.notification, transfer.num_moved = notification, 0
        self._unreleased[id(transfer)] = transfer
        transfer.post_s = self._now_s() - transfer.posted_at_s
        return transfer

    def poll(self, transfer: Transfer) -> TransferStatus:
        """Make progress and say how a transfer stands. A final status stays final."""
        assert isinstance(transfer, MemoryTransfer), transfer
        self._progress()
        return transfer.status

    def release(self, transfer: Transfer) -> bool:
        """Give a transfer's resources back. False: it is still touching memory; ask again later."""
        assert isinstance(transfer, MemoryTransfer), transfer
        if id(transfer) not in self._unreleased:
            return True
        if not transfer.is_ended:
            self._progress()
        if not transfer.is_ended:
            return False
        del self._unreleased[id(transfer)]
        return True

    def notify(self, peer: PeerName, notification: bytes) -> None:
        """Send a small message to a peer, at most once. Raises ``PeerUnreachable``."""
        self._require_open()
        card = self._card(peer)
        with self._fabric.lock:
            agent = self._fabric.find(card)
            if agent is None:
                raise PeerUnreachable(f"peer {peer} is gone")
            agent.deliver(self._name, notification)

    def take_notifications(self) -> list[tuple[str, bytes]]:
        """Make progress and return new (sender name, message) pairs, each exactly once."""
        self._require_open()
        self._progress()
        with self._fabric.lock:
            taken, self._inbox = self._inbox, []
        return taken

    def deliver(self, sender: str, notification: bytes) -> None:
        """Called by a peer agent, under the fabric's lock."""
        self._inbox.append((sender, notification))

    def close(self) -> None:
        """Leave the fabric; pending transfers fail, and nothing lands any more. Idempotent."""
        with self._fabric.lock:
            if self._is_closed:
                return
            self._is_closed = True
            for transfer in self._unreleased.values():
                transfer.finish(TransferStatus.FAILED, self._now_s(), "the transport was closed")
                transfer.is_ended = True
            self._unreleased.clear()
            self._cards.clear()
            self._spans.clear()
            self._fabric.leave(self)

    def _progress(self) -> None:
        with self._fabric.lock:
            for transfer in self._unreleased.values():
                if not transfer.is_ended:
                    self._advance(transfer)

    def _advance(self, transfer: MemoryTransfer) -> None:
        agent = self._fabric.find(transfer.card)
        if agent is None:
            transfer.is_ended = True
            transfer.finish(TransferStatus.FAILED, self._now_s(), f"peer {transfer.peer} is gone")
            return
        if self._fabric.is_stopped(transfer.peer):
            return
        num_rows = len(transfer.local)
        # Rounded up: at least one row a call, and the last call takes the rest.
        end = min(num_rows, transfer.num_moved - (-num_rows // self._fabric.num_steps))
        for row in range(transfer.num_moved, end):
            ours, theirs = int(transfer.local[row, 0]), int(transfer.remote[row, 0])
            target, source = (ours, theirs) if transfer.operation is Operation.READ else (theirs, ours)
            ctypes.memmove(target, source, int(transfer.local[row, 1]))
        transfer.num_moved = end
        if end < num_rows:
            return
        transfer.is_ended = True
        transfer.finish(TransferStatus.DONE, self._now_s())
        if transfer.notification:
            agent.deliver(self._name, transfer.notification)

    def _card(self, peer: PeerName) -> _Card:
        card = self._cards.get(peer)
        if card is None:
            raise PeerUnreachable(f"peer {peer} was never added, or is removed")
        return card

    def _require_open(self) -> None:
        if self._is_closed:
            raise LocalProtocolError(f"transport {self._name} is closed")


def _require_registered(
    rows: NDArray[np.int64], spans: Iterable[_Span], device: str, device_id: int, owner: str
) -> None:
    usable = sorted(
        (s.address, s.address + s.len_bytes) for s in spans if (s.device, s.device_id) == (device, device_id)
    )
    bounds = np.array(usable, dtype=np.int64).reshape(-1, 2)
    index = np.searchsorted(bounds[:, 0], rows[:, 0], side="right") - 1
    # Like NIXL, a row has to lie in one registered span; two that touch do not count as one.
    is_inside = (index >= 0) & (len(bounds) > 0)
    ends = bounds[index.clip(0), 1] if len(bounds) else np.zeros(len(rows), dtype=np.int64)
    is_inside &= rows.sum(axis=1) <= ends
    if not is_inside.all():
        row = int(np.argmin(is_inside))
        raise TransferFailed(
            f"{owner}: row {row} (address, length) = {rows[row].tolist()} is not registered {device} memory"
        )
