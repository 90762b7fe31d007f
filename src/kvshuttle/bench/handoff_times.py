"""How long hand-offs took by the connector's own metrics, one hand-off at a time."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from kvshuttle.bench.calibration import HandOffTimes
from kvshuttle.bench.legs import complete, drive
from kvshuttle.bench.plan import SystemName
from kvshuttle.bench.systems import SYSTEMS
from kvshuttle.clock import now_s
from kvshuttle.emulate.model_dir import FIRST_WORD
from kvshuttle.errors import TransportError
from kvshuttle.launcher.chat import fetch_metrics
from kvshuttle.launcher.metrics import total_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvshuttle.bench.legs import Pair

_ANSWER_TOKENS = 2
_NUDGE = tuple(range(FIRST_WORD, FIRST_WORD + 8))
"""Engines tell their metrics with their next step, which such a prompt brings."""
_SETTLE_S = 3.0
_POLL_S = 0.05
_POST = "kvshuttle:transfer_post_seconds"
_WIRE = "kvshuttle:transfer_wire_seconds"
_ACQUIRE = "kvshuttle:acquire_seconds"


class HandOffTimer:
    """Drives hand-offs between two engines that nobody else uses."""

    def __init__(self, pair: Pair) -> None:
        self._pulling = replace(pair, system=SYSTEMS[SystemName.SHUTTLE_PULL])
        self._pushing = replace(pair, system=SYSTEMS[SystemName.SHUTTLE_PUSH])

    def hand_off(self, prompt: Sequence[int], *, is_push: bool) -> HandOffTimes:
        """One prompt, which the decode engine must not have. Raises ``TransportError`` when nothing was moved.

        A pull is timed by its reader, a push by its writer: all of the chunks together.
        """
        pair = self._pushing if is_push else self._pulling
        url, direction = (pair.prefill_url, "write") if is_push else (pair.decode_url, "read")
        before = self._settled_sums(url, direction)
        driven = drive(pair, prompt, output_tokens=_ANSWER_TOKENS)
        if driven.error:
            raise TransportError(f"the {'push' if is_push else 'pull'} of {len(prompt)} tokens failed: {driven.error}")
        deadline_at_s = now_s() + _SETTLE_S
        while (after := self._settled_sums(url, direction))[0] == before[0]:
            if now_s() > deadline_at_s:
                raise TransportError(
                    f"{url}: a prompt of {len(prompt)} tokens was handed off, but no {direction} counted"
                )
            time.sleep(_POLL_S)
        _, post_ms, wire_ms, acquire_ms = (b - a for a, b in zip(before, after, strict=True))
        return HandOffTimes(post_ms * 1000, wire_ms * 1000, 0.0 if is_push else acquire_ms * 1000)

    def _settled_sums(self, url: str, direction: str) -> tuple[float, float, float, float]:
        complete(url, _NUDGE, max_tokens=2, model=self._pulling.model)
        return _sums(url, direction)


def _sums(url: str, direction: str) -> tuple[float, float, float, float]:
    """How many transfers, and the sums of their posting, of their way, and of asking for them."""
    text = fetch_metrics(url)
    return (
        total_of(text, f"{_WIRE}_count", direction=direction),
        total_of(text, f"{_POST}_sum", direction=direction),
        total_of(text, f"{_WIRE}_sum", direction=direction),
        total_of(text, f"{_ACQUIRE}_sum"),
    )
