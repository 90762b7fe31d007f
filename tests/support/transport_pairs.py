"""Pairs of connected transports, each with a buffer of registered memory, for the transport contract."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvshuttle.ids import mint
from kvshuttle.transport import Operation, TransferStatus
from kvshuttle.transport.faulty import Faults, FaultyTransport
from kvshuttle.transport.memory import MemoryFabric, MemoryTransport

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvshuttle.transport import PeerName, Transfer, Transport

MIB = 1024 * 1024
LIMIT_S = 30.0
"""Far beyond any transfer here; a test that gets there has failed."""


@dataclass
class Side:
    """One agent and its memory."""

    transport: Transport
    buffer: NDArray[np.uint8]

    @property
    def address(self) -> int:
        return self.buffer.ctypes.data

    def spans(self, *offsets_and_lengths: tuple[int, int]) -> NDArray[np.int64]:
        """Rows over this side's buffer."""
        return np.array([(self.address + offset, length) for offset, length in offsets_and_lengths], dtype=np.int64)


@dataclass
class Pair:
    """``reader`` knows ``holder`` as ``peer``; both registered their whole buffer.

    ``received``: what the holder was told so far.
    """

    reader: Side
    holder: Side
    peer: PeerName
    received: list[tuple[str, bytes]] = field(default_factory=list)

    def post(
        self,
        local: NDArray[np.int64],
        remote: NDArray[np.int64],
        operation: Operation = Operation.READ,
        notification: bytes = b"",
    ) -> Transfer:
        return self.reader.transport.post(
            operation,
            self.peer,
            local,
            remote,
            device="DRAM",
            device_id=0,
            remote_device_id=0,
            notification=notification,
        )

    def turn(self) -> None:
        """The holder's share of the progress."""
        self.received += self.holder.transport.take_notifications()

    def finish(self, transfer: Transfer) -> TransferStatus:
        """Poll both ends until the transfer has a final status."""
        self.wait_for(lambda: self.reader.transport.poll(transfer) is not TransferStatus.PENDING)
        return self.reader.transport.poll(transfer)

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Let both ends make progress until something is so."""
        deadline_at_s = time.monotonic() + LIMIT_S
        while not is_so():
            assert time.monotonic() < deadline_at_s, f"waited {LIMIT_S:g} s in vain: {self}"
            self.turn()

    def settle(self) -> None:
        """Give what might still come the time to come."""
        for _ in range(200):
            self.reader.transport.take_notifications()
            self.turn()


def connected(make: Callable[[str], Transport], *, size_bytes: int = MIB) -> Pair:
    """Two agents with random content in their buffers."""
    random_bytes = np.random.default_rng(1)
    sides = []
    for name in ("reader", "holder"):
        side = Side(make(name), random_bytes.integers(0, 256, size_bytes, dtype=np.uint8))
        side.transport.register(side.spans((0, size_bytes)), device="DRAM", device_id=0)
        sides.append(side)
    reader, holder = sides
    return Pair(reader, holder, reader.transport.add_peer(holder.transport.metadata()))


def memory_maker() -> Callable[[str], Transport]:
    """Makes agents on one fresh fabric."""
    fabric = MemoryFabric()
    return lambda name: MemoryTransport(fabric, name)


def faultless_maker() -> Callable[[str], Transport]:
    """The same behind the fault wrapper, which then must not show."""
    inner = memory_maker()
    return lambda name: FaultyTransport(inner(name), faults=Faults(), rng=random.Random(0))


def nixl_maker() -> Callable[[str], Transport]:
    """Makes NIXL agents with unique names, since names are seen by every agent of the process."""
    from kvshuttle.transport.nixl import NixlTransport

    return lambda name: NixlTransport(name=mint(name))
