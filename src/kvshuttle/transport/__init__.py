"""Moves bytes between registered memories, and knows no protocol.

One thread owns a transport: none of its methods may be called from two threads. ``memory`` is the verified
in-process fake, ``nixl`` the real one, ``faulty`` a seeded wrapper over either; ``tests/contract`` runs one suite
over all of them.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NewType, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PeerName = NewType("PeerName", str)
"""A peer agent as this transport knows it, returned by ``add_peer``."""


class Operation(Enum):
    """Direction of a one-sided transfer, as seen by the side that posts it."""

    READ = "READ"
    WRITE = "WRITE"


class TransferStatus(Enum):
    """State of a posted transfer. DONE and FAILED are final."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Transfer(Protocol):
    """A posted transfer: what it is and what it cost. ``repr`` is short and made for logs."""

    @property
    def num_descriptors(self) -> int:
        """Rows handed to ``post``."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes to move."""
        ...

    @property
    def posted_at_s(self) -> float:
        """Instant just before posting, on the transport's clock."""
        ...

    @property
    def post_s(self) -> float:
        """Seconds spent in ``post``."""
        ...

    @property
    def wire_s(self) -> float | None:
        """Seconds from ``posted_at_s`` until a final status was seen; None while pending."""
        ...

    @property
    def error(self) -> str:
        """Why it failed, or ""."""
        ...


class Transport(Protocol):
    """One agent: registered memory, peers, one-sided transfers and small notifications.

    Spans are ``int64`` arrays of shape (n, 2): address, length in bytes. Every method raises
    ``TransportError`` (or a subclass) when the outside world fails, ``LocalProtocolError`` on misuse.
    """

    @property
    def name(self) -> str:
        """The agent's own unique name, as it appears in peers' notifications."""
        ...

    def register(self, spans: NDArray[np.int64], *, device: str, device_id: int) -> None:
        """Make memory usable by transfers. ``device``: "DRAM" or "VRAM"."""
        ...

    def metadata(self) -> bytes:
        """What a peer needs for ``add_peer``; call after ``register``."""
        ...

    def add_peer(self, metadata: bytes) -> PeerName:
        """Make a peer's registered memory addressable. Adding the same agent twice is harmless."""
        ...

    def remove_peer(self, peer: PeerName) -> None:
        """Forget a peer. Unknown peers are ignored.

        Transfers to it that are still pending fail at once, but may touch memory until ``release`` says otherwise.
        """
        ...

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
    ) -> Transfer:
        """Start moving ``local[i]`` <-> ``remote[i]`` (equal shapes and lengths, at least one row).

        The notification, when not empty, reaches the peer after all bytes of the transfer have landed.
        """
        ...

    def poll(self, transfer: Transfer) -> TransferStatus:
        """Make progress and say how a transfer stands. A final status stays final."""
        ...

    def release(self, transfer: Transfer) -> bool:
        """Give a transfer's resources back. False: it is still touching memory; ask again later."""
        ...

    def notify(self, peer: PeerName, notification: bytes) -> None:
        """Send a small message to a peer, at most once."""
        ...

    def take_notifications(self) -> list[tuple[str, bytes]]:
        """Make progress and return new (sender name, message) pairs, each exactly once."""
        ...

    def close(self) -> None:
        """Deregister and forget everything. Idempotent."""
        ...
