"""A seeded fault wrapper over any transport: what the network may do to us, on purpose and repeatably."""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.errors import ConfigError, TransferFailed
from kvshuttle.transport import Operation, PeerName, Transfer, TransferStatus, Transport
from kvshuttle.transport.spans import check_pairs

if TYPE_CHECKING:
    import random

    import numpy as np
    from numpy.typing import NDArray

_MAX_TRACE = 100_000


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities from 0 to 1, except ``delay_polls_max``. All zero: the wrapper changes nothing.

    ``fail_post``: ``post`` raises. ``fail_transfer``: the bytes arrive, but the transfer is reported FAILED.
    ``half_write``: only the first half of the rows arrives (of the bytes, when there is one row), then FAILED.
    ``keep_release``: one ``release`` of an ended transfer says False. ``drop_notification``,
    ``duplicate_notification``, ``reorder_notifications``: as received. ``delay_polls_max``: how many polls a
    final status, and how many takes a notification, may be late.
    """

    fail_post: float = 0.0
    fail_transfer: float = 0.0
    half_write: float = 0.0
    keep_release: float = 0.0
    drop_notification: float = 0.0
    duplicate_notification: float = 0.0
    reorder_notifications: float = 0.0
    delay_polls_max: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            limit = 1.0 if field.name != "delay_polls_max" else float("inf")
            if not 0 <= value <= limit:
                raise ConfigError(f"faults: {field.name} is {value}, not between 0 and {limit:g}")


class FaultyTransfer:
    """A transfer of the wrapped transport, and the fate drawn for it."""

    __slots__ = ("_num_descriptors", "index", "inner", "is_doomed", "num_bytes", "num_late_polls")

    def __init__(self, index: int, inner: Transfer, num_descriptors: int, num_bytes: int) -> None:
        self.index = index
        self.inner = inner
        self._num_descriptors = num_descriptors
        self.num_bytes = num_bytes
        self.is_doomed = False
        self.num_late_polls = 0

    def __repr__(self) -> str:
        return f"<FaultyTransfer #{self.index}{' doomed' if self.is_doomed else ''} {self.inner!r}>"

    @property
    def num_descriptors(self) -> int:
        """Rows handed to ``post``."""
        return self._num_descriptors

    @property
    def posted_at_s(self) -> float:
        """Instant just before posting."""
        return self.inner.posted_at_s

    @property
    def post_s(self) -> float:
        """Seconds spent in ``post``."""
        return self.inner.post_s

    @property
    def wire_s(self) -> float | None:
        """Seconds until the wrapped transport saw a final status."""
        return self.inner.wire_s

    @property
    def error(self) -> str:
        """Why it failed, or ""."""
        return self.inner.error or ("injected" if self.is_doomed else "")


class FaultyTransport:
    """Wraps a transport and injects ``faults``, drawn from ``rng``: the same seed and calls give the same ``trace``."""

    def __init__(self, inner: Transport, *, faults: Faults, rng: random.Random) -> None:
        self._inner = inner
        self._faults = faults
        self._rng = rng
        self._num_posts = 0
        self._num_takes = 0
        self._held: list[tuple[int, str, bytes]] = []
        self.trace: deque[str] = deque(maxlen=_MAX_TRACE)

    def __repr__(self) -> str:
        return f"<FaultyTransport faults={len(self.trace)} over {self._inner!r}>"

    @property
    def name(self) -> str:
        """The wrapped agent's name."""
        return self._inner.name

    def register(self, spans: NDArray[np.int64], *, device: str, device_id: int) -> None:
        """As the wrapped transport."""
        self._inner.register(spans, device=device, device_id=device_id)

    def metadata(self) -> bytes:
        """As the wrapped transport."""
        return self._inner.metadata()

    def add_peer(self, metadata: bytes) -> PeerName:
        """As the wrapped transport."""
        return self._inner.add_peer(metadata)

    def remove_peer(self, peer: PeerName) -> None:
        """As the wrapped transport."""
        self._inner.remove_peer(peer)

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
    ) -> FaultyTransfer:
        """Start a transfer, or raise an injected ``TransferFailed``."""
        self._num_posts += 1
        index = self._num_posts
        # All drawn before any is used, so that one fault does not shift the fate of what follows.
        is_refused = self._draw(self._faults.fail_post)
        is_halved = self._draw(self._faults.half_write)
        is_doomed = self._draw(self._faults.fail_transfer) or is_halved
        num_late_polls = self._rng.randint(0, self._faults.delay_polls_max)
        if is_refused:
            self._note(f"post #{index} refused")
            raise TransferFailed(f"injected: post #{index}")
        num_descriptors, num_bytes = len(local), check_pairs(local, remote)
        if is_halved:
            local, remote = _first_half(local), _first_half(remote)
        inner = self._inner.post(
            operation,
            peer,
            local,
            remote,
            device=device,
            device_id=device_id,
            remote_device_id=remote_device_id,
            # A transfer that is reported failed must not announce itself at the peer.
            notification=b"" if is_doomed else notification,
        )
        transfer = FaultyTransfer(index, inner, num_descriptors, num_bytes)
        transfer.is_doomed = is_doomed
        transfer.num_late_polls = num_late_polls
        if is_doomed or num_late_polls:
            fate = "half" if is_halved else "fail" if is_doomed else "late"
            self._note(f"post #{index} {fate}, {num_late_polls} polls late")
        return transfer

    def poll(self, transfer: Transfer) -> TransferStatus:
        """Make progress and say how a transfer stands, as late and as bad as was drawn for it."""
        assert isinstance(transfer, FaultyTransfer), transfer
        status = self._inner.poll(transfer.inner)
        if status is TransferStatus.PENDING:
            return status
        if transfer.num_late_polls:
            transfer.num_late_polls -= 1
            return TransferStatus.PENDING
        return TransferStatus.FAILED if transfer.is_doomed else status

    def release(self, transfer: Transfer) -> bool:
        """As the wrapped transport, but False while the transfer is reported pending, and sometimes once more."""
        assert isinstance(transfer, FaultyTransfer), transfer
        if self.poll(transfer) is TransferStatus.PENDING:
            return False
        if self._draw(self._faults.keep_release):
            self._note(f"release #{transfer.index} kept")
            return False
        return self._inner.release(transfer.inner)

    def notify(self, peer: PeerName, notification: bytes) -> None:
        """As the wrapped transport; loss happens at the receiver."""
        self._inner.notify(peer, notification)

    def take_notifications(self) -> list[tuple[str, bytes]]:
        """New notifications, less those dropped, twice those duplicated, some late and out of order."""
        self._num_takes += 1
        for sender, message in self._inner.take_notifications():
            is_dropped = self._draw(self._faults.drop_notification)
            num_copies = 1 + self._draw(self._faults.duplicate_notification)
            if is_dropped or num_copies > 1:
                self._note(f"take #{self._num_takes} {'drop' if is_dropped else 'duplicate'} from {sender}")
            for _ in range(0 if is_dropped else num_copies):
                due = self._num_takes + self._rng.randint(0, self._faults.delay_polls_max)
                self._held.append((due, sender, message))
        taken = [(sender, message) for due, sender, message in self._held if due <= self._num_takes]
        self._held = [held for held in self._held if held[0] > self._num_takes]
        if len(taken) > 1 and self._draw(self._faults.reorder_notifications):
            self._note(f"take #{self._num_takes} reorder {len(taken)}")
            self._rng.shuffle(taken)
        return taken

    def close(self) -> None:
        """As the wrapped transport."""
        self._inner.close()

    def _draw(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _note(self, event: str) -> None:
        self.trace.append(event)


def _first_half(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    if len(rows) > 1:
        return rows[: len(rows) // 2]
    half = rows.copy()
    half[0, 1] = max(1, half[0, 1] // 2)
    return half
