"""A worker's writes into readers' memory: what its ``PushWriter`` hands out is posted, followed and reported back.

What this promises about memory: a write is reported as ended only when the transport says that it touches nothing any
more; one that has failed is followed until then.

The machine is shared: the worker's main thread tells it of restarts before a forward pass, everything else happens in
the comm thread. Its lock is held for moments only, never over a call of the transport.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.clock import now_s
from kvshuttle.connector.posting import Posted, Poster, disconnect
from kvshuttle.errors import KvshuttleError
from kvshuttle.handoff.notifications import encode_notification
from kvshuttle.handoff.push_writer import PushWriter
from kvshuttle.transport import Operation, PeerName, TransferStatus, Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvshuttle.connector.kv_layout import KvMemory
    from kvshuttle.handoff.cards import WorkerCard
    from kvshuttle.handoff.orders import Orders, OrdersTaken
    from kvshuttle.handoff.outbox import Notify, PostWrite
    from kvshuttle.handoff.progress import Progress, Restarted

logger = logging.getLogger(__name__)

SETTLE_TIMEOUT_S = 0.2
"""How long a forward pass is held up for writes that read what it will overwrite. Nothing depends on it: their epoch is
void anyway. It spares the network bytes that nobody will use."""


@dataclass(frozen=True, slots=True)
class EndedWrite:
    """One write that has succeeded. ``is_streamed``: before the prompt was computed to its end."""

    num_bytes: int
    num_descriptors: int
    post_s: float
    wire_s: float
    is_streamed: bool


@dataclass(frozen=True, slots=True)
class FailedWrite:
    """One write that has not; ``reason`` is a metric label."""

    reason: str


@dataclass(slots=True, eq=False)
class _Write:
    post: PostWrite
    posted: Posted
    is_failed: bool = False


@dataclass(frozen=True, slots=True)
class _Computed:
    """Progress that is true as soon as ``is_ready`` says so."""

    is_ready: Callable[[], bool]
    progress: tuple[Progress, ...]


class Writes:
    """``report`` takes what became of each write; ``hint`` tells a peer that it is about to be written to."""

    def __init__(
        self,
        memory: KvMemory,
        transport: Transport,
        *,
        report: Callable[[EndedWrite | FailedWrite], None],
        hint: Callable[[str], None],
    ) -> None:
        self._transport = transport
        self._poster = Poster(memory, transport, hint)
        self._report = report
        self._hint = hint
        self._lock = threading.Lock()
        self._writer = PushWriter()
        self._final_sources: set[str] = set()
        self._computed: deque[_Computed] = deque()
        self._names: dict[str, PeerName] = {}
        self._writes: list[_Write] = []

    def __repr__(self) -> str:
        return f"<Writes {self._writer!r}>"

    @property
    def is_any_live(self) -> bool:
        """Something is being written, or about to be."""
        return bool(self._computed) or any(not write.is_failed for write in self._writes)

    @property
    def is_any_undrained(self) -> bool:
        """A write that has failed has not ended."""
        return any(write.is_failed for write in self._writes)

    # -- the worker's main thread -----------------------------------------------------------------

    def restart(self, restarted: Iterable[Restarted]) -> bool:
        """Sources have lost what they had, and none of it counts any more; True when writes still read it."""
        source_ids = []
        with self._lock:
            for fact in restarted:
                self._writer.on_source(fact)
                source_ids.append(fact.source_id)
        return not self.is_settled(source_ids)

    def is_settled(self, source_ids: Iterable[str]) -> bool:
        """No write reads what these sources have lost."""
        with self._lock:
            return all(self._writer.is_settled(source_id) for source_id in source_ids)

    # -- the comm thread --------------------------------------------------------------------------

    def take_orders(self, message: Orders) -> OrdersTaken:
        """Orders of the scheduler half."""
        with self._lock:
            answer, actions = self._writer.take_orders(message)
        self._tell(actions)
        return answer

    def compute(self, is_ready: Callable[[], bool], progress: tuple[Progress, ...]) -> None:
        """A step's forward pass has been launched, and is done as soon as ``is_ready`` says so."""
        self._computed.append(_Computed(is_ready, progress))

    def forget(self, source_ids: Iterable[str]) -> None:
        """Sources are over."""
        with self._lock:
            for source_id in source_ids:
                self._writer.forget_source(source_id)
                self._final_sources.discard(source_id)

    def turn(self) -> None:
        """Take progress in, see how writes stand, post what may be posted."""
        while self._computed and self._computed[0].is_ready():
            self._on_progress(self._computed.popleft().progress)
        for write in tuple(self._writes):
            self._follow(write)
        while (post := self._next_write()) is not None:
            self._begin(post)

    def _on_progress(self, progress: tuple[Progress, ...]) -> None:
        for fact in progress:
            with self._lock:
                actions = self._writer.on_source(fact)
            if fact.is_final:
                self._final_sources.add(fact.source_id)
            self._tell(actions)

    def _next_write(self) -> PostWrite | None:
        with self._lock:
            return self._writer.next_write()

    def _begin(self, post: PostWrite) -> None:
        try:
            self._writes.append(self._post(post))
        except Exception as error:  # noqa: BLE001 - it is this write's end, and the others go on
            logger.warning("kvshuttle: a write for %s could not be posted: %r", post.lease_id, error)
            self._disconnect(post.worker)
            self._report(FailedWrite("post_failed"))
            with self._lock:
                actions = self._writer.on_write_ended(post, is_ok=False)
            self._tell(actions)

    def _post(self, post: PostWrite) -> _Write:
        name = self._connect(post.worker)
        notification = encode_notification(post.notification)
        return _Write(post, self._poster.post(Operation.WRITE, post.worker, name, post.plan, notification=notification))

    def _follow(self, write: _Write) -> None:
        status = self._ask(write)
        if status is TransferStatus.PENDING:
            write.posted.hint_again(self._hint)
            return
        if status is TransferStatus.FAILED and not write.is_failed:
            write.is_failed = True
            self._report(FailedWrite("transport_failed"))
            self._disconnect(write.post.worker)
            with self._lock:
                actions = self._writer.on_write_failed(write.post)
            self._tell(actions)
        # A transfer that is done has nothing to read any more, even if its handle is not given back yet.
        if self._release(write) or status is TransferStatus.DONE:
            self._end(write, is_ok=status is TransferStatus.DONE)

    def _end(self, write: _Write, *, is_ok: bool) -> None:
        self._writes.remove(write)
        if is_ok:
            self._report(
                EndedWrite(
                    num_bytes=write.posted.num_bytes,
                    num_descriptors=write.posted.num_descriptors,
                    post_s=write.posted.post_s,
                    wire_s=now_s() - write.posted.posted_at_s,
                    is_streamed=write.post.source_id not in self._final_sources,
                )
            )
        with self._lock:
            actions = self._writer.on_write_ended(write.post, is_ok=is_ok)
        self._tell(actions)

    def _ask(self, write: _Write) -> TransferStatus:
        try:
            return self._transport.poll(write.posted.transfer)
        except Exception as error:  # noqa: BLE001 - it is this write's failure, and the others go on
            if not write.is_failed:
                logger.warning("kvshuttle: a write for %s cannot be followed: %r", write.post.lease_id, error)
            return TransferStatus.FAILED

    def _release(self, write: _Write) -> bool:
        try:
            return self._transport.release(write.posted.transfer)
        except Exception:  # noqa: BLE001 - whether it still reads is unknown, so it counts as reading
            return False

    def _tell(self, actions: Iterable[Notify]) -> None:
        for action in actions:
            try:
                self._hint(action.worker.address)
                self._transport.notify(self._connect(action.worker), encode_notification(action.notification))
            except KvshuttleError as error:
                # Its reader finds out by its own deadline.
                logger.warning("kvshuttle: a reader of %s was not told: %s", action.lease_id, error)

    def _connect(self, worker: WorkerCard) -> PeerName:
        name = self._names.get(worker.address)
        if name is None:
            name = self._names[worker.address] = self._transport.add_peer(worker.agent_metadata)
        return name

    def _disconnect(self, worker: WorkerCard) -> None:
        """The connection looks broken: the next write makes it anew, once no other one is using it."""
        if any(write.post.worker.address == worker.address and not write.is_failed for write in self._writes):
            return
        name = self._names.pop(worker.address, None)
        if name is not None:
            disconnect(self._transport, name)
