"""Where a fetch can stand and what moves it.

``TRANSITIONS`` is the protocol: the machine in ``fetch.py`` moves by it and nothing else, and
``docs/protocol.md`` is written from it.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a fetch stands."""

    NEW = "new"
    """Nothing sent yet."""
    ACQUIRING = "acquiring"
    """The acquire is on its way; the request waits."""
    LEASED = "leased"
    """The peer keeps the blocks; the engine has not admitted the load yet. Renewing."""
    READING = "reading"
    """The workers read. Renewing."""
    ABANDONED = "abandoned"
    """Not needed any more while the acquire is on its way: a lease it brings is given back."""
    DRAINING = "draining"
    """The request ended while the workers read: their end is awaited, then the lease is given back."""
    ENDED = "ended"
    """Nothing is held, lent or in flight; ``outcome`` says why. A lease that still turns up is given back."""


class Trigger(StrEnum):
    """What moves a fetch: a fact after inspection, or the clock."""

    START = "start"
    """The driver sends the acquire."""
    GRANTED = "granted"
    """A lease came. Late or doubled (so neither ACQUIRING nor ABANDONED), it is given back unless it is the own one."""
    DENIED = "denied"
    """The holder does not lend."""
    BAD_ANSWER = "bad_answer"
    """A grant that cannot be true."""
    PEER_FAILED = "peer_failed"
    """No usable answer. After a grant it was a renew that failed; the next one is due before the lease ends."""
    ACQUIRE_TIMED_OUT = "acquire_timed_out"
    """Timer."""
    WAITED_TOO_LONG = "waited_too_long"
    """Timer."""
    RENEWED = "renewed"
    """A renew was answered. An answer to an older renew, or one that makes no sense, extends nothing."""
    LEASE_LOST = "lease_lost"
    """Timer, or the holder says that the lease is gone."""
    LOAD_ADMITTED = "load_admitted"
    """The engine took the offer, and there is time to read."""
    LOAD_TOO_LATE = "load_too_late"
    """The engine took an offer that a lost lease has made void."""
    LOAD_FAILED = "load_failed"
    """The driver confirms a ``FailLoad``."""
    NOTHING_TO_READ = "nothing_to_read"
    """The engine admitted the request without a load."""
    READ_ENDED = "read_ended"
    """The workers are done, well or badly."""
    REQUEST_ENDED = "request_ended"
    """The request finished or was aborted."""


_S, _T = State, Trigger

TRANSITIONS: dict[tuple[State, Trigger], State] = {
    (_S.NEW, _T.START): _S.ACQUIRING,
    (_S.NEW, _T.NOTHING_TO_READ): _S.ENDED,
    (_S.NEW, _T.REQUEST_ENDED): _S.ENDED,
    (_S.ACQUIRING, _T.GRANTED): _S.LEASED,
    (_S.ACQUIRING, _T.DENIED): _S.ENDED,
    (_S.ACQUIRING, _T.BAD_ANSWER): _S.ENDED,
    (_S.ACQUIRING, _T.PEER_FAILED): _S.ENDED,
    (_S.ACQUIRING, _T.ACQUIRE_TIMED_OUT): _S.ENDED,
    (_S.ACQUIRING, _T.NOTHING_TO_READ): _S.ABANDONED,
    (_S.ACQUIRING, _T.REQUEST_ENDED): _S.ABANDONED,
    (_S.LEASED, _T.GRANTED): _S.LEASED,
    (_S.LEASED, _T.DENIED): _S.LEASED,
    (_S.LEASED, _T.RENEWED): _S.LEASED,
    (_S.LEASED, _T.PEER_FAILED): _S.LEASED,
    (_S.LEASED, _T.LEASE_LOST): _S.ENDED,
    (_S.LEASED, _T.WAITED_TOO_LONG): _S.ENDED,
    (_S.LEASED, _T.LOAD_ADMITTED): _S.READING,
    (_S.LEASED, _T.LOAD_TOO_LATE): _S.ENDED,
    (_S.LEASED, _T.NOTHING_TO_READ): _S.ENDED,
    (_S.LEASED, _T.REQUEST_ENDED): _S.ENDED,
    (_S.READING, _T.GRANTED): _S.READING,
    (_S.READING, _T.DENIED): _S.READING,
    (_S.READING, _T.RENEWED): _S.READING,
    (_S.READING, _T.PEER_FAILED): _S.READING,
    (_S.READING, _T.LEASE_LOST): _S.READING,
    (_S.READING, _T.READ_ENDED): _S.ENDED,
    (_S.READING, _T.REQUEST_ENDED): _S.DRAINING,
    (_S.ABANDONED, _T.GRANTED): _S.ENDED,
    (_S.ABANDONED, _T.DENIED): _S.ENDED,
    (_S.ABANDONED, _T.BAD_ANSWER): _S.ENDED,
    (_S.ABANDONED, _T.PEER_FAILED): _S.ENDED,
    (_S.ABANDONED, _T.ACQUIRE_TIMED_OUT): _S.ENDED,
    (_S.ABANDONED, _T.NOTHING_TO_READ): _S.ABANDONED,
    (_S.ABANDONED, _T.REQUEST_ENDED): _S.ABANDONED,
    (_S.DRAINING, _T.GRANTED): _S.DRAINING,
    (_S.DRAINING, _T.DENIED): _S.DRAINING,
    (_S.DRAINING, _T.RENEWED): _S.DRAINING,
    (_S.DRAINING, _T.PEER_FAILED): _S.DRAINING,
    (_S.DRAINING, _T.READ_ENDED): _S.ENDED,
    (_S.DRAINING, _T.REQUEST_ENDED): _S.DRAINING,
    (_S.ENDED, _T.GRANTED): _S.ENDED,
    (_S.ENDED, _T.DENIED): _S.ENDED,
    (_S.ENDED, _T.RENEWED): _S.ENDED,
    (_S.ENDED, _T.PEER_FAILED): _S.ENDED,
    (_S.ENDED, _T.LOAD_TOO_LATE): _S.ENDED,
    (_S.ENDED, _T.LOAD_FAILED): _S.ENDED,
    (_S.ENDED, _T.NOTHING_TO_READ): _S.ENDED,
    (_S.ENDED, _T.REQUEST_ENDED): _S.ENDED,
}
"""Every allowed move. A repeated fact changes nothing; anything else raises ``LocalProtocolError``."""
