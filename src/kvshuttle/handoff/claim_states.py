"""Where a claim can stand and what moves it.

``CLAIM_TRANSITIONS`` is the protocol: the machine in ``claim.py`` moves by it and nothing else, and
``docs/protocol.md`` is written from it.
"""

from __future__ import annotations

from enum import StrEnum


class ClaimState(StrEnum):
    """Where a claim stands."""

    REGISTERING = "registering"
    """The registration is on its way. The holder may not write before it is told to proceed."""
    STANDING = "standing"
    """The holder was told to proceed: it may be writing."""
    WITHDRAWING = "withdrawing"
    """The holder is asked until it says that nothing is under way."""
    OVER = "over"
    """Nothing is under way, and nothing will be."""


class ClaimTrigger(StrEnum):
    """What moves a claim: a fact after inspection, or the clock."""

    GRANTED = "granted"
    """The holder has noted the registration, and is told to proceed."""
    REFUSED = "refused"
    """It declined, gave no usable answer or none in time, or nobody wants it any more. It was never told to proceed."""
    PROCEEDING = "proceeding"
    """The holder says that the registration stands."""
    GIVEN_UP = "given_up"
    """It failed, took too long, or nobody wants it any more."""
    CONFIRMED = "confirmed"
    """The holder says that nothing is under way."""
    FINISHED = "finished"
    """Every worker has its commit."""
    DEAD = "dead"
    """The life of the holder that was meant is over."""


_S, _T = ClaimState, ClaimTrigger

CLAIM_TRANSITIONS: dict[tuple[ClaimState, ClaimTrigger], ClaimState] = {
    (_S.REGISTERING, _T.GRANTED): _S.STANDING,
    (_S.REGISTERING, _T.REFUSED): _S.OVER,
    (_S.STANDING, _T.PROCEEDING): _S.STANDING,
    (_S.STANDING, _T.GIVEN_UP): _S.WITHDRAWING,
    (_S.STANDING, _T.FINISHED): _S.OVER,
    (_S.STANDING, _T.DEAD): _S.OVER,
    (_S.WITHDRAWING, _T.CONFIRMED): _S.OVER,
    (_S.WITHDRAWING, _T.FINISHED): _S.OVER,
    (_S.WITHDRAWING, _T.DEAD): _S.OVER,
}
"""Every allowed move. Late and repeated answers change nothing; anything else raises ``LocalProtocolError``."""
