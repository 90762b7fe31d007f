"""Orders of a scheduler half to one of its workers: each is done once and in order, whatever the link does to messages.

Go-back-N. The sender numbers its orders and keeps sending from the first that was not taken; the worker does exactly
the order that is next and ignores the rest, and says with each answer how far it is. So an order that comes late or
twice does nothing: above all, no worker opens again what it has closed.

The same answers tell which closed leases still have writes under way. An answer is true for ever in this: a lease
whose ``Close`` was done and which is not in ``undrained`` has nothing under way and never will, however late the
answer arrives.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import islice

import msgspec

from kvshuttle.handoff.cards import WorkerCard

FIRST_ASK_S = 0.02
"""How soon a worker is asked again while something is owed; doubled each time it gives no answer."""
SLOWEST_ASK_S = 1.0
_MAX_ORDERS_AT_ONCE = 64


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Order to a worker: write what ``source_id`` computes to this rank's ``worker`` of the reader.

    ``destination_block_ids[i]`` is for absolute block index ``first_index + i``.
    """

    lease_id: str
    registration_id: str
    source_id: str
    first_index: int
    destination_block_ids: tuple[int, ...]
    worker: WorkerCard


class Close(msgspec.Struct, frozen=True, tag="close"):
    """Order to a worker: submit and commit nothing more. ``reason``: what to tell the reader; "" for nothing."""

    lease_id: str
    reason: str = ""


Order = Open | Close


class Orders(msgspec.Struct, frozen=True, tag="orders"):
    """A scheduler half to its own worker: orders number ``first`` and following. None of them: how are you?"""

    first: int
    orders: tuple[Open | Close, ...]


class OrdersTaken(msgspec.Struct, frozen=True, tag="orders_taken"):
    """Every order before number ``next`` is done. ``undrained``: closed leases whose writes are still under way."""

    next: int
    undrained: tuple[str, ...]


class OrderLog:
    """The sender's end, for one worker."""

    def __init__(self) -> None:
        self._first = 0
        self._waiting: deque[Order] = deque()
        self._num_sent = 0
        self._closing: dict[str, int] = {}
        self._asked_at_s = -math.inf
        self._ask_again_s = FIRST_ASK_S

    def __repr__(self) -> str:
        return f"<OrderLog next={self._first} waiting={len(self._waiting)} closing={len(self._closing)}>"

    def append(self, order: Order) -> None:
        """Have an order done, after all earlier ones."""
        if isinstance(order, Close):
            self._closing[order.lease_id] = self._first + len(self._waiting)
        self._waiting.append(order)

    def due(self, now_s: float) -> Orders | None:
        """What to send now; None when there is nothing new and nobody to be asked again yet."""
        if not self._has_news:
            due_at_s = self.next_due_at_s()
            if due_at_s is None or now_s < due_at_s:
                return None
            self._ask_again_s = min(self._ask_again_s * 2, SLOWEST_ASK_S)
        orders = tuple(islice(self._waiting, _MAX_ORDERS_AT_ONCE))
        self._num_sent = max(self._num_sent, len(orders))
        self._asked_at_s = now_s
        return Orders(self._first, orders)

    def on_taken(self, message: OrdersTaken) -> tuple[str, ...]:
        """Take an answer in. Returns the leases that turn out to be drained on this worker, each once."""
        num_done = min(message.next - self._first, len(self._waiting))
        for _ in range(num_done):
            self._waiting.popleft()
        if num_done > 0:
            self._first += num_done
            self._num_sent = max(0, self._num_sent - num_done)
            self._ask_again_s = FIRST_ASK_S
        drained = tuple(
            lease_id
            for lease_id, number in self._closing.items()
            if number < message.next and lease_id not in message.undrained
        )
        for lease_id in drained:
            del self._closing[lease_id]
        return drained

    def next_due_at_s(self) -> float | None:
        """When ``due`` next has something; None when nothing is owed."""
        if self._has_news:
            return -math.inf
        return self._asked_at_s + self._ask_again_s if self._waiting or self._closing else None

    @property
    def is_drained(self) -> bool:
        """Every order is done, and everything closed is drained."""
        return not (self._waiting or self._closing)

    @property
    def _has_news(self) -> bool:
        return self._num_sent < min(len(self._waiting), _MAX_ORDERS_AT_ONCE)


class OrderCursor:
    """The worker's end."""

    def __init__(self) -> None:
        self.next = 0

    def take(self, message: Orders) -> tuple[Order, ...]:
        """The orders to do now: those of ``message`` that are next."""
        num_known = self.next - message.first
        if num_known < 0:
            return ()
        orders = message.orders[num_known:]
        self.next += len(orders)
        return orders
