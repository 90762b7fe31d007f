"""``PushPair``: both engines of a push, a link that may lose, double, delay and reorder, and memories with content.

Everything happens in one simulated world time; each engine sees it through its own clock. A block contains, on each
rank, the name of everything up to its end; returning a block to a pool scribbles over it at once; a write copies what
is there when it gets to the block, into whatever the destination is by then. So a wrong commit, a block reused too
early on either side, a late write: all end in wrong content or in somebody else's block. The checks here share no code
with the machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.handoff import (
    EARLY_LIFE_S,
    Commit,
    IntakeState,
    Notification,
    Notify,
    Orders,
    OrdersTaken,
    Peer,
    PushLimits,
    SourceDead,
)
from support.handoff_values import LIMITS, block_contents
from support.holder_engine import Clock
from support.push_decode import Decode, DecodeEngine
from support.push_pool import right_content
from support.push_prefill import PrefillEngine, PrefillRank, Write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvshuttle.handoff import Offer
    from kvshuttle.ids import Handle
    from support.push_prefill import Answer, Question

HOLDER_CLOCK = Clock()
READER_CLOCK = Clock(offset_s=1000.0)
PUSH_LIMITS = PushLimits(fetch=LIMITS, push_timeout_s=8.0, confirm_timeout_s=2.0)


@dataclass(frozen=True)
class Envelope:
    """A message on its way to the holder, or (with ``reply``) back to the request that asked."""

    reader_life: int
    request: Decode
    question: Question
    ordinal: int = 0
    reply: Answer | None = None


@dataclass(frozen=True)
class Note:
    """A notification on its way to one rank of one life of the reader."""

    address: str
    rank: int
    notification: Notification


class PushPair:
    """``holder`` is None while it is dead. A stopped engine does nothing; what it has posted may still land."""

    def __init__(
        self,
        *,
        num_ranks: int = 1,
        num_blocks: int = 12,
        holder_clock: Clock = HOLDER_CLOCK,
        reader_clock: Clock = READER_CLOCK,
        limits: PushLimits = PUSH_LIMITS,
    ) -> None:
        self.world_s = 0.0
        self.limits = limits
        self.num_ranks, self.num_blocks = num_ranks, num_blocks
        self.holder_clock, self.reader_clock = holder_clock, reader_clock
        self.link: list[Envelope] = []
        self.order_link: list[tuple[int, int, Orders | OrdersTaken]] = []
        self.notes: list[Note] = []
        self.holder_life = self.reader_life = 0
        self.is_holder_stopped = False
        self.is_reader_stopped = False
        self.holder: PrefillEngine | None = None
        self.restart_holder()
        self.restart_reader()

    # -- lives and time ----------------------------------------------------------------------------

    @property
    def holder_now_s(self) -> float:
        return self.holder_clock.at(self.world_s)

    @property
    def reader_now_s(self) -> float:
        return self.reader_clock.at(self.world_s)

    @property
    def running_holder(self) -> PrefillEngine | None:
        return None if self.is_holder_stopped else self.holder

    def kill_holder(self) -> None:
        """Its memory, its writes and its books are gone; what it has sent is not."""
        self.holder = None
        self.is_holder_stopped = False

    def restart_holder(self) -> None:
        self.kill_holder()
        self.holder_life += 1
        self.holder = PrefillEngine(self, self.holder_life, num_blocks=self.num_blocks, num_ranks=self.num_ranks)

    def restart_reader(self) -> None:
        self.is_reader_stopped = False
        self.reader_life += 1
        self.reader = DecodeEngine(self, self.reader_life, num_blocks=self.num_blocks, num_ranks=self.num_ranks)

    def advance(self, duration_s: float) -> None:
        self.world_s += duration_s

    def next_deadlines(self) -> list[float]:
        """World times at which some machine next has something to do, soonest first."""
        deadlines = []
        if self.holder is not None:
            at_s = [self.holder.push.next_deadline_at_s(), self.holder.ledger.next_deadline_at_s()]
            deadlines += [self.holder_clock.world(each) for each in at_s if each is not None]
        for request in self.reader.requests:
            due_at_s = request.intake.next_deadline_at_s()
            if due_at_s is not None and due_at_s != float("inf"):
                deadlines.append(self.reader_clock.world(due_at_s))
        return sorted(deadlines)

    def tick(self) -> None:
        if self.running_holder is not None:
            self.running_holder.tick(self.holder_now_s)
        if not self.is_reader_stopped:
            self.reader.tick(self.reader_now_s)

    def reader_step(self) -> None:
        if not self.is_reader_stopped:
            self.reader.step(self.reader_now_s)

    # -- what the router does ----------------------------------------------------------------------

    def decode(self, handle: Handle, tokens: Sequence[int], holder_life: int | None = None) -> Decode:
        source = Peer("127.0.0.1:1", "prefill-1", f"life-{holder_life or self.holder_life}")
        return self.reader.begin(handle, tokens, source, self.limits)

    def admit(self, request: Decode, num_local_tokens: int, offer: Offer) -> bool:
        return self.reader.admit(request, num_local_tokens, offer, self.reader_now_s)

    # -- the links ---------------------------------------------------------------------------------

    def ask(self, request: Decode, question: Question, ordinal: int = 0) -> None:
        self.link.append(Envelope(self.reader_life, request, question, ordinal))

    def can_deliver(self, envelope: Envelope) -> bool:
        return not (self.is_holder_stopped if envelope.reply is None else self.is_reader_stopped)

    def deliver(self, index: int = 0, *, keeps_copy: bool = False) -> None:
        envelope = self.link[index] if keeps_copy else self.link.pop(index)
        if envelope.reply is not None:
            if envelope.reader_life == self.reader_life:
                self.reader.take_reply(
                    envelope.request, envelope.question, envelope.reply, envelope.ordinal, self.reader_now_s
                )
        elif self.holder is not None:
            reply = self.holder.answer(envelope.question, self.holder_now_s)
            if reply is not None:
                self.link.append(
                    Envelope(envelope.reader_life, envelope.request, envelope.question, envelope.ordinal, reply)
                )

    def deliver_order(self, index: int = 0, *, keeps_copy: bool = False) -> None:
        life, rank, message = self.order_link[index] if keeps_copy else self.order_link.pop(index)
        if self.running_holder is None or self.running_holder.life != life:
            return
        if isinstance(message, Orders):
            self.order_link.append((life, rank, self.running_holder.ranks[rank].take_orders(message)))
        else:
            self.running_holder.push.on_orders_taken(rank, message, now_s=self.holder_now_s)
            self.running_holder.flush(self.holder_now_s)

    def notify(self, rank: int, address: str, notification: Notification) -> None:
        self.notes.append(Note(address, rank, notification))

    def deliver_note(self, index: int = 0, *, keeps_copy: bool = False) -> None:
        note = self.notes[index] if keeps_copy else self.notes.pop(index)
        rank = self.reader.ranks[note.rank]
        if note.address == self.reader.card.workers[note.rank].address:
            rank.on_notification(note.notification, self.reader_now_s)

    # -- writes ------------------------------------------------------------------------------------

    def land(self, rank: PrefillRank, write: Write) -> None:
        """One more block of a write lands, with the content that it has now."""
        if not write.pairs:
            return
        source, destination = write.pairs.pop(0)
        if self._is_gone(write):
            return
        written = write.post.notification
        owner = self.reader.owner.get(destination)
        assert owner == written.registration_id, f"a write of {written} lands in a block of {owner}"
        content = rank.engine.pool.contents[rank.rank][source]
        self.reader.pool.contents[rank.rank][destination] = content
        if not write.pairs:
            self.notify(rank.rank, write.post.worker.address, written)

    def complete(self, rank: PrefillRank, write: Write) -> None:
        """A write goes on to its end, which is good unless the reader is gone or the transport has failed it."""
        while write.pairs and not write.is_failed:
            self.land(rank, write)
        rank.end(write, is_ok=not (write.is_failed or self._is_gone(write)))

    def _is_gone(self, write: Write) -> bool:
        return write.post.worker.address != self.reader.card.workers[write.rank].address

    # -- what must hold ----------------------------------------------------------------------------

    def check_post(self, engine: PrefillEngine, write: Write) -> None:
        """A write that is posted reads what is computed, into blocks that are reserved for it."""
        written = write.post.notification
        for offset, (source, destination) in enumerate(write.pairs):
            assert not engine.pool.is_free(source), f"{written} reads a free block"
            if self._is_gone(write):
                continue
            request = self._request_of(written.registration_id)
            link = block_contents(request.chain)[write.post.plan.first_index + offset]
            found = engine.pool.contents[write.rank][source]
            assert found == right_content(link, write.rank), f"{written} reads {found!r}"
            owner = self.reader.owner.get(destination)
            assert owner == written.registration_id, f"{written} is posted to a block of {owner}"

    def check_commit(self, rank: int, action: Notify) -> None:
        """Everything that a commit names is in place when it is sent."""
        assert isinstance(action.notification, Commit)
        if action.worker.address == self.reader.card.workers[rank].address:
            self.reader.check_content(self._request_of(action.notification.registration_id), rank)

    def check(self) -> None:
        """What must hold at any instant."""
        self.reader.check()

    # -- the end -----------------------------------------------------------------------------------

    def drain(self, *, holder_stays_stopped: bool = False) -> None:
        """Let everything end by itself, late work of the holder first. Nothing may stay."""
        self.is_reader_stopped = False
        if holder_stays_stopped and self.holder is not None:
            self.is_holder_stopped = True
            self._drain_reader_alone()
        self.is_holder_stopped = False
        if self.holder is None:
            self.restart_holder()
        self._work_late()
        for _ in range(400):
            self._round()
            if self._is_quiet():
                break
            deadlines = self.next_deadlines()
            if deadlines:
                self.world_s = max(self.world_s + 1e-3, min(deadlines[0], self.world_s + 5.0) + 1e-6)
        self._check_drained()

    def exchange(self) -> bool:
        """Links without faults: deliver all messages and orders, and everything that follows from them."""
        is_busy = False
        while possible := [index for index, each in enumerate(self.link) if self.can_deliver(each)]:
            self.deliver(possible[0])
            is_busy = True
            is_busy |= self._exchange_orders()
        return self._exchange_orders() or is_busy

    def pump(self) -> None:
        """The same with notifications, while the holder's workers do at every turn what they can."""
        is_busy = True
        while is_busy:
            is_busy = False
            possible = [index for index, each in enumerate(self.link) if self.can_deliver(each)]
            if possible:
                self.deliver(possible[0])
                is_busy = True
            is_busy |= self._exchange_orders()
            is_busy |= self._work()
            while self.notes and not self.is_reader_stopped:
                self.deliver_note()
                is_busy = True

    def _exchange_orders(self) -> bool:
        is_busy = False
        while self.order_link and not self.is_holder_stopped:
            self.deliver_order()
            is_busy = True
        return is_busy

    def _work(self) -> bool:
        """The holder's workers do what they can."""
        if self.running_holder is None:
            return False
        is_busy = False
        for rank in self.running_holder.ranks:
            while rank.facts:
                rank.take_fact()
                is_busy = True
            while rank.post():
                is_busy = True
            for write in tuple(rank.writes):
                self.complete(rank, write)
                is_busy = True
        return is_busy

    def _work_late(self) -> None:
        """What a holder that wakes up does first: its workers go on where they were."""
        while self._work():
            pass

    def _round(self) -> None:
        holder = self.holder
        assert holder is not None
        for request in holder.requests:
            if not request.is_over:
                holder.finish(request, 5.0, self.holder_now_s)
        self.tick()
        self.pump()
        for rank in self.reader.ranks:
            for request in tuple(rank.reads):
                rank.end_read(request, is_ok=True)
        self.reader_step()
        holder.collect(self.holder_now_s)
        self.check()

    def _is_quiet(self) -> bool:
        assert self.holder is not None
        is_reader_quiet = all(each.intake.is_drained for each in self.reader.requests) and not self.reader.orders
        is_holder_quiet = self.holder.push.is_drained and self.holder.ledger.is_drained
        return is_reader_quiet and is_holder_quiet

    def _drain_reader_alone(self) -> None:
        """The holder stays stopped: every load ends, and only blocks that it may still write to are kept back."""
        for _ in range(400):
            is_settled = not any(each.is_loading for each in self.reader.requests)
            if is_settled and not self.reader.orders:
                break
            deadlines = [at_s for at_s in self.next_deadlines() if at_s > self.world_s]
            self.world_s = max(self.world_s + 0.5, min(deadlines[0], self.world_s + 20.0) if deadlines else 0.0)
            self.reader.tick(self.reader_now_s)
            for index in range(len(self.link) - 1, -1, -1):
                if self.link[index].reply is not None:
                    self.deliver(index)
            while self.notes:
                self.deliver_note()
            for rank in self.reader.ranks:
                for request in tuple(rank.reads):
                    rank.end_read(request, is_ok=False)
            self.reader_step()
            self.check()
        for request in self.reader.requests:
            assert not request.is_loading, f"{request.intake} waits for a stopped holder"
            is_kept = request.intake.state is IntakeState.QUARANTINED
            assert is_kept == bool(request.quarantined), request.intake
            if is_kept:
                assert not request.intake.claim.is_safe, f"{request.intake} is quarantined for nothing"

    def _check_drained(self) -> None:
        holder = self.holder
        assert holder is not None
        for request in self.reader.requests:
            assert request.intake.is_drained or not request.outcomes, f"{request.intake} is not drained"
            assert not request.is_loading, f"{request.intake} never ended its load"
            if not request.is_over:
                self.reader.end_request(request, self.reader_now_s)
            assert request.intake.is_drained, f"{request.intake} is not drained"
            assert len(request.outcomes) == 1, f"{request.intake} ended as {request.outcomes}"
            assert not request.quarantined, request.intake
        self.pump()
        holder.collect(self.holder_now_s)
        self.pump()
        # Notifications that came after the end wait for an expectation that never comes.
        self.advance(1.1 * EARLY_LIFE_S)
        self.reader_step()
        assert holder.push.is_drained, f"{holder.push} is not drained"
        assert holder.ledger.is_drained, f"{holder.ledger} is not drained"
        assert holder.pool.num_free == holder.pool.num_blocks, "the holder leaks blocks"
        assert self.reader.pool.num_free == self.reader.pool.num_blocks, "the reader leaks blocks"
        for rank in holder.ranks:
            assert rank.writer.is_drained, f"{rank.writer} is not drained"
        for reader_rank in self.reader.ranks:
            assert not any((reader_rank.owed, reader_rank.results, reader_rank.reads))
            assert reader_rank.inboxes.is_drained, f"{reader_rank.inboxes} is not drained"

    def declare_dead(self, request: Decode) -> None:
        """The driver tells what is true: that life of the holder is over."""
        assert self.holder is None or self.holder_life != request.holder_life
        self.reader.tell(request, SourceDead("gone"), self.reader_now_s)

    def _request_of(self, registration_id: str) -> Decode:
        (found,) = [each for each in self.reader.requests if each.intake.registration_id == registration_id]
        return found
