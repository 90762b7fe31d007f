"""What the reading side says to holders, over the side channel, and what their answers come to.

An address is introduced to us by a hello before the first lease is acquired from it; a registration needs none, since
the holder compares everything itself. Answers arrive in the side channel's thread and become facts under the lock.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Protocol

from kvshuttle.clock import now_s
from kvshuttle.connector.peers import Peers
from kvshuttle.errors import KvshuttleError, TransportError
from kvshuttle.handoff.fetch_protocol import (
    AcquireAnswered,
    PeerFailed,
    RenewAnswered,
    SendAcquire,
    SendRelease,
    SendRenew,
)
from kvshuttle.handoff.intake_protocol import (
    ProceedAnswered,
    RegisterAnswered,
    RegisterFailed,
    SendProceed,
    SendRegister,
    SendWithdraw,
    WithdrawAnswered,
)
from kvshuttle.handoff.messages import (
    PROTOCOL_VERSION,
    Acquired,
    Declined,
    Denied,
    Hello,
    HelloAck,
    Message,
    Proceeding,
    Registered,
    Renewed,
    Withdrawn,
)

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Container

    from kvshuttle.connector.stats import ShuttleStats
    from kvshuttle.connector.step_metadata import StepMetadata
    from kvshuttle.handoff.cards import EngineCard
    from kvshuttle.handoff.intake_protocol import IntakeFact
    from kvshuttle.handoff.params import Peer
    from kvshuttle.transport.endpoint import Endpoint, OnReply
    from kvshuttle.transport.side_channel import SideChannelThread

logger = logging.getLogger(__name__)

_RELEASE_TIMEOUT_S = 2.0
_LATE_ANSWER_S = 5.0
"""An answer that comes so much after its question timed out is still taken in, to give back the lease in it."""

Asked = SendAcquire | SendRenew | SendRelease | SendRegister | SendProceed | SendWithdraw


class Subject(Protocol):
    """Whose questions these are: one decode leg."""

    @property
    def source(self) -> Peer:
        """The holder."""
        ...

    @property
    def is_settled(self) -> bool:
        """It wants to hear nothing any more."""
        ...


class Owner(Protocol):
    """The reader: it gets the facts, and carries news of peers to the workers."""

    @property
    def step(self) -> StepMetadata:
        """What the workers are told next."""
        ...

    def incarnations_in_use(self) -> Container[str]:
        """Peers that must not be forgotten."""
        ...

    def tell(self, subject: Subject, fact: IntakeFact) -> None:
        """What happened. Under the lock."""
        ...


class Asking:
    """``lock`` is the scheduler half's; ``ask`` is called under it."""

    def __init__(
        self,
        owner: Owner,
        *,
        card: EngineCard,
        side: SideChannelThread[Message],
        stats: ShuttleStats,
        lock: threading.RLock,
    ) -> None:
        self._owner = owner
        self._card = card
        self._side = side
        self._stats = stats
        self._lock = lock
        self.peers = Peers(card)

    def ask(self, subject: Subject, action: Asked) -> None:
        """Send what a machine wants sent. What gets no answer is that machine's own business."""
        match action:
            case SendAcquire():
                self._send(functools.partial(self._acquire, subject=subject, action=action))
            case SendRenew():
                then = functools.partial(self._on_renewed, subject, action.ordinal)
                self._request(subject, action.message, action.timeout_s, then)
            case SendRelease():
                self._request(subject, action.message, _RELEASE_TIMEOUT_S, lambda _reply: None)
            case SendRegister():
                then = functools.partial(self._on_registered, subject)
                self._request(subject, action.message, action.timeout_s + _LATE_ANSWER_S, then)
            case SendProceed():
                self._request(
                    subject, action.message, action.timeout_s, functools.partial(self._on_proceeding, subject)
                )
            case SendWithdraw():
                then = functools.partial(self._on_withdrawn, subject, action.message.lease_id)
                self._request(subject, action.message, action.timeout_s, then)

    def _send(self, function: Callable[[Endpoint[Message]], None]) -> None:
        try:
            self._side.submit(function)
        except TransportError as error:
            # Stopping, or far behind: the machine's own deadlines end what waits for this.
            logger.warning("kvshuttle: not sent: %s", error)

    def _request(self, subject: Subject, message: Message, timeout_s: float, on_reply: OnReply[Message]) -> None:
        address = subject.source.address
        self._send(lambda side: side.request(address, message, timeout_s=timeout_s, on_reply=on_reply))

    # -- pull -------------------------------------------------------------------------------------

    def _acquire(self, side: Endpoint[Message], *, subject: Subject, action: SendAcquire) -> None:
        source = subject.source
        with self._lock:
            is_known = self.peers.is_known(source.address, source.incarnation, now_s=now_s())
        message: Message = action.message
        on_reply: OnReply[Message] = functools.partial(self._on_acquire_reply, subject, now_s())
        if not is_known:
            message = Hello(protocol_version=PROTOCOL_VERSION, sender=self._card.engine_id)
            on_reply = functools.partial(self._on_hello_reply, side, subject, action)
        side.request(source.address, message, timeout_s=action.timeout_s + _LATE_ANSWER_S, on_reply=on_reply)

    def _on_hello_reply(
        self, side: Endpoint[Message], subject: Subject, action: SendAcquire, reply: Message | KvshuttleError
    ) -> None:
        if not isinstance(reply, HelloAck):
            self._tell(subject, PeerFailed(f"hello: {reply}"))
            return
        source = subject.source
        refusal = self.peers.refusal(reply.card, source.incarnation)
        if refusal is not None:
            self._tell(subject, AcquireAnswered(refusal))
            return
        with self._lock:
            in_use = self._owner.incarnations_in_use()
            self.peers.meet(source.address, reply.card, self._owner.step, in_use=in_use, now_s=now_s())
            # The reading side may have given up while the hello was on its way.
            is_wanted = not subject.is_settled
        if is_wanted:
            self._acquire(side, subject=subject, action=action)

    def _on_acquire_reply(self, subject: Subject, started_at_s: float, reply: Message | KvshuttleError) -> None:
        with self._lock:
            self._stats.observe("acquire_seconds", value=now_s() - started_at_s)
        if isinstance(reply, Acquired | Denied):
            self._tell(subject, AcquireAnswered(reply))
        else:
            self._tell(subject, PeerFailed(f"acquire: {reply}"))

    def _on_renewed(self, subject: Subject, ordinal: int, reply: Message | KvshuttleError) -> None:
        if isinstance(reply, Renewed):
            self._tell(subject, RenewAnswered(ordinal, reply))
        else:
            self._tell(subject, PeerFailed(f"renew: {reply}"))

    # -- push -------------------------------------------------------------------------------------

    def _on_registered(self, subject: Subject, reply: Message | KvshuttleError) -> None:
        if isinstance(reply, Registered | Declined):
            self._tell(subject, RegisterAnswered(reply))
        else:
            self._tell(subject, RegisterFailed(f"register: {reply}"))

    def _on_proceeding(self, subject: Subject, reply: Message | KvshuttleError) -> None:
        if isinstance(reply, Proceeding | Declined):
            self._tell(subject, ProceedAnswered(reply))

    def _on_withdrawn(self, subject: Subject, lease_id: str, reply: Message | KvshuttleError) -> None:
        if isinstance(reply, Withdrawn | Declined):
            self._tell(subject, WithdrawAnswered(lease_id, reply))

    def _tell(self, subject: Subject, fact: IntakeFact) -> None:
        with self._lock:
            self._owner.tell(subject, fact)
