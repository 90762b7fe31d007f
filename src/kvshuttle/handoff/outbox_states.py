"""Where an outbox can stand and what moves it.

``OUTBOX_TRANSITIONS`` is the protocol: the machine in ``outbox.py`` moves by it and nothing else, and
``docs/protocol.md`` is written from it.
"""

from __future__ import annotations

from enum import StrEnum


class OutboxState(StrEnum):
    """Where one registration stands in one of the holder's workers."""

    WRITING = "writing"
    """What is computed and not written yet is submitted."""
    SETTLING = "settling"
    """The source restarted: writes of its earlier epochs are awaited before the first of the new one is submitted."""
    COMMITTED = "committed"
    """Everything was written and the reader told. Nothing is ever submitted again."""
    FAILED = "failed"
    """A write failed and the reader was told. Nothing is submitted; writes under way are awaited."""
    CLOSED = "closed"
    """The scheduler half said stop. Nothing is submitted or committed; writes under way are awaited."""
    ENDED = "ended"
    """Closed, and nothing is under way. Forgotten."""


class OutboxTrigger(StrEnum):
    """What moves an outbox: a fact after inspection."""

    SUBMITTED = "submitted"
    """A write was handed to the driver: it is under way from here on."""
    WRITE_ENDED = "write_ended"
    """A write touches no memory any more."""
    WRITE_FAILED = "write_failed"
    """A write will not succeed; it may still touch memory."""
    ALL_WRITTEN = "all_written"
    """The prompt is computed, every block of it was submitted, and every write has ended well."""
    RESTARTED = "restarted"
    """The source restarted, with nothing under way."""
    RESTARTED_UNDER_WAY = "restarted_under_way"
    """The source restarted while writes were under way."""
    SETTLED = "settled"
    """The last write of earlier epochs has ended."""
    CLOSED = "closed"
    """Order of the scheduler half."""
    DRAINED = "drained"
    """Closed, and the last write has ended."""


_S, _T = OutboxState, OutboxTrigger

OUTBOX_TRANSITIONS: dict[tuple[OutboxState, OutboxTrigger], OutboxState] = {
    (_S.WRITING, _T.SUBMITTED): _S.WRITING,
    (_S.WRITING, _T.WRITE_ENDED): _S.WRITING,
    (_S.WRITING, _T.WRITE_FAILED): _S.FAILED,
    (_S.WRITING, _T.ALL_WRITTEN): _S.COMMITTED,
    (_S.WRITING, _T.RESTARTED): _S.WRITING,
    (_S.WRITING, _T.RESTARTED_UNDER_WAY): _S.SETTLING,
    (_S.WRITING, _T.CLOSED): _S.CLOSED,
    (_S.SETTLING, _T.WRITE_ENDED): _S.SETTLING,
    (_S.SETTLING, _T.WRITE_FAILED): _S.FAILED,
    (_S.SETTLING, _T.RESTARTED_UNDER_WAY): _S.SETTLING,
    (_S.SETTLING, _T.SETTLED): _S.WRITING,
    (_S.SETTLING, _T.CLOSED): _S.CLOSED,
    (_S.COMMITTED, _T.RESTARTED): _S.COMMITTED,
    (_S.COMMITTED, _T.CLOSED): _S.CLOSED,
    (_S.FAILED, _T.WRITE_ENDED): _S.FAILED,
    (_S.FAILED, _T.WRITE_FAILED): _S.FAILED,
    (_S.FAILED, _T.RESTARTED): _S.FAILED,
    (_S.FAILED, _T.RESTARTED_UNDER_WAY): _S.FAILED,
    (_S.FAILED, _T.CLOSED): _S.CLOSED,
    (_S.CLOSED, _T.WRITE_ENDED): _S.CLOSED,
    (_S.CLOSED, _T.WRITE_FAILED): _S.CLOSED,
    (_S.CLOSED, _T.RESTARTED_UNDER_WAY): _S.CLOSED,
    (_S.CLOSED, _T.DRAINED): _S.ENDED,
}
"""Every allowed move. A repeated fact changes nothing; anything else raises ``LocalProtocolError``."""
