"""One registration in one of the holder's workers: writes what the source computes, chunk by chunk, and commits.

::

    WRITING <-> SETTLING
      |  |       |  |
      |  +-> FAILED |
      v        |    |
    COMMITTED  |    |
      |        v    v
      +------> CLOSED -> ENDED

A driver tells it what is computed and how its writes end, and posts the writes it hands out.

Invariants:

1. Nothing is handed out that is not computed in the source's present epoch.
2. Writes of two epochs are never under way at once: a late byte of an old epoch cannot overwrite one of the new.
3. A commit names exactly the writes of the present epoch, all of which have ended well by then.
4. After a commit, a failure or a close nothing is handed out; after a close nothing is committed.
5. ENDED means that no write is under way and none will be: a write counts from when it is handed out until the driver
   says that it touches no memory.

A source may restart while its old blocks are still being read, and overwrite them: what then arrives at the reader is
rubbish of an epoch that is never committed, in blocks that the reader still keeps for this registration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvshuttle.errors import LocalProtocolError
from kvshuttle.handoff.block_plan import NULL_BLOCK_ID, BlockPlan, plan_blocks
from kvshuttle.handoff.notifications import Commit, Fail, Notification, Written
from kvshuttle.handoff.outbox_states import OUTBOX_TRANSITIONS, OutboxState, OutboxTrigger

if TYPE_CHECKING:
    from kvshuttle.handoff.cards import WorkerCard
    from kvshuttle.handoff.orders import Close, Open


@dataclass(slots=True, eq=False)
class SourceBlocks:
    """What is computed of one source, as this worker knows it: blocks from absolute index 0 on."""

    source_id: str
    epoch: int = 0
    block_ids: list[int] = field(default_factory=list)
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class PostWrite:
    """Write ``plan`` to ``worker``, with ``notification`` attached; then report how it ends."""

    lease_id: str
    source_id: str
    plan: BlockPlan
    worker: WorkerCard
    notification: Written


@dataclass(frozen=True, slots=True)
class Notify:
    """Tell ``worker`` something. It is not awaited: a lost notification ends in the reader's deadline."""

    lease_id: str
    worker: WorkerCard
    notification: Notification


class Outbox:
    """``order``: what to write where. ``source``: shared with the writer, which keeps it up to date."""

    def __init__(self, order: Open, source: SourceBlocks) -> None:
        self.lease_id = order.lease_id
        self.worker = order.worker
        self.source = source
        self.state = OutboxState.WRITING
        self._registration_id = order.registration_id
        self._first_index = order.first_index
        # plan_blocks pairs by absolute index; what the reader has of its own is never a destination.
        self._destination = (NULL_BLOCK_ID,) * order.first_index + order.destination_block_ids
        self._epoch = source.epoch
        self._next_index = order.first_index
        self._num_writes = 0
        self._under_way: set[tuple[int, int]] = set()

    def __repr__(self) -> str:
        done, end = self._next_index, len(self._destination)
        return f"<Outbox {self.lease_id} {self.state.upper()} {done}/{end} under_way={len(self._under_way)}>"

    @property
    def has_work(self) -> bool:
        """Whether ``next_write`` has something."""
        computed = min(len(self.source.block_ids), len(self._destination))
        return self.state is OutboxState.WRITING and self._next_index < computed

    @property
    def is_settled(self) -> bool:
        """No write of an earlier epoch is under way."""
        return all(epoch == self._epoch for epoch, _ in self._under_way)

    def next_write(self, max_blocks: int) -> PostWrite | None:
        """The next blocks, at most so many. They are under way from here on."""
        if not self.has_work:
            return None
        end = min(len(self.source.block_ids), len(self._destination), self._next_index + max_blocks)
        plan = plan_blocks(
            source_block_ids=self.source.block_ids,
            destination_block_ids=self._destination,
            first_index=self._next_index,
            end_index=end,
        )
        self._move(OutboxTrigger.SUBMITTED)
        written = Written(self._registration_id, self._epoch, self._num_writes, plan.num_blocks)
        self._under_way.add((self._epoch, self._num_writes))
        self._next_index = end
        self._num_writes += 1
        return PostWrite(self.lease_id, self.source.source_id, plan, self.worker, written)

    def on_progress(self) -> tuple[Notify, ...]:
        """The source has more blocks, or its last."""
        return self._commit_if_complete()

    def on_restarted(self) -> None:
        """The source has begun a new epoch: what was written before does not count."""
        self._move(OutboxTrigger.RESTARTED_UNDER_WAY if self._under_way else OutboxTrigger.RESTARTED)
        self._epoch = self.source.epoch
        self._next_index, self._num_writes = self._first_index, 0

    def on_write_failed(self, write: PostWrite) -> tuple[Notify, ...]:
        """The write will not succeed, but may still touch memory. ``on_write_ended`` follows."""
        if _key(write) not in self._under_way:
            return ()
        return self._fail()

    def on_write_ended(self, write: PostWrite, *, is_ok: bool) -> tuple[Notify, ...]:
        """The write touches no memory any more."""
        if _key(write) not in self._under_way:
            return ()
        self._under_way.remove(_key(write))
        actions = () if is_ok else self._fail()
        self._move(OutboxTrigger.WRITE_ENDED)
        if self.state is OutboxState.SETTLING and self.is_settled:
            self._move(OutboxTrigger.SETTLED)
        self._end_if_drained()
        return (*actions, *self._commit_if_complete())

    def close(self, order: Close) -> tuple[Notify, ...]:
        """Stop, and tell the reader why unless it asked for it."""
        is_told = self.state in (OutboxState.COMMITTED, OutboxState.FAILED) or not order.reason
        self._move(OutboxTrigger.CLOSED)
        self._end_if_drained()
        return () if is_told else (self._notify(Fail(self._registration_id, order.reason)),)

    def _commit_if_complete(self) -> tuple[Notify, ...]:
        is_complete = self.source.is_final and self._next_index == len(self._destination) and not self._under_way
        if self.state is not OutboxState.WRITING or not is_complete:
            return ()
        self._move(OutboxTrigger.ALL_WRITTEN)
        num_blocks = len(self._destination) - self._first_index
        return (self._notify(Commit(self._registration_id, self._epoch, self._num_writes, num_blocks)),)

    def _fail(self) -> tuple[Notify, ...]:
        is_news = self.state in (OutboxState.WRITING, OutboxState.SETTLING)
        self._move(OutboxTrigger.WRITE_FAILED)
        return (self._notify(Fail(self._registration_id, "write_failed")),) if is_news else ()

    def _end_if_drained(self) -> None:
        if self.state is OutboxState.CLOSED and not self._under_way:
            self._move(OutboxTrigger.DRAINED)

    def _notify(self, notification: Notification) -> Notify:
        return Notify(self.lease_id, self.worker, notification)

    def _move(self, trigger: OutboxTrigger) -> None:
        state = OUTBOX_TRANSITIONS.get((self.state, trigger))
        if state is None:
            raise LocalProtocolError(f"{self!r} does not allow {trigger}")
        self.state = state


def _key(write: PostWrite) -> tuple[int, int]:
    return write.notification.epoch, write.notification.sequence
