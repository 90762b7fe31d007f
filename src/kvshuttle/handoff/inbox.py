"""Registrations in one of the reader's workers: counts what has arrived until all that the commit names is there.

::

    EARLY -> EXPECTING -> COMPLETE
                 |------> FAILED
                 +------> ABANDONED

Notifications may come in any order, twice, or before the engine's step that says to expect them; each carries its
registration and the source's epoch. An epoch that is behind the latest one heard of counts for nothing.

Invariants:

1. COMPLETE means: one commit was seen, and each of the writes it names, of the same epoch, and together they have
   exactly the blocks that were expected. The holder commits when its writes have ended, and the transport delivers a
   write's notification after its bytes: either alone would do, and both are asked for.
2. Each expected registration has one result at most, and none after it was abandoned.
3. What was never expected is bounded in number and in time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvshuttle.errors import LocalProtocolError
from kvshuttle.handoff.notifications import Commit, Fail, Notification, Written

MAX_EARLY = 4096
EARLY_LIFE_S = 60.0
"""How long notifications wait for the step that expects them; after it they are leftovers of something abandoned."""
_MAX_WRITES = 1 << 20


class InboxState(StrEnum):
    """Where one registration stands in one of the reader's workers."""

    EARLY = "early"
    """Something came before the engine's step said what to expect."""
    EXPECTING = "expecting"
    """The engine waits; not everything is here."""
    COMPLETE = "complete"
    """Everything is in place."""
    FAILED = "failed"
    """The holder says that there will be no commit, or its commit cannot be true."""
    ABANDONED = "abandoned"
    """The engine does not wait for it any more. Forgotten."""


class InboxTrigger(StrEnum):
    """What moves an inbox: a fact after inspection."""

    EXPECTED = "expected"
    """The scheduler half's order."""
    NOTED = "noted"
    """A notification that does not complete anything."""
    COMPLETED = "completed"
    """The last piece is here."""
    FAILED = "failed"
    """The holder failed, or contradicts itself."""
    ABANDONED = "abandoned"
    """The scheduler half's order."""


_S, _T = InboxState, InboxTrigger

INBOX_TRANSITIONS: dict[tuple[InboxState, InboxTrigger], InboxState] = {
    (_S.EARLY, _T.NOTED): _S.EARLY,
    (_S.EARLY, _T.EXPECTED): _S.EXPECTING,
    (_S.EARLY, _T.ABANDONED): _S.ABANDONED,
    (_S.EXPECTING, _T.NOTED): _S.EXPECTING,
    (_S.EXPECTING, _T.COMPLETED): _S.COMPLETE,
    (_S.EXPECTING, _T.FAILED): _S.FAILED,
    (_S.EXPECTING, _T.ABANDONED): _S.ABANDONED,
    (_S.COMPLETE, _T.NOTED): _S.COMPLETE,
    (_S.COMPLETE, _T.ABANDONED): _S.ABANDONED,
    (_S.FAILED, _T.NOTED): _S.FAILED,
    (_S.FAILED, _T.ABANDONED): _S.ABANDONED,
}
"""Every allowed move. A repeated fact changes nothing; anything else raises ``LocalProtocolError``."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Blocks are in place that were not before: the holder is alive."""

    registration_id: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PushReceived:
    """Everything that this rank expected is in place."""

    registration_id: str


@dataclass(frozen=True, slots=True)
class PushFailed:
    """It will not come. Something may still be written."""

    registration_id: str
    reason: str


InboxEvent = Arrived | PushReceived | PushFailed


