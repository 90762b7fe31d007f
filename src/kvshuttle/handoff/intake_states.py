"""Where an intake can stand and what moves it.

``INTAKE_TRANSITIONS`` is the protocol: the machine in ``intake.py`` moves by it and nothing else, and
``docs/protocol.md`` is written from it.
"""

from __future__ import annotations

from enum import StrEnum


class IntakeState(StrEnum):
    """Where an intake stands."""

    NEW = "new"
    """Offered to the engine, which has not admitted it yet. The holder knows nothing."""
    RECEIVING = "receiving"
    """The engine waits for the load, and the claim is not given up."""
    STOPPING = "stopping"
    """The claim is given up, and not over; the engine still waits."""
    FALLING_BACK = "falling_back"
    """The claim is over, and a fetch reads into the same blocks instead."""
    FAILING = "failing"
    """The claim is over, and the workers are about to report the load as failed."""
    QUARANTINED = "quarantined"
    """The load has failed or is about to, and the claim is not over: the blocks are kept out of use."""
    ENDED = "ended"
    """Nothing is waited for, kept or under way; ``outcome`` says why."""


class IntakeTrigger(StrEnum):
    """What moves an intake: a fact after inspection, or the clock."""

    LOAD_ADMITTED = "load_admitted"
    """The engine took the offer and reserved the blocks."""
    NOTHING_TO_READ = "nothing_to_read"
    """The engine admitted the request without a load."""
    GIVEN_UP = "given_up"
    """The claim is being withdrawn."""
    OVER_HOPEFUL = "over_hopeful"
    """The claim is over without having brought everything, and reading may still succeed."""
    OVER_HOPELESS = "over_hopeless"
    """The claim is over without having brought everything, and there is no use in reading."""
    OVER_LATE = "over_late"
    """The claim is over, after the load has ended."""
    UNCONFIRMED = "unconfirmed"
    """Timer: the claim is not over, and the engine shall not wait for that any longer."""
    FALLBACK_FAILED = "fallback_failed"
    """The fetch ended before it read."""
    RECEIVED = "received"
    """The workers report that everything arrived, perhaps at the last moment."""
    LOAD_ENDED = "load_ended"
    """The workers have reported the load's end, and the claim is over."""
    LOAD_FAILED = "load_failed"
    """The workers have reported the load as failed, and the claim is not over."""
    REQUEST_ENDED = "request_ended"
    """The request finished or was aborted. What the workers owe the engine is still waited for."""


_S, _T = IntakeState, IntakeTrigger

INTAKE_TRANSITIONS: dict[tuple[IntakeState, IntakeTrigger], IntakeState] = {
    (_S.NEW, _T.LOAD_ADMITTED): _S.RECEIVING,
    (_S.NEW, _T.NOTHING_TO_READ): _S.ENDED,
    (_S.NEW, _T.REQUEST_ENDED): _S.ENDED,
    (_S.RECEIVING, _T.GIVEN_UP): _S.STOPPING,
    (_S.RECEIVING, _T.OVER_HOPEFUL): _S.FALLING_BACK,
    (_S.RECEIVING, _T.OVER_HOPELESS): _S.FAILING,
    (_S.RECEIVING, _T.RECEIVED): _S.ENDED,
    (_S.RECEIVING, _T.LOAD_ENDED): _S.ENDED,
    (_S.RECEIVING, _T.LOAD_FAILED): _S.QUARANTINED,
    (_S.RECEIVING, _T.REQUEST_ENDED): _S.RECEIVING,
    (_S.STOPPING, _T.OVER_HOPEFUL): _S.FALLING_BACK,
    (_S.STOPPING, _T.OVER_HOPELESS): _S.FAILING,
    (_S.STOPPING, _T.UNCONFIRMED): _S.QUARANTINED,
    (_S.STOPPING, _T.RECEIVED): _S.ENDED,
    (_S.STOPPING, _T.LOAD_FAILED): _S.QUARANTINED,
    (_S.STOPPING, _T.REQUEST_ENDED): _S.STOPPING,
    (_S.FALLING_BACK, _T.FALLBACK_FAILED): _S.FAILING,
    (_S.FALLING_BACK, _T.RECEIVED): _S.ENDED,
    (_S.FALLING_BACK, _T.LOAD_ENDED): _S.ENDED,
    (_S.FALLING_BACK, _T.REQUEST_ENDED): _S.FALLING_BACK,
    (_S.FAILING, _T.RECEIVED): _S.ENDED,
    (_S.FAILING, _T.LOAD_ENDED): _S.ENDED,
    (_S.FAILING, _T.REQUEST_ENDED): _S.FAILING,
    (_S.QUARANTINED, _T.OVER_HOPELESS): _S.FAILING,
    (_S.QUARANTINED, _T.OVER_LATE): _S.ENDED,
    (_S.QUARANTINED, _T.RECEIVED): _S.ENDED,
    (_S.QUARANTINED, _T.LOAD_FAILED): _S.QUARANTINED,
    (_S.QUARANTINED, _T.REQUEST_ENDED): _S.QUARANTINED,
    (_S.ENDED, _T.NOTHING_TO_READ): _S.ENDED,
    (_S.ENDED, _T.REQUEST_ENDED): _S.ENDED,
}
"""Every allowed move. A repeated fact changes nothing; anything else raises ``LocalProtocolError``."""
