"""All pushes of one of the holder's workers: sources and outboxes joined in either order, and whose turn it is.

Fair and bounded: outboxes take turns, each with a few blocks, and only so many writes to one peer are under way at a
time, so that a slow reader delays nobody else; those that have failed do not count. The driver asks for the next write
when it has room for one.

A source is known from its first progress until the scheduler half says that it is over; an outbox from its ``Open``
until it is closed and drained. Progress of an epoch that has passed is ignored: a step's results may come later than
the news that its blocks are gone.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvshuttle.errors import LocalProtocolError
from kvshuttle.handoff.orders import Open, OrderCursor, Orders, OrdersTaken
from kvshuttle.handoff.outbox import Notify, Outbox, PostWrite, SourceBlocks
from kvshuttle.handoff.outbox_states import OutboxState
from kvshuttle.handoff.progress import Progress, Restarted

if TYPE_CHECKING:
    from kvshuttle.handoff.notifications import Written
    from kvshuttle.handoff.orders import Order

MAX_WRITES_PER_PEER = 4
"""Enough to post the next while the last is on the wire; a peer that does not take them holds no more than that."""
MAX_BLOCKS_PER_WRITE = 64


class PushWriter:
    """``max_writes_per_peer``, ``max_blocks_per_write``: bounds of what is under way and of one turn."""

    def __init__(
        self, *, max_writes_per_peer: int = MAX_WRITES_PER_PEER, max_blocks_per_write: int = MAX_BLOCKS_PER_WRITE
    ) -> None:
        self._max_writes_per_peer = max_writes_per_peer
        self._max_blocks_per_write = max_blocks_per_write
        self._cursor = OrderCursor()
        self._sources: dict[str, SourceBlocks] = {}
        self._outboxes: dict[str, Outbox] = {}
        self._turns: dict[str, None] = {}
        self._num_under_way: Counter[str] = Counter()
        self._failed: set[tuple[str, Written]] = set()

    def __repr__(self) -> str:
        under_way = self._num_under_way.total()
        return f"<PushWriter sources={len(self._sources)} outboxes={len(self._outboxes)} {under_way=}>"

    def take_orders(self, message: Orders) -> tuple[OrdersTaken, tuple[Notify, ...]]:
        """Do the orders that are next; the answer for the scheduler half, and what to tell readers."""
        actions: list[Notify] = []
        for order in self._cursor.take(message):
            actions += self._do(order)
        undrained = tuple(box.lease_id for box in self._outboxes.values() if box.state is OutboxState.CLOSED)
        return OrdersTaken(self._cursor.next, undrained), tuple(actions)

    def on_source(self, fact: Progress | Restarted) -> tuple[Notify, ...]:
        """A source has computed more, which is true already, or has lost what it had, which is true from now on.

        Raises ``LocalProtocolError`` when progress leaves a gap.
        """
        source = self._sources.get(fact.source_id)
        if source is None:
            source = self._sources[fact.source_id] = SourceBlocks(fact.source_id, epoch=fact.epoch)
        if fact.epoch < source.epoch:
            return ()
        if fact.epoch > source.epoch:
            source.epoch, source.is_final = fact.epoch, False
            source.block_ids.clear()
            for box in self._boxes_of(source):
                box.on_restarted()
        return self._on_progress(source, fact) if isinstance(fact, Progress) else ()

    def forget_source(self, source_id: str) -> None:
        """A source is over: nobody will be written from it any more."""
        self._sources.pop(source_id, None)

    def next_write(self) -> PostWrite | None:
        """A write that may be posted now; None when there is nothing to write, or its peers have enough under way."""
        for lease_id in tuple(self._turns):
            box = self._outboxes.get(lease_id)
            if box is None or not box.has_work:
                del self._turns[lease_id]
            elif self._num_promising(box.worker.address) < self._max_writes_per_peer:
                # To the end of the queue.
                del self._turns[lease_id]
                self._turns[lease_id] = None
                self._num_under_way[box.worker.address] += 1
                return box.next_write(self._max_blocks_per_write)
        return None

    def on_write_failed(self, write: PostWrite) -> tuple[Notify, ...]:
        """A write will not succeed, but may still touch memory. ``on_write_ended`` follows."""
        self._failed.add((write.worker.address, write.notification))
        return self._outboxes[write.lease_id].on_write_failed(write)

    def on_write_ended(self, write: PostWrite, *, is_ok: bool) -> tuple[Notify, ...]:
        """A write touches no memory any more. To be told once for each write that was handed out."""
        self._num_under_way[write.worker.address] -= 1
        if not self._num_under_way[write.worker.address]:
            del self._num_under_way[write.worker.address]
        self._failed.discard((write.worker.address, write.notification))
        box = self._outboxes[write.lease_id]
        actions = box.on_write_ended(write, is_ok=is_ok)
        self._look_at(box)
        return actions

    def is_settled(self, source_id: str) -> bool:
        """No write reads blocks that the source has lost."""
        source = self._sources.get(source_id)
        return source is None or all(box.is_settled for box in self._boxes_of(source))

    @property
    def num_under_way(self) -> int:
        """Writes that may touch memory."""
        return self._num_under_way.total()

    @property
    def is_drained(self) -> bool:
        """No source, no outbox, nothing under way."""
        return not (self._sources or self._outboxes or self._num_under_way)

    def _num_promising(self, address: str) -> int:
        return self._num_under_way[address] - sum(1 for failed, _ in self._failed if failed == address)

    def _do(self, order: Order) -> tuple[Notify, ...]:
        if isinstance(order, Open):
            source = self._sources.get(order.source_id)
            if source is None:
                source = self._sources[order.source_id] = SourceBlocks(order.source_id)
            box = self._outboxes[order.lease_id] = Outbox(order, source)
            self._look_at(box)
            return box.on_progress()
        box = self._outboxes[order.lease_id]
        actions = box.close(order)
        self._look_at(box)
        return actions

    def _on_progress(self, source: SourceBlocks, progress: Progress) -> tuple[Notify, ...]:
        if progress.first_index != len(source.block_ids):
            raise LocalProtocolError(f"{source!r} goes on at index {progress.first_index}")
        source.block_ids += progress.block_ids
        source.is_final = progress.is_final
        actions: list[Notify] = []
        for box in self._boxes_of(source):
            actions += box.on_progress()
            self._look_at(box)
        return tuple(actions)

    def _boxes_of(self, source: SourceBlocks) -> list[Outbox]:
        return [box for box in self._outboxes.values() if box.source is source]

    def _look_at(self, box: Outbox) -> None:
        if box.state is OutboxState.ENDED:
            del self._outboxes[box.lease_id]
        elif box.has_work:
            self._turns.setdefault(box.lease_id)
