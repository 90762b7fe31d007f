"""The one thread of a worker that owns its transport and its side channel.

Engine threads hand it orders and take results; nobody else touches the NIXL agent. It polls quickly while a read or
write is under way, or a peer said that it reads from us or writes to us (NIXL without its progress thread moves bytes
only inside our calls, on both ends), and otherwise sleeps in the side channel's poll, so that an idle engine is idle
and an engine in a long forward pass still serves its peers.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.clock import now_s
from kvshuttle.connector.arrivals import Arrivals, PushNews
from kvshuttle.connector.posting import HINT_S
from kvshuttle.connector.reads import ReadOutcome, Reads
from kvshuttle.connector.writes import EndedWrite, FailedWrite, Writes
from kvshuttle.errors import LocalProtocolError
from kvshuttle.handoff.cards import WorkerCard
from kvshuttle.handoff.messages import Busy, Message
from kvshuttle.handoff.orders import Orders
from kvshuttle.transport import Operation, Transport

if TYPE_CHECKING:
    from kvshuttle.connector.kv_layout import KvMemory
    from kvshuttle.connector.step_metadata import PushExpectation, ReadOrder
    from kvshuttle.handoff.progress import Progress, Restarted
    from kvshuttle.transport.endpoint import Endpoint

logger = logging.getLogger(__name__)

_ACTIVE_SLEEP_S = 0.0001
"""Between polls while our own read is under way; short, since each poll also moves the bytes."""
_BUSY_SLEEP_S = 0.0002
"""The same while a peer reads from us."""
_IDLE_POLL_S = 0.2
"""Idle: a hint wakes us before a peer reads, so this only serves what UCX does on its own (keep-alives)."""
_EXPECTING_POLL_S = 0.005
"""While a push is expected: hints come with its writes, this is for one that was lost."""
_DRAIN_POLL_S = 0.02
"""While a read that timed out or a write that failed has not ended: it moves only inside our calls, and keeps blocks
out of use."""
_FAILURE_PAUSE_S = 0.01
"""After an unexpected failure, so that one that repeats does not spin."""
_MAX_BUSY_S = 60.0
_START_TIMEOUT_S = 120.0
_LOG_INTERVAL_S = 10.0

CommOutcome = ReadOutcome | PushNews | EndedWrite | FailedWrite
TransportFactory = Callable[[], Transport]
EndpointFactory = Callable[[Callable[[Message], Message | None]], "Endpoint[Message]"]


@dataclass(frozen=True, slots=True)
class CommThreadOptions:
    """How a worker's comm thread reaches the world.

    ``rank``: tensor-parallel rank, the same as the peer's rank that it reads from. ``host``: address to bind;
    ``advertise_host``: what peers are told. ``host_id`` and ``transit_allowance_s``: see ``Reads``.
    """

    rank: int
    host: str
    advertise_host: str
    host_id: str
    transit_allowance_s: float


class CommThread:
    """Runs a worker's reads and writes. ``start`` returns its card. The public methods are thread-safe."""

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
        self._outcomes: queue.SimpleQueue[CommOutcome] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[WorkerCard | BaseException] = queue.SimpleQueue()
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvshuttle-comm", daemon=True)
        self._transport: Transport | None = None
        self._endpoint: Endpoint[Message] | None = None
        self._reads: Reads | None = None
        self._writes: Writes | None = None
        self._arrivals: Arrivals | None = None
        self._busy_until_s = 0.0
        self._logged_at_s = -_LOG_INTERVAL_S

    def __repr__(self) -> str:
        return f"<CommThread rank={self._options.rank} {'alive' if self.is_alive else 'stopped'} {self._reads!r}>"

    @property
    def is_alive(self) -> bool:
        """Whether orders still get answers."""
        return self._thread.is_alive()

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
        if order.is_instead_of_push:
            self._submit(lambda reads: reads.begin(order) if self._abandon(order.request_id) else None)
        else:
            self._submit(lambda reads: reads.begin(order))

    def meet(self, incarnation: str, card: WorkerCard) -> None:
        """Learn how to reach a peer's rank."""
        self._submit(lambda reads: reads.meet(incarnation, card))

    def forget(self, incarnation: str) -> None:
        """Drop a peer that is gone; its reads fail."""
        self._submit(lambda reads: reads.forget(incarnation))

    def expect(self, expectation: PushExpectation) -> None:
        """Wait for a push; exactly one ``ReadResult`` follows, unless it is abandoned first."""
        self._submit(lambda _: self._arrivals.expect(expectation) if self._arrivals is not None else None)

    def abandon(self, request_id: str) -> None:
        """Nobody waits for this push any more."""
        self._submit(lambda _: self._abandon(request_id))

    def compute(self, is_ready: Callable[[], bool], progress: tuple[Progress, ...]) -> None:
        """A forward pass that makes ``progress`` has been launched; it is over when ``is_ready`` says so."""
        self._submit(lambda _: self._writes.compute(is_ready, progress) if self._writes is not None else None)

    def forget_sources(self, source_ids: tuple[str, ...]) -> None:
        """Sources that nobody will be written from any more."""
        self._submit(lambda _: self._writes.forget(source_ids) if self._writes is not None else None)

    def restart(self, restarted: list[Restarted]) -> bool:
        """Sources have lost their blocks, from this call on. False: writes that read them are still under way."""
        return self._writes is None or not self._writes.restart(restarted)

    def is_settled(self, source_ids: list[str]) -> bool:
        """No write reads what these sources have lost."""
        return self._writes is None or self._writes.is_settled(source_ids)

    def take(self) -> list[CommOutcome]:
        """Outcomes since the last call."""
        outcomes: list[CommOutcome] = []
        while True:
            try:
                outcomes.append(self._outcomes.get_nowait())
            except queue.Empty:
                return outcomes

    def stop(self, timeout_s: float = 5.0) -> bool:
        """End the thread and close what it owns; False when that took too long. Idempotent.

        Reads and writes under way end with their connections, which closing the transport destroys; nothing touches
        this worker's memory after that. On False the memory must stay mapped until the process ends.
        """
        if self._thread.ident is None:
            return True
        self._is_stopping.set()
        self._wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _submit(self, command: Callable[[Reads], object]) -> None:
        self._commands.put(lambda: command(self._reads) if self._reads is not None else None)
        self._wake()

    def _wake(self) -> None:
        if self._endpoint is not None:
            self._endpoint.wake()

    # -- everything below runs in the thread ------------------------------------------------------

    def _run(self) -> None:
        try:
            card = self._open()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits in start()
            self._close()
            self._started.put(error)
            return
        self._started.put(card)
        try:
            while not self._is_stopping.is_set():
                self._turn()
        finally:
            self._close()

    def _open(self) -> WorkerCard:
        transport = self._transport = self._transport_factory()
        transport.register(self._memory.storage_spans, device=self._memory.device, device_id=self._memory.device_id)
        endpoint = self._endpoint = self._endpoint_factory(self._on_message)
        _, _, port = endpoint.bind(self._options.host, 0).rpartition(":")
        hints = {operation: Busy(sender=transport.name, duration_s=hint_s) for operation, hint_s in HINT_S.items()}
        self._reads = Reads(
            self._memory,
            transport,
            host_id=self._options.host_id,
            transit_allowance_s=self._options.transit_allowance_s,
            report=self._outcomes.put,
            hint=lambda address: endpoint.send(address, hints[Operation.READ]),
        )
        self._writes = Writes(
            self._memory,
            transport,
            report=self._outcomes.put,
            hint=lambda address: endpoint.send(address, hints[Operation.WRITE]),
        )
        self._arrivals = Arrivals(
            block_len_bytes=sum(region.block_len_bytes for region in self._memory.regions), report=self._outcomes.put
        )
        return WorkerCard(
            rank=self._options.rank,
            address=f"{self._options.advertise_host}:{port}",
            agent_metadata=transport.metadata(),
            device=self._memory.device,
            device_id=self._memory.device_id,
            regions=self._memory.regions,
        )

    def _close(self) -> None:
        for owned in (self._endpoint, self._transport):
            try:
                if owned is not None:
                    owned.close()
            except Exception:
                logger.exception("kvshuttle: closing %r failed", owned)

    def _on_message(self, message: Message) -> Message | None:
        if isinstance(message, Busy):
            self._busy_until_s = max(self._busy_until_s, now_s() + min(message.duration_s, _MAX_BUSY_S))
        if isinstance(message, Orders) and self._writes is not None:
            return self._writes.take_orders(message)
        return None

    def _abandon(self, request_id: str) -> bool:
        return self._arrivals is not None and self._arrivals.abandon(request_id)

    def _turn(self) -> None:
        assert self._endpoint is not None
        assert self._transport is not None
        assert self._reads is not None
        assert self._writes is not None
        is_reading = self._reads.is_any_live or self._writes.is_any_live
        is_busy = now_s() < self._busy_until_s
        # One at a time: whatever fails in one must not keep the others from being done.
        self._guard(self._endpoint.poll, 0.0 if is_reading or is_busy else self._quiet_pause_s())
        while not self._commands.empty():
            self._guard(self._commands.get_nowait())
        self._guard(self._take_notifications)
        self._guard(self._reads.follow)
        self._guard(self._writes.turn)
        if is_reading or is_busy:
            time.sleep(_ACTIVE_SLEEP_S if is_reading else _BUSY_SLEEP_S)

    def _quiet_pause_s(self) -> float:
        assert self._arrivals is not None
        assert self._reads is not None
        assert self._writes is not None
        if not self._arrivals.is_drained:
            return _EXPECTING_POLL_S
        is_draining = self._reads.is_any_undrained or self._writes.is_any_undrained
        return _DRAIN_POLL_S if is_draining else _IDLE_POLL_S

    def _take_notifications(self) -> None:
        assert self._transport is not None
        assert self._arrivals is not None
        self._arrivals.take(self._transport.take_notifications())
        self._arrivals.expire()

    def _guard(self, act: Callable[..., object], *args: object) -> None:
        try:
            act(*args)
        except Exception:
            time.sleep(_FAILURE_PAUSE_S)
            if now_s() - self._logged_at_s >= _LOG_INTERVAL_S:
                self._logged_at_s = now_s()
                logger.exception("kvshuttle: the comm thread goes on after a failure")
