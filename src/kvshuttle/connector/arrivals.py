"""A worker's incoming pushes: which load each one is for, and what the notifications of the holder's worker come to.

What this promises about answers: each load that is expected gets exactly one ``ReadResult`` from here, unless it is
abandoned before. One thread owns it: the comm thread.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.clock import now_s
from kvshuttle.connector.reads import ReadResult
from kvshuttle.errors import RemoteProtocolError
from kvshuttle.handoff.inbox import Arrived, Inboxes, PushFailed, PushReceived
from kvshuttle.handoff.notifications import decode_notification

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvshuttle.connector.reads import ReadOutcome
    from kvshuttle.connector.step_metadata import PushExpectation
    from kvshuttle.handoff.inbox import InboxEvent

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PushNews:
    """Something of this request's push has arrived; or, with a reason, the rest will not."""

    request_id: str
    failure: str = ""


class Arrivals:
    """``report`` takes results and news; ``block_len_bytes``: of one block on this rank, all regions together."""

    def __init__(self, *, block_len_bytes: int, report: Callable[[ReadOutcome | PushNews], None]) -> None:
        self._block_len_bytes = block_len_bytes
        self._report = report
        self._inboxes = Inboxes()
        self._expected: dict[str, PushExpectation] = {}
        self._started_at_s: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Arrivals expected={len(self._expected)} {self._inboxes!r}>"

    @property
    def is_drained(self) -> bool:
        """Nothing is expected."""
        return not self._expected

    def expect(self, expectation: PushExpectation) -> None:
        """The engine waits for a push."""
        registration_id = expectation.registration_id
        self._expected[registration_id] = expectation
        self._started_at_s[registration_id] = now_s()
        self._on_events(self._inboxes.expect(registration_id, len(expectation.block_ids), now_s=now_s()))

    def abandon(self, request_id: str) -> bool:
        """The engine does not wait for it any more. False: nothing was expected, so its result is out already."""
        found = [each for each, expectation in self._expected.items() if expectation.request_id == request_id]
        for registration_id in found:
            self._forget(registration_id)
        return bool(found)

    def take(self, notifications: Iterable[tuple[str, bytes]]) -> None:
        """What the transport has brought. Nonsense is logged and dropped."""
        for sender, payload in notifications:
            try:
                notification = decode_notification(payload)
            except RemoteProtocolError as error:
                logger.warning("kvshuttle: from %s: %s", sender, error)
                continue
            self._on_events(self._inboxes.on_notification(notification, now_s=now_s()))

    def expire(self) -> None:
        """Forget what nobody has come to expect."""
        self._inboxes.expire(now_s())

    def _on_events(self, events: tuple[InboxEvent, ...]) -> None:
        for event in events:
            expectation = self._expected.get(event.registration_id)
            if expectation is None:
                continue
            match event:
                case Arrived():
                    self._report(PushNews(expectation.request_id))
                case PushFailed():
                    self._report(PushNews(expectation.request_id, event.reason))
                case PushReceived():
                    self._on_received(expectation)

    def _on_received(self, expectation: PushExpectation) -> None:
        waited_s = now_s() - self._started_at_s[expectation.registration_id]
        self._forget(expectation.registration_id)
        self._report(
            ReadResult(
                expectation.request_id,
                reason="",
                num_bytes=len(expectation.block_ids) * self._block_len_bytes,
                wire_s=waited_s,
                is_pushed=True,
            )
        )

    def _forget(self, registration_id: str) -> None:
        del self._expected[registration_id]
        del self._started_at_s[registration_id]
        self._inboxes.abandon(registration_id)