class Inbox:
    """One registration. ``born_at_s``: when its first notification or its order came."""

    def __init__(self, registration_id: str, *, born_at_s: float) -> None:
        self.registration_id = registration_id
        self.born_at_s = born_at_s
        self.state = InboxState.EARLY
        self._num_expected_blocks = 0
        self._epoch = -1
        self._written: dict[int, int] = {}
        self._commit: Commit | None = None
        self._failure = ""

    def __repr__(self) -> str:
        return f"<Inbox {self.registration_id} {self.state.upper()} epoch={self._epoch} writes={len(self._written)}>"

    def expect(self, num_blocks: int) -> tuple[InboxEvent, ...]:
        """The engine waits for so many blocks. Raises ``LocalProtocolError`` when it does already."""
        self._move(InboxTrigger.EXPECTED)
        self._num_expected_blocks = num_blocks
        return self._settle()

    def on_notification(self, notification: Notification) -> tuple[InboxEvent, ...]:
        """The holder's worker says something."""
        self._move(InboxTrigger.NOTED)
        arrived: tuple[InboxEvent, ...] = ()
        match notification:
            case Written() if self._is_current(notification.epoch) and notification.sequence not in self._written:
                if len(self._written) < _MAX_WRITES:
                    self._written[notification.sequence] = notification.num_blocks
                    arrived = (Arrived(self.registration_id, notification.num_blocks),)
            case Commit() if self._is_current(notification.epoch):
                self._commit = self._commit or notification
            case Fail():
                self._failure = self._failure or notification.reason or "unspecified"
        return (*arrived, *self._settle())

    def abandon(self) -> None:
        """The engine waits no more."""
        self._move(InboxTrigger.ABANDONED)

    def _is_current(self, epoch: int) -> bool:
        if epoch > self._epoch:
            self._epoch = epoch
            self._written.clear()
            self._commit = None
        return epoch == self._epoch

    def _settle(self) -> tuple[InboxEvent, ...]:
        if self.state is not InboxState.EXPECTING:
            return ()
        if self._failure:
            return self._fail(self._failure)
        commit = self._commit
        if commit is None:
            return ()
        is_here = all(sequence in self._written for sequence in range(commit.num_writes))
        is_right = commit.num_blocks == self._num_expected_blocks
        if not is_right or (is_here and sum(self._written.values()) != commit.num_blocks):
            return self._fail("bad_commit")
        if is_here:
            self._move(InboxTrigger.COMPLETED)
        return (PushReceived(self.registration_id),) if is_here else ()

    def _fail(self, reason: str) -> tuple[InboxEvent, ...]:
        self._move(InboxTrigger.FAILED)
        return (PushFailed(self.registration_id, reason),)

    def _move(self, trigger: InboxTrigger) -> None:
        state = INBOX_TRANSITIONS.get((self.state, trigger))
        if state is None:
            raise LocalProtocolError(f"{self!r} does not allow {trigger}")
        self.state = state


class Inboxes:
    """All registrations of one of the reader's workers."""

    def __init__(self, *, max_early: int = MAX_EARLY) -> None:
        self._max_early = max_early
        self._inboxes: dict[str, Inbox] = {}

    def __repr__(self) -> str:
        return f"<Inboxes {len(self._inboxes)} early={len(self._early())}>"

    def expect(self, registration_id: str, num_blocks: int, *, now_s: float) -> tuple[InboxEvent, ...]:
        """The engine waits for so many blocks under a registration."""
        return self._get(registration_id, now_s).expect(num_blocks)

    def on_notification(self, notification: Notification, *, now_s: float) -> tuple[InboxEvent, ...]:
        """A holder's worker says something."""
        return self._get(notification.registration_id, now_s).on_notification(notification)

    def abandon(self, registration_id: str) -> bool:
        """The engine waits no more, or has its result. True when everything had arrived before."""
        inbox = self._inboxes.pop(registration_id, None)
        if inbox is None:
            return False
        is_complete = inbox.state is InboxState.COMPLETE
        inbox.abandon()
        return is_complete

    def expire(self, now_s: float) -> None:
        """Forget what nobody has come to expect."""
        for inbox in self._early():
            if now_s - inbox.born_at_s >= EARLY_LIFE_S:
                del self._inboxes[inbox.registration_id]

    @property
    def num_expecting(self) -> int:
        """Registrations that the engine waits for."""
        return sum(inbox.state is InboxState.EXPECTING for inbox in self._inboxes.values())

    @property
    def is_drained(self) -> bool:
        """Nothing is expected, and nothing came unexpected."""
        return not self._inboxes

    def _get(self, registration_id: str, now_s: float) -> Inbox:
        inbox = self._inboxes.get(registration_id)
        if inbox is None:
            early = self._early()
            if len(early) >= self._max_early:
                del self._inboxes[early[0].registration_id]
            inbox = self._inboxes[registration_id] = Inbox(registration_id, born_at_s=now_s)
        return inbox

    def _early(self) -> list[Inbox]:
        return [inbox for inbox in self._inboxes.values() if inbox.state is InboxState.EARLY]
