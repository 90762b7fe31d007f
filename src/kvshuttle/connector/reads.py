"""A worker's reads: posted when ordered, followed until nothing of them can touch memory any more.

What this promises about memory: a read that is not known to have ended is reported ``is_drained=False`` and is
followed until it has ended; only then does its ``DrainedRead`` come. A read counts as good only when it was seen
complete inside its budget.

What it promises about answers: each order gets exactly one ``ReadResult``, whatever fails in here. The one case that
it cannot cover itself, a transport call that never returns, is its owner's: see ``WorkerHalf``.

One thread owns it: the comm thread.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.clock import now_s
from kvshuttle.connector.posting import Posted, Poster, disconnect
from kvshuttle.errors import KvshuttleError
from kvshuttle.transport import Operation, PeerName, TransferStatus, Transport

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvshuttle.connector.kv_layout import KvMemory
    from kvshuttle.connector.step_metadata import ReadOrder
    from kvshuttle.handoff.cards import WorkerCard

logger = logging.getLogger(__name__)


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
    is_pushed: bool = False
    """It was not read at all: everything was written by the holder. ``wire_s`` is the time it was waited for."""
    is_called_off: bool = False
    """The scheduler half ended it, whose outcome tells why; no transfer of this worker has failed."""


@dataclass(frozen=True, slots=True)
class DrainedRead:
    """An undrained read of this request cannot touch memory any more."""

    request_id: str


ReadOutcome = ReadResult | DrainedRead


@dataclass(slots=True, eq=False)
class _Peer:
    """A rank to read from.

    ``name``: how the transport knows it, None before the first read. ``is_suspect``: a read of it went wrong, so its
    connection is made anew before the next one. ``is_gone``: forgotten as soon as no read needs it.
    """

    card: WorkerCard
    name: PeerName | None = None
    is_suspect: bool = False
    is_gone: bool = False


@dataclass(slots=True, eq=False)
class _Read:
    request_id: str
    peer: _Peer
    posted: Posted
    deadline_at_s: float
    is_reported: bool = False
    is_drained: bool = False


class Reads:
    """``report`` takes every outcome; ``hint`` tells a peer that it is about to be read from.

    ``host_id``: names the clock that orders are dated by, if it is this host's. ``transit_allowance_s``: taken off a
    read's times when the order came from another host, whose clock cannot be compared.
    """

    def __init__(
        self,
        memory: KvMemory,
        transport: Transport,
        *,
        host_id: str,
        transit_allowance_s: float,
        report: Callable[[ReadOutcome], None],
        hint: Callable[[str], None],
    ) -> None:
        self._transport = transport
        self._poster = Poster(memory, transport, hint)
        self._host_id = host_id
        self._transit_allowance_s = transit_allowance_s
        self._put = report
        self._hint = hint
        self._peers: dict[str, _Peer] = {}
        self._reads: list[_Read] = []

    def __repr__(self) -> str:
        num_live = sum(not read.is_reported for read in self._reads)
        return f"<Reads live={num_live} undrained={len(self._reads) - num_live} peers={len(self._peers)}>"

    @property
    def is_any_live(self) -> bool:
        """Somebody waits for a read."""
        return any(not read.is_reported for read in self._reads)

    @property
    def is_any_undrained(self) -> bool:
        """A read that nobody waits for any more has not ended."""
        return any(read.is_reported for read in self._reads)

    def meet(self, incarnation: str, card: WorkerCard) -> None:
        """Learn how to reach a peer's rank."""
        self._peers.setdefault(incarnation, _Peer(card)).is_gone = False

    def forget(self, incarnation: str) -> None:
        """A peer is gone: its pending reads fail, and it is not read from any more."""
        peer = self._peers.get(incarnation)
        if peer is not None:
            peer.is_gone = True
            self._disconnect(peer)
            self._drop_gone()

    def begin(self, order: ReadOrder) -> None:
        """Start a read. Never raises: what goes wrong is the order's result."""
        try:
            result = self._start(order)
        except Exception as error:
            logger.exception("kvshuttle: a read for %s could not be started", order.request_id)
            result = ReadResult(order.request_id, "internal_error", repr(error))
        if result is not None:
            self._report(result)

    def follow(self) -> None:
        """See how every read stands: report what is over or late, forget what touches no memory any more."""
        for read in tuple(self._reads):
            self._follow(read)

    # -- starting ---------------------------------------------------------------------------------

    def _start(self, order: ReadOrder) -> ReadResult | None:
        """Post the read; a result when that is not possible."""
        is_same_clock = order.host == self._host_id
        ordered_at_s = order.issued_at_s if is_same_clock else now_s() - self._transit_allowance_s
        deadline_at_s = ordered_at_s + order.budget_s
        last_submit_at_s = ordered_at_s + order.submit_within_s
        peer = self._peers.get(order.incarnation)
        if peer is None or peer.is_gone:
            return ReadResult(order.request_id, "peer_unknown", f"no card of {order.incarnation}")
        try:
            name = self._connect(peer)
            # Connecting may take a while.
            if now_s() >= min(deadline_at_s, last_submit_at_s):
                allowed_s = min(order.budget_s, order.submit_within_s)
                return ReadResult(order.request_id, "no_time_left", f"{allowed_s:.2f} s to begin in")
            posted = self._poster.post(Operation.READ, peer.card, name, order.plan)
            self._reads.append(_Read(order.request_id, peer, posted, deadline_at_s))
        except KvshuttleError as error:
            peer.is_suspect = True
            return ReadResult(order.request_id, "post_failed", str(error))
        return None

    # -- following --------------------------------------------------------------------------------

    def _follow(self, read: _Read) -> None:
        status, problem = self._ask(read)
        is_late = now_s() > read.deadline_at_s
        if status is TransferStatus.PENDING and not is_late:
            read.posted.hint_again(self._hint)
            return
        is_released = status is not TransferStatus.PENDING and self._release(read)
        was_drained = read.is_drained
        # A transfer that is done has nothing to write any more, even if its handle is not given back yet.
        read.is_drained |= is_released or status is TransferStatus.DONE
        if not read.is_reported:
            self._end(read, status, problem or repr(read.posted.transfer), is_late=is_late)
        elif read.is_drained and not was_drained:
            self._put(DrainedRead(read.request_id))
        if is_released:
            self._reads.remove(read)
            self._drop_gone()

    def _end(self, read: _Read, status: TransferStatus, detail: str, *, is_late: bool) -> None:
        """Report a read, and part with its peer when the connection looks broken."""
        reason = "too_late" if is_late else ""
        if status is not TransferStatus.DONE:
            reason = "timed_out" if status is TransferStatus.PENDING else "transport_failed"
            read.peer.is_suspect = True
        read.is_reported = True
        self._report(
            ReadResult(
                request_id=read.request_id,
                reason=reason,
                detail=detail,
                is_drained=read.is_drained,
                num_bytes=read.posted.num_bytes,
                num_descriptors=read.posted.num_descriptors,
                post_s=read.posted.post_s,
                wire_s=now_s() - read.posted.posted_at_s,
            )
        )
        if read.peer.is_suspect and not self._is_live(read.peer):
            self._disconnect(read.peer)

    def _ask(self, read: _Read) -> tuple[TransferStatus, str]:
        try:
            return self._transport.poll(read.posted.transfer), ""
        except Exception as error:  # noqa: BLE001 - it is this read's end, and the others go on
            return TransferStatus.FAILED, repr(error)

    def _release(self, read: _Read) -> bool:
        try:
            return self._transport.release(read.posted.transfer)
        except Exception as error:  # noqa: BLE001 - whether it still writes is unknown, so it counts as writing
            if not read.is_reported:
                logger.warning("kvshuttle: a read for %s cannot be released: %r", read.request_id, error)
            return False

    def _report(self, result: ReadResult) -> None:
        if result.reason:
            logger.warning("kvshuttle: read for %s failed: %s (%s)", result.request_id, result.reason, result.detail)
        self._put(result)

    # -- peers ------------------------------------------------------------------------------------

    def _connect(self, peer: _Peer) -> PeerName:
        # A slow read must not take a good one down with it, so a suspect connection is kept while it is in use.
        if peer.is_suspect and not self._is_live(peer):
            self._disconnect(peer)
        if peer.name is None:
            peer.name = self._transport.add_peer(peer.card.agent_metadata)
        return peer.name

    def _disconnect(self, peer: _Peer) -> None:
        """Make the transport forget a peer: its pending reads fail, and the next one connects anew."""
        name, peer.name = peer.name, None
        peer.is_suspect = False
        if name is not None:
            disconnect(self._transport, name)

    def _drop_gone(self) -> None:
        in_use = {id(read.peer) for read in self._reads}
        for incarnation, peer in tuple(self._peers.items()):
            if peer.is_gone and id(peer) not in in_use:
                del self._peers[incarnation]

    def _is_live(self, peer: _Peer) -> bool:
        return any(read.peer is peer and not read.is_reported for read in self._reads)
