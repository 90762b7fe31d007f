"""A transport that does what the test says: when transfers end, how, and when they let go of memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvshuttle.transport import Operation, PeerName, TransferStatus

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(eq=False)
class ScriptedTransfer:
    """``status`` and ``is_releasable`` are the test's to set; an exception as status is raised by ``poll``."""

    peer: PeerName
    local: NDArray[np.int64]
    remote: NDArray[np.int64]
    status: TransferStatus | Exception = TransferStatus.PENDING
    is_releasable: bool = True
    is_released: bool = False
    post_s: float = 0.0
    posted_at_s: float = 0.0
    wire_s: float | None = None
    error: str = ""

    @property
    def num_descriptors(self) -> int:
        return len(self.local)

    @property
    def num_bytes(self) -> int:
        return int(self.local[:, 1].sum())


@dataclass(eq=False)
class ScriptedTransport:
    """``failures``: what the named methods raise. ``calls``: what was called, in order."""

    name: str = "scripted"
    failures: dict[str, Exception] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    transfers: list[ScriptedTransfer] = field(default_factory=list)
    notes: list[bytes] = field(default_factory=list)
    is_closed: bool = False

    def register(self, spans: NDArray[np.int64], *, device: str, device_id: int) -> None:
        self._call("register")

    def metadata(self) -> bytes:
        self._call("metadata")
        return b"scripted"

    def add_peer(self, metadata: bytes) -> PeerName:
        self._call("add_peer")
        return PeerName(metadata.decode())

    def remove_peer(self, peer: PeerName) -> None:
        self._call("remove_peer")

    def post(
        self, operation: Operation, peer: PeerName, local: NDArray[np.int64], remote: NDArray[np.int64], **_: Any
    ) -> ScriptedTransfer:
        self._call("post")
        self.transfers.append(ScriptedTransfer(peer, local, remote))
        return self.transfers[-1]

    def poll(self, transfer: ScriptedTransfer) -> TransferStatus:
        if isinstance(transfer.status, Exception):
            raise transfer.status
        return transfer.status

    def release(self, transfer: ScriptedTransfer) -> bool:
        self._call("release")
        transfer.is_released = transfer.is_releasable
        return transfer.is_releasable

    def notify(self, peer: PeerName, notification: bytes) -> None:
        self._call("notify")
        self.notes.append(notification)

    def take_notifications(self) -> list[tuple[str, bytes]]:
        self._call("take_notifications")
        return []

    def close(self) -> None:
        self._call("close")
        self.is_closed = True

    def _call(self, method: str) -> None:
        if method != "take_notifications":
            self.calls.append(method)
        if method in self.failures:
            raise self.failures[method]
