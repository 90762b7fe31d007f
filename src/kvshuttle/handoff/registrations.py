"""A reader's wish to be written to, as the holder's scheduler half keeps it: where it can stand and what moves it.

::

    REGISTERED -> CLEARED -> OPEN -> CLOSING -> ENDED
         |            |                           ^
         +------------+---------------------------+

``REGISTRATION_TRANSITIONS`` is the protocol: ``PushSource`` moves registrations by it and nothing else, and
``docs/protocol.md`` is written from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvshuttle.errors import LocalProtocolError
from kvshuttle.handoff.messages import DeclineReason, Stage

if TYPE_CHECKING:
    from kvshuttle.blocks import TokenChain
    from kvshuttle.handoff.messages import Register
    from kvshuttle.handoff.sources import Source
    from kvshuttle.ids import LeaseId


class RegistrationState(StrEnum):
    """Where a registration stands."""

    REGISTERED = "registered"
    """Noted. The reader has not said that it may be written to."""
    CLEARED = "cleared"
    """It may be written to; the prompt's request has not arrived."""
    OPEN = "open"
    """The workers have been told to write. Only from here on may anything land in the reader's blocks."""
    CLOSING = "closing"
    """The workers have been told to stop; not all of them have said that nothing is under way."""
    ENDED = "ended"
    """Nothing is under way, and nothing will be. Forgotten."""


class RegistrationTrigger(StrEnum):
    """What moves a registration: a fact after inspection, or the clock."""

    CLEARED = "cleared"
    """The reader says proceed, before the prompt's request is here."""
    OPENED = "opened"
    """The reader has said proceed, and the prompt's request is here with the very same tokens."""
    PROCEEDED = "proceeded"
    """The reader says proceed once more: its lease is extended."""
    WITHDRAWN = "withdrawn"
    """The reader wants nothing to be written any more."""
    EXPIRED = "expired"
    """Timer: the reader has not been heard of for the whole lease."""
    SOURCE_LOST = "source_lost"
    """The prompt's request ended without computing it, or has other tokens."""
    DRAINED = "drained"
    """Every worker has closed it and has no write of it under way."""


_S, _T = RegistrationState, RegistrationTrigger

REGISTRATION_TRANSITIONS: dict[tuple[RegistrationState, RegistrationTrigger], RegistrationState] = {
    (_S.REGISTERED, _T.CLEARED): _S.CLEARED,
    (_S.REGISTERED, _T.OPENED): _S.OPEN,
    (_S.REGISTERED, _T.WITHDRAWN): _S.ENDED,
    (_S.REGISTERED, _T.EXPIRED): _S.ENDED,
    (_S.REGISTERED, _T.SOURCE_LOST): _S.ENDED,
    (_S.CLEARED, _T.OPENED): _S.OPEN,
    (_S.CLEARED, _T.PROCEEDED): _S.CLEARED,
    (_S.CLEARED, _T.WITHDRAWN): _S.ENDED,
    (_S.CLEARED, _T.EXPIRED): _S.ENDED,
    (_S.CLEARED, _T.SOURCE_LOST): _S.ENDED,
    (_S.OPEN, _T.PROCEEDED): _S.OPEN,
    (_S.OPEN, _T.WITHDRAWN): _S.CLOSING,
    (_S.OPEN, _T.EXPIRED): _S.CLOSING,
    (_S.OPEN, _T.SOURCE_LOST): _S.CLOSING,
    (_S.CLOSING, _T.WITHDRAWN): _S.CLOSING,
    (_S.CLOSING, _T.SOURCE_LOST): _S.CLOSING,
    (_S.CLOSING, _T.DRAINED): _S.ENDED,
}
"""Every allowed move; anything else raises ``LocalProtocolError``."""


@dataclass(slots=True, eq=False)
class Registration:
    """One registration. ``pin``: keeps the source's blocks once the request has ended."""

    lease_id: LeaseId
    message: Register
    chain: TokenChain
    ends_at_s: float
    undrained_ranks: set[int]
    state: RegistrationState = RegistrationState.REGISTERED
    source: Source | None = None
    pin: LeaseId | None = None
    is_drop_wanted: bool = False
    why_closing: DeclineReason = DeclineReason.UNKNOWN_REGISTRATION

    @property
    def is_over(self) -> bool:
        """No clock matters any more."""
        return self.state in (RegistrationState.CLOSING, RegistrationState.ENDED)

    @property
    def stage(self) -> Stage:
        """How far its source is."""
        if self.source is None:
            return Stage.AWAITING_PREFILL
        return Stage.COMPUTING if self.source.block_ids is None else Stage.COMPUTED

    def move(self, trigger: RegistrationTrigger) -> None:
        """Take a step of the table."""
        state = REGISTRATION_TRANSITIONS.get((self.state, trigger))
        if state is None:
            raise LocalProtocolError(f"{self!r} does not allow {trigger}")
        self.state = state

    def __repr__(self) -> str:
        return f"<Registration {self.lease_id} {self.message.handle} {self.state.upper()}>"
