"""How a request is written down whose client leaves."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from kvshuttle.router.drive import Drive
from kvshuttle.router.telemetry import Outcome

if TYPE_CHECKING:
    from kvshuttle.router.trip import Trip


@pytest.mark.parametrize(
    ("outcome", "is_finished", "is_cut_off", "expected", "is_turn_cut_off"),
    [
        (Outcome.OK, False, False, Outcome.DISCONNECTED, True),
        # The engine broke off, the client was told, and leaves while the other leg is being ended.
        (Outcome.BROKEN_STREAM, True, False, Outcome.BROKEN_STREAM, True),
        (Outcome.UNAVAILABLE, True, False, Outcome.UNAVAILABLE, False),
        (Outcome.OK, True, False, Outcome.OK, False),
        # The router stops: the stream is ended with an error event, and its answer is not whole.
        (Outcome.OK, True, True, Outcome.DISCONNECTED, True),
    ],
)
def test_a_client_that_leaves_when_all_is_over_changes_nothing_about_the_outcome(
    outcome: Outcome, is_finished: bool, is_cut_off: bool, expected: Outcome, is_turn_cut_off: bool
) -> None:
    released, closed = [], []
    receipt = SimpleNamespace(outcome=outcome, history="", route=None)
    trip = SimpleNamespace(
        routing=None,
        config=None,
        request=None,
        receipt=receipt,
        responder=SimpleNamespace(is_finished=is_finished, is_cut_off=is_cut_off),
        release=lambda: released.append(True),
        turn=SimpleNamespace(close=lambda *, is_cut_off: closed.append(is_cut_off), result=""),
        is_over=False,
    )

    class Left(Drive):
        def _choose_route(self) -> None:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(Left(cast("Trip", trip), None).run())
    assert receipt.outcome is expected
    assert (released, closed, trip.is_over) == ([True], [is_turn_cut_off], True)
