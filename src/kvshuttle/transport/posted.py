"""The record of a posted transfer that the real and the in-process transport share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.transport import TransferStatus

if TYPE_CHECKING:
    from kvshuttle.transport import Operation, PeerName


class PostedTransfer:
    """One posted transfer and what it cost.

    ``posted_at_s``: instant just before posting. ``post_s``: seconds spent in ``post``; UCX copies within a host right
    there, so it may be the whole transfer. ``wire_s``: seconds from ``posted_at_s`` until a final status was seen, or
    None while pending. ``error``: why it failed, or "". ``is_ended``: it cannot touch memory any more, which may come
    later than a final status.
    """

    __slots__ = (
        "error",
        "is_ended",
        "num_bytes",
        "num_descriptors",
        "operation",
        "peer",
        "post_s",
        "posted_at_s",
        "status",
        "wire_s",
    )

    def __init__(
        self, operation: Operation, peer: PeerName, *, num_descriptors: int, num_bytes: int, posted_at_s: float
    ) -> None:
        self.operation = operation
        self.peer = peer
        self.num_descriptors = num_descriptors
        self.num_bytes = num_bytes
        self.posted_at_s = posted_at_s
        self.post_s = 0.0
        self.wire_s: float | None = None
        self.status = TransferStatus.PENDING
        self.error = ""
        self.is_ended = False

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.operation.value} {self.peer} descriptors={self.num_descriptors}"
            f" bytes={self.num_bytes} {self.status.value}{'' if self.is_ended else ' unended'}"
            f"{f' error={self.error!r}' if self.error else ''}>"
        )

    def finish(self, status: TransferStatus, now_s: float, error: str = "") -> None:
        """Take on a final status, unless there is one already."""
        assert status is not TransferStatus.PENDING
        if self.status is TransferStatus.PENDING:
            self.status = status
            self.error = error
            self.wire_s = now_s - self.posted_at_s
