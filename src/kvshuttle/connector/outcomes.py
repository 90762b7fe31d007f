"""How a request's getting of KV ended: what its outcomes mean, told once in metrics and in the log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvshuttle.connector.readings import HISTORY, INTERNAL_ERROR
from kvshuttle.handoff.fetch import Fetch
from kvshuttle.handoff.fetch_protocol import Outcome
from kvshuttle.handoff.intake_protocol import PushOutcome

if TYPE_CHECKING:
    from kvshuttle.connector.readings import Reading
    from kvshuttle.connector.stats import ShuttleStats
    from kvshuttle.handoff.intake import Intake

logger = logging.getLogger(__name__)

LOADED = {Outcome.READ_OK, PushOutcome.RECEIVED}
"""Outcomes that mean that the tokens are here."""
_SERVED = LOADED | {
    Outcome.FULL_LOCAL_HIT,
    Outcome.LOCAL_COVERS_VERIFIED,
    Outcome.BELOW_THRESHOLD,
    PushOutcome.FULL_LOCAL_HIT,
    PushOutcome.BELOW_THRESHOLD,
}
"""Outcomes that are as planned; every other one means that the prompt is recomputed, which is worth a line."""
_ABORTED = {Outcome.ABORTED, PushOutcome.ABORTED}


def tell_outcome(reading: Reading, stats: ShuttleStats) -> None:
    """Count a reading's outcome when it has one, the first time; and write a line where it is not as planned."""
    outcome = reading.fetch.outcome
    if reading.is_counted or (outcome is None and not reading.is_broken):
        return
    reading.is_counted = True
    if outcome is None or reading.is_broken:
        # What a bug ends is logged where it raised.
        stats.count("transfers", reading.direction, INTERNAL_ERROR)
        return
    if isinstance(reading.fetch, Fetch):
        stats.count("transfers", reading.direction, str(outcome))
    else:
        _count_push(reading.fetch, outcome, stats)
    if outcome not in _SERVED | _ABORTED:
        text = (reading.request_id, outcome, reading.fetch.detail)
        if reading.direction == HISTORY:
            # An everyday thing: turns are kept for a time only.
            logger.info("kvshuttle: %s is recomputed: %s %s", *text)
        else:
            logger.warning("kvshuttle: %s is recomputed: %s %s", *text)


def _count_push(intake: Intake, outcome: Outcome | PushOutcome, stats: ShuttleStats) -> None:
    """Where a fetch took over, both have an outcome."""
    if intake.fallback is None or intake.claim is None or outcome is PushOutcome.RECEIVED:
        stats.count("transfers", "push", str(outcome))
    else:
        stats.count("transfers", "push", str(intake.claim.why))
        stats.count("transfers", "read", str(outcome))
