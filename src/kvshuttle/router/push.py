"""A pair of legs sent at once: the decode engine reserves room while the prefill engine computes into it.

::

    both sent ──┬─ decode begins first ─────────────────────────────── pass on; the prefill leg may end on its own
                ├─ prefill ends well ── decode has its own deadline ── decode begins ── pass on
                ├─ prefill fails ────── decode leg closed ──────────── ladder
                ├─ prefill refuses ──── decode leg closed ──────────── the decode engine is asked about the original
                └─ decode fails ─────── prefill leg closed ─────────── ladder

Once the decode leg has begun, its answer is right whatever becomes of the prefill leg: it either has the KV, or has
computed the prompt itself. A prefill leg that outlives its request is read to its end within its own deadline,
since it loads its engine until then, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING

from kvshuttle.handoff.params import DecodeLeg, Mode, PrefillResult
from kvshuttle.router.legs import DecodeCall, run_prefill
from kvshuttle.router.registry import peer_of
from kvshuttle.router.telemetry import Window
from kvshuttle.router.trip import Answer, LegFailed

if TYPE_CHECKING:
    from kvshuttle.router.registry import Engine
    from kvshuttle.router.trip import Dispatch, Trip

Prefilling = asyncio.Task[Answer | PrefillResult | None]
Beginning = asyncio.Task[Answer | None]


class PushPair:
    """One dispatch of both legs."""

    def __init__(self, trip: Trip, prefill: Engine, decode: Engine) -> None:
        self._trip = trip
        self._prefill = prefill
        self._decode = decode

    async def run(self) -> Answer | None:
        """Serve the client; None when it has its answer. An ``Answer``: the prefill engine refuses, nobody was told.

        Raises ``LegFailed`` when another attempt may follow. No leg outlives this call but a prefill leg whose
        client has its answer already.
        """
        trip = self._trip
        trip.receipt.window, trip.receipt.prefill_engine = Window.PREFILL, self._prefill.name
        prefill_timeout_s = trip.within_total(trip.config.prefill_timeout_s)
        dispatch = trip.dispatch(self._prefill)
        leg = DecodeLeg(dispatch.transfer_id, peer_of(self._prefill), Mode.PUSH, trip.turn.keep_at(self._decode))
        with closing(DecodeCall(trip, self._decode, leg, dispatch)) as call:
            call.expect(after_s=prefill_timeout_s)
            return await self._run_both(call, dispatch, prefill_timeout_s)

    async def _run_both(self, call: DecodeCall, dispatch: Dispatch, prefill_timeout_s: float) -> Answer | None:
        prefilling = self._start_prefill(dispatch, prefill_timeout_s)
        beginning = asyncio.create_task(call.begin())
        is_served = False
        try:
            refusal = await self._until_begun(call, prefilling, beginning)
            if refusal is None:
                is_served = await self._deliver(call, beginning.result())
            return refusal
        finally:
            if not is_served:
                await _stop(prefilling, beginning)
                if dispatch.is_running:
                    self._trip.release()

    def _start_prefill(self, dispatch: Dispatch, timeout_s: float) -> Prefilling:
        prefilling = asyncio.create_task(run_prefill(self._trip, dispatch, Mode.PUSH, timeout_s))
        late_legs = self._trip.routing.late_legs
        late_legs.add(prefilling)
        prefilling.add_done_callback(late_legs.discard)
        return prefilling

    async def _until_begun(self, call: DecodeCall, prefilling: Prefilling, beginning: Beginning) -> Answer | None:
        """Wait for the decode leg's beginning; an ``Answer`` is the prefill engine's refusal. Raises ``LegFailed``."""
        await asyncio.wait((prefilling, beginning), return_when=asyncio.FIRST_COMPLETED)
        if not beginning.done():
            result = prefilling.result()
            if isinstance(result, Answer):
                return result
            self._trip.receipt.window = Window.DECODE
            call.expect()
            await asyncio.wait((beginning,))
        # What the ladder or the client gets is the decode leg's word from here on, so nobody else looks at the other's.
        prefilling.add_done_callback(self._note_failure)
        return None

    async def _deliver(self, call: DecodeCall, answer: Answer | None) -> bool:
        """True when the client has a whole and good answer."""
        if answer is None:
            return await call.pass_on()
        self._trip.answer(answer)
        return answer.status < 400

    def _note_failure(self, prefilling: Prefilling) -> None:
        if prefilling.cancelled():
            return
        error = prefilling.exception()
        if isinstance(error, LegFailed):
            self._trip.note_failure(error.leg, error.engine, error.error.reason)


async def _stop(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
