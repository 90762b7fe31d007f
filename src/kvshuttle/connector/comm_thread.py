"""The one thread of a worker that owns its transport and its side channel.

Engine threads hand it orders and take results; nobody else touches the NIXL agent. It polls quickly while a
read is under way or a peer said that it is reading from us (NIXL without its progress thread moves bytes only
inside our calls, on both ends), and otherwise sleeps in the side channel's poll, so that an idle engine is idle
and an engine in a long forward pass still serves its peers.

What it promises about memory: a read that is not known to have ended is reported ``is_drained=False`` and is
followed until it has ended; only then does its ``DrainedRead`` come. A read counts as good only when it
was seen complete inside its budget.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvshuttle.clock import now_s
from kvshuttle.connector.kv_layout import KvMemory, plan_spans
from kvshuttle.errors import KvshuttleError, LocalProtocolError
from kvshuttle.handoff.messages import Busy, Message, WorkerCard
from kvshuttle.transport import Operation, PeerName, Transfer, TransferStatus, Transport

if TYPE_CHECKING:
    from kvshuttle.connector.step_metadata import ReadOrder
    from kvshuttle.transport.endpoint import Endpoint

logger = logging.getLogger(__name__)

_ACTIVE_SLEEP_S = 0.0001
"""Between polls while our own read is under way; short, since each poll also moves the bytes."""
_BUSY_SLEEP_S = 0.0002
"""The same while a peer reads from us."""
_IDLE_POLL_S = 0.2
"""Idle: a hint wakes us before a peer reads, so this only serves what UCX does on its own (keep-alives)."""
_BUSY_HINT_S = 1.0
_START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class ReadResult:
    """How one order ended. ``reason`` is "" when it is good, else a metric label; ``detail`` is for the log."""

    request_id: str
    reason: str
    detail: str = ""
    is_drained: bool = True
    num_bytes: int = 0
    num_descriptors: int = 0
    post_s: float = 0.0
    wire_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DrainedRead:
    """An undrained read of this request cannot touch memory any more."""

    request_id: str


@dataclass(slots=True)
class _Peer:
    card: WorkerCard
    name: PeerName | None = None


@dataclass(slots=True)
class _Read:
    order: ReadOrder
    transfer: Transfer
    deadline_at_s: float
    next_hint_at_s: float
    posted_at_s: float
    post_s: float
    num_bytes: int
    num_descriptors: int
    is_reported: bool = field(default=False)


Outcome = ReadResult | DrainedRead
TransportFactory = Callable[[], Transport]
EndpointFactory = Callable[[Callable[[Message], Message | None]], "Endpoint[Message]"]


@dataclass(frozen=True, slots=True)
class CommThreadOptions:
    """How a worker's comm thread reaches the world.

    ``rank``: tensor-parallel rank, the same as the peer's rank that it reads from. ``host``: address to bind;
    ``advertise_host``: what peers are told. ``transit_allowance_s``: taken off a read's budget when the order
    came from another host, whose clock cannot be compared.
    """

    rank: int
    host: str
    advertise_host: str
    host_id: str
    transit_allowance_s: float


class CommThread:
    """Runs a worker's reads. ``start`` returns its card. The public methods are thread-safe."""

    def __init__(
        self,
        memory: KvMemory,
        options: CommThreadOptions,
        *,
        transport_factory: TransportFactory,
        endpoint_factory: EndpointFactory,
    ) -> None:
        self._memory = memory
        self._options = options
        self._transport_factory = transport_factory
        self._endpoint_factory = endpoint_factory
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[WorkerCard | BaseException] = queue.SimpleQueue()
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvshuttle-comm", daemon=True)
        self._transport: Transport
        self._endpoint: Endpoint[Message]
        self._peers: dict[str, _Peer] = {}
        self._reads: list[_Read] = []
        self._busy_until_s = 0.0

    def start(self) -> WorkerCard:
        """Create the transport, register the memory and listen. Raises what went wrong in the thread."""
        self._thread.start()
        try:
            started = self._started.get(timeout=_START_TIMEOUT_S)
        except queue.Empty:
            raise LocalProtocolError(f"the transport did not start within {_START_TIMEOUT_S:.0f} s") from None
        if isinstance(started, BaseException):
            raise started
        return started

    def order(self, order: ReadOrder) -> None:
        """Start a read as soon as the thread gets to it; exactly one ``ReadResult`` follows."""
        self._submit(lambda: self._begin(order))

    def meet(self, incarnation: str, card: WorkerCard) -> None:
        """Learn how to reach a peer's rank."""
        self._submit(lambda: self._peers.setdefault(incarnation, _Peer(card)))

    def forget(self, incarnation: str) -> None:
        """Drop a peer that is gone; its reads fail."""
        self._submit(lambda: self._drop_peer(incarnation, is_known_dead=True))

    def take(self) -> list[Outcome]:
        """Outcomes since the last call."""
        outcomes: list[Outcome] = []
        while True:
            try:
                outcomes.append(self._outcomes.get_nowait())
            except queue.Empty:
                return outcomes

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread and close what it owns. Idempotent."""
        if not self._thread.is_alive():
            return
        self._submit(self._is_stopping.set)
        self._thread.join(timeout_s)

    # -- everything below runs in the thread ------------------------------------------------------

    def _submit(self, command: Callable[[], object]) -> None:
        self._commands.put(command)
        endpoint = getattr(self, "_endpoint", None)
        if endpoint is not None:
            endpoint.wake()

    def _run(self) -> None:
        try:
            card = self._open()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits in start()
            self._started.put(error)
            return
        self._started.put(card)
        while not self._is_stopping.is_set():
            try:
                self._turn()
            except Exception:
                logger.exception("kvshuttle: comm thread turn failed; going on")
                time.sleep(_IDLE_POLL_S)
        self._endpoint.close()
        self._transport.close()

    def _open(self) -> WorkerCard:
        self._transport = self._transport_factory()
        self._transport.register(
            self._memory.storage_spans, device=self._memory.device, device_id=self._memory.device_id
        )
        self._endpoint = self._endpoint_factory(self._on_message)
        _, _, port = self._endpoint.bind(self._options.host, 0).rpartition(":")
        return WorkerCard(
            rank=self._options.rank,
            address=f"{self._options.advertise_host}:{port}",
            agent_metadata=self._transport.metadata(),
            device=self._memory.device,
            device_id=self._memory.device_id,
            regions=self._memory.regions,
        )

    def _on_message(self, message: Message) -> Message | None:
        if isinstance(message, Busy):
            self._busy_until_s = max(self._busy_until_s, now_s() + min(message.duration_s, 60.0))
        return None

    def _turn(self) -> None:
        is_reading = any(not read.is_reported for read in self._reads)
        is_busy = now_s() < self._busy_until_s
        self._endpoint.poll(0.0 if is_reading or is_busy else _IDLE_POLL_S)
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            command()
        self._transport.take_notifications()
        for read in list(self._reads):
            self._follow(read)
        if is_reading or is_busy:
            time.sleep(_ACTIVE_SLEEP_S if is_reading else _BUSY_SLEEP_S)

    def _begin(self, order: ReadOrder) -> None:
        is_same_host = order.host == self._options.host_id
        transit_s = now_s() - order.issued_at_s if is_same_host else self._options.transit_allowance_s
        deadline_at_s = now_s() + order.budget_s - transit_s
        peer = self._peers.get(order.incarnation)
        if peer is None:
            self._report(ReadResult(order.request_id, "peer_unknown", f"no card of {order.incarnation}"))
        elif now_s() >= deadline_at_s:
            self._report(ReadResult(order.request_id, "no_time_left", f"budget {order.budget_s:.2f} s"))
        else:
            try:
                self._reads.append(self._post(order, peer, deadline_at_s))
            except KvshuttleError as error:
                self._report(ReadResult(order.request_id, "post_failed", str(error)))

    def _post(self, order: ReadOrder, peer: _Peer, deadline_at_s: float) -> _Read:
        started_at_s = now_s()
        card = peer.card
        if peer.name is None:
            peer.name = self._transport.add_peer(card.agent_metadata)
        source, destination = plan_spans(order.plan, card.regions, self._memory.regions)
        self._hint(card)
        transfer = self._transport.post(
            Operation.READ,
            peer.name,
            destination,
            source,
            device=self._memory.device,
            device_id=self._memory.device_id,
            remote_device_id=card.device_id,
        )
        return _Read(
            order=order,
            transfer=transfer,
            deadline_at_s=deadline_at_s,
            next_hint_at_s=started_at_s + _BUSY_HINT_S / 2,
            posted_at_s=started_at_s,
            post_s=now_s() - started_at_s,
            num_bytes=int(destination[:, 1].sum()),
            num_descriptors=len(destination),
        )

    def _hint(self, card: WorkerCard) -> None:
        self._endpoint.send(card.address, Busy(sender=self._transport.name, duration_s=_BUSY_HINT_S))

    def _follow(self, read: _Read) -> None:
        try:
            status = self._transport.poll(read.transfer)
            detail = repr(read.transfer)
        except KvshuttleError as error:
            status, detail = TransferStatus.FAILED, str(error)
        is_late = now_s() > read.deadline_at_s
        if status is TransferStatus.PENDING and not is_late:
            if now_s() >= read.next_hint_at_s:
                read.next_hint_at_s = now_s() + _BUSY_HINT_S / 2
                self._hint(self._peers[read.order.incarnation].card)
            return
        if status is TransferStatus.PENDING:
            reason = "timed_out"
        elif status is TransferStatus.FAILED:
            reason = "transport_failed"
        else:
            reason = "too_late" if is_late else ""
        self._settle(read, reason, detail, is_pending=status is TransferStatus.PENDING)

    def _settle(self, read: _Read, reason: str, detail: str, *, is_pending: bool) -> None:
        is_drained = not is_pending and self._transport.release(read.transfer)
        if not read.is_reported:
            read.is_reported = True
            self._report(
                ReadResult(
                    request_id=read.order.request_id,
                    reason=reason,
                    detail=detail,
                    is_drained=is_drained,
                    num_bytes=read.num_bytes,
                    num_descriptors=read.num_descriptors,
                    post_s=read.post_s,
                    wire_s=now_s() - read.posted_at_s,
                )
            )
        elif is_drained:
            self._outcomes.put(DrainedRead(read.order.request_id))
        if is_drained:
            self._reads.remove(read)
        elif is_pending:
            self._drop_peer(read.order.incarnation, is_known_dead=False)

    def _drop_peer(self, incarnation: str, *, is_known_dead: bool) -> None:
        """Tear a peer's connection down, so that what still pends on it ends. Its card stays unless it is dead."""
        peer = self._peers.get(incarnation)
        if peer is None:
            return
        has_live_reads = any(r.order.incarnation == incarnation and not r.is_reported for r in self._reads)
        if has_live_reads and not is_known_dead:
            return  # a slow read must not take a good one down with it; it is dropped when they are over
        if peer.name is not None:
            self._transport.remove_peer(peer.name)
            peer.name = None
        if is_known_dead and not any(r.order.incarnation == incarnation for r in self._reads):
            del self._peers[incarnation]

    def _report(self, result: ReadResult) -> None:
        if result.reason:
            logger.warning("kvshuttle: read for %s failed: %s (%s)", result.request_id, result.reason, result.detail)
        self._outcomes.put(result)
