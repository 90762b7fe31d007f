"""Takes one inference request through its legs.

::

                       ┌─ push: place D ── both legs at once ─────────────────────┐
    choose a way ── PAIR: place P                                                 ├─ first data event ── pass through
         │             └─ pull: prefill leg ── place D ── decode leg ─────────────┤        │
         │                         │                          │                   │        │
         └─ LOCAL ─────────────────┴───── failure ladder ─────┘───────────────────┘   error event, cut off
                                               └── other attempt, fresh transfer id

Until the decode leg's first data event the client has seen nothing, so every failure becomes another attempt with a
fresh transfer id, preferring engines that did not fail this request, and after ``max_attempts`` what the policy
says. A handle that nobody will fetch is released at its holder in every case: failure, 4xx, cancellation.
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING

from kvshuttle.config import ModeChoice, PrefillFailurePolicy
from kvshuttle.handoff.params import DecodeLeg, LocalLeg, Mode
from kvshuttle.policy import (
    Following,
    ModeDecision,
    PlacementReason,
    Route,
    RouteReason,
    able_decodes,
    choose_mode,
    choose_route,
    may_append,
    place_decode,
    place_prefill,
)
from kvshuttle.router.exchange import FailureReason, LegError
from kvshuttle.router.legs import NEVER_ARRIVED, DecodeCall, run_prefill
from kvshuttle.router.push import PushPair
from kvshuttle.router.registry import peer_of
from kvshuttle.router.telemetry import Leg, Outcome, Plain, Stage, Window
from kvshuttle.router.trip import Answer, LegFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvshuttle.policy import EngineView
    from kvshuttle.router.registry import Engine
    from kvshuttle.router.trip import Dispatch, Trip

_FALL_BACK_REASONS = {
    PlacementReason.NO_ENGINE_UP: RouteReason.NO_PREFILL_ENGINE,
    PlacementReason.NO_COMPATIBLE_PAIR: RouteReason.NO_COMPATIBLE_PAIR,
    PlacementReason.MODEL_NOT_SERVED: RouteReason.MODEL_NOT_ON_PREFILL,
}
_NO_DECODE_ENGINE = "No decode engine is available."
_CUT_OFF = frozenset({Outcome.DISCONNECTED, Outcome.BROKEN_STREAM})
_ASK_DECODE_AFTER = frozenset({400, 404, 413, 422})


class Drive:
    """One request on its way. ``run`` answers through the responder, or raises ``RequestError`` before any byte.

    ``asked``: the mode that the request itself asks for.
    """

    def __init__(self, trip: Trip, asked: ModeChoice | None) -> None:
        self._trip = trip
        self._asked = asked
        self._routing = trip.routing
        self._config = trip.config
        self._request = trip.request
        self._receipt = trip.receipt
        self._num_attempts = 0

    async def run(self) -> None:
        """Serve the request. Raises ``RequestError`` when no engine could; cancellation releases what is held."""
        try:
            self._choose_route()
            while not await self._attempt():
                pass
        except asyncio.CancelledError:
            responder = self._trip.responder
            # Who leaves when the answer is over, whole or broken off, changes nothing about how it ended.
            if responder.is_cut_off or not responder.is_finished:
                self._receipt.outcome = Outcome.DISCONNECTED
            self._trip.release()
            raise
        finally:
            self._trip.is_over = True
            self._trip.turn.close(is_cut_off=self._receipt.outcome in _CUT_OFF)
            self._receipt.history = self._trip.turn.result

    # --- the ways ---

    async def _attempt(self) -> bool:
        """One dispatch of the pair, or of the decode leg alone. True when the client has its answer."""
        try:
            return await (self._pair() if self._receipt.route is Route.PAIR else self._local())
        except LegFailed as failure:
            self._trip.release()
            await self._after_failure(failure)
            return False

    async def _pair(self) -> bool:
        prefill = self._place_prefill()
        if prefill is None:
            return False
        decision = self._choose_mode(prefill)
        if decision.mode is ModeChoice.PULL:
            return await self._pull(prefill)
        decode = self._place_decode(decision.decodes, prefill)
        if decode is None:
            return False
        refusal = await PushPair(self._trip, prefill, decode).run()
        return refusal is None or self._pass_refusal(refusal)

    async def _pull(self, prefill: Engine) -> bool:
        trip, receipt = self._trip, self._receipt
        receipt.window, receipt.prefill_engine = Window.PREFILL, prefill.name
        source = peer_of(prefill)
        timeout_s = trip.within_total(self._config.prefill_timeout_s)
        dispatch = trip.dispatch(prefill)
        result = await run_prefill(trip, dispatch, Mode.PULL, timeout_s)
        receipt.window = Window.BETWEEN
        if isinstance(result, Answer):
            return self._pass_refusal(result)
        if result is None:
            self._routing.telemetry.count(Plain.PREFILL_NOT_HELD)
            trip.release()
        decode = self._place_decode(self._routing.registry.decode_views(), prefill if result else None)
        if decode is None:
            return False
        receipt.stages_s[Stage.GAP] = self._routing.now_s() - trip.prefilled_at_s
        if result is None:
            await self._decode(decode, self._local_leg(decode))
        else:
            keep = trip.turn.keep_at(decode)
            await self._decode(decode, DecodeLeg(dispatch.transfer_id, source, keep=keep), dispatch)
        return True

    async def _local(self) -> bool:
        decode = self._place_decode(self._routing.registry.decode_views(), None)
        if decode is None:
            return False
        await self._decode(decode, self._local_leg(decode))
        return True

    def _local_leg(self, decode: Engine) -> LocalLeg | None:
        turn = self._trip.turn
        leg = LocalLeg(turn.history_for(decode), turn.keep_at(decode))
        return None if leg == LocalLeg() else leg

    async def _decode(self, engine: Engine, leg: DecodeLeg | LocalLeg | None, dispatch: Dispatch | None = None) -> None:
        """A decode leg of its own, from sending to the client's last byte. Raises ``LegFailed``."""
        self._receipt.window = Window.DECODE
        with closing(DecodeCall(self._trip, engine, leg, dispatch)) as call:
            call.expect()
            answer = await call.begin()
            if answer is None:
                await call.pass_on()
            else:
                self._trip.answer(answer)

    # --- choices ---

    def _choose_route(self) -> None:
        config, traits, turn = self._config, self._request.traits, self._trip.turn
        decision = choose_route(traits, disaggregate_from_tokens=config.disaggregate_from_tokens)
        self._take(decision.route, decision.reason)
        following = turn.following(model=self._request.model, source=None, avoid=())
        if may_append(
            decision,
            num_new_tokens=turn.num_new_tokens,
            local_append_max_tokens=config.local_append_max_tokens,
            following=following[1] if following else None,
        ):
            self._take(Route.LOCAL, RouteReason.LOCAL_APPEND)

    def _choose_mode(self, prefill: Engine) -> ModeDecision:
        views = able_decodes(
            self._routing.registry.decode_views(),
            model=self._request.model,
            source=prefill.name,
            avoid=self._trip.avoid,
        )
        decision = choose_mode(self._config.mode, self._asked, views, num_tokens=self._request.traits.num_tokens)
        self._receipt.mode, self._receipt.mode_reason = Mode(decision.mode.value), decision.reason
        return decision

    def _place_prefill(self) -> Engine | None:
        """The engine for the prefill leg; None after a change of route."""
        registry = self._routing.registry
        if not any(engine.is_up for engine in registry.decodes):
            self._routing.telemetry.placed(Leg.DECODE, PlacementReason.NO_ENGINE_UP)
            self._take(Route.PAIR, RouteReason.NO_DECODE_ENGINE)
            self._trip.give_up(503, _NO_DECODE_ENGINE)
        placement = place_prefill(
            registry.prefill_views(),
            model=self._request.model,
            avoid=self._trip.avoid,
            draw=self._routing.rng.random(),
        )
        self._routing.telemetry.placed(Leg.PREFILL, placement.reason)
        if placement.engine is None:
            self._fall_back(_FALL_BACK_REASONS[placement.reason], 503)
            return None
        return registry.engines[placement.engine]

    def _place_decode(self, views: Sequence[EngineView], source: Engine | None) -> Engine | None:
        """The engine for the decode leg; None after a change of route. Raises ``RequestError`` when there is none."""
        model, avoid = self._request.model, self._trip.avoid
        source_name = source.name if source else None
        if following := self._trip.turn.following(model=model, source=source_name, avoid=avoid):
            holder, self._receipt.following = following
            if following[1] is Following.FOLLOWED:
                self._routing.telemetry.placed(Leg.DECODE, PlacementReason.HISTORY)
                return holder
        placement = place_decode(views, model=model, source=source_name, avoid=avoid, draw=self._routing.rng.random())
        self._routing.telemetry.placed(Leg.DECODE, placement.reason)
        if placement.engine is not None:
            return self._routing.registry.engines[placement.engine]
        self._trip.release()
        if placement.reason is PlacementReason.NO_ENGINE_UP:
            self._take(Route.PAIR if source else Route.LOCAL, RouteReason.NO_DECODE_ENGINE)
        if source is None or placement.reason is not PlacementReason.NO_COMPATIBLE_PAIR:
            self._trip.give_up(503, _NO_DECODE_ENGINE)
        self._fall_back(RouteReason.NO_COMPATIBLE_PAIR, 503)
        return None

    def _take(self, route: Route, reason: RouteReason) -> None:
        self._receipt.route, self._receipt.reason = route, reason
        self._receipt.mode = self._receipt.mode_reason = ""

    # --- the ladder ---

    async def _after_failure(self, failure: LegFailed) -> None:
        """Count a failed leg and decide how the request goes on. Raises ``RequestError`` when it does not."""
        leg, engine = failure.leg, failure.engine
        self._receipt.window = Window.BETWEEN
        self._trip.note_failure(leg, engine, failure.error.reason)
        self._trip.avoid.add(engine.name)
        self._num_attempts += 1
        is_computing = leg is (Leg.PREFILL if self._receipt.route is Route.PAIR else Leg.DECODE)
        if is_computing and failure.error.reason not in NEVER_ARRIVED:
            self._trip.turn.distrust()
        if self._receipt.reason is RouteReason.LOCAL_APPEND:
            self._take(Route.PAIR, RouteReason.DEFAULT)
        status = _status_after(failure.error)
        if self._num_attempts >= self._config.max_attempts:
            if leg is Leg.DECODE:
                self._trip.give_up(status, "The decode engines failed to answer.")
            self._fall_back(RouteReason.PREFILL_FAILED, status)
            return
        self._routing.telemetry.retried(leg)
        pause_s = self._config.retry_pause_s * 2 ** (self._num_attempts - 1)
        await asyncio.sleep(self._trip.within_total(pause_s))

    def _fall_back(self, reason: RouteReason, status: int) -> None:
        """Let the decode engine compute the prompt, if the policy allows it. Raises ``RequestError`` otherwise."""
        if not self._is_local_allowed():
            self._trip.give_up(status, "No prefill engine could serve the request.")
        self._take(Route.LOCAL, reason)

    def _pass_refusal(self, refusal: Answer) -> bool:
        """A 4xx of the prefill engine is about a body that we rewrote: ask the decode engine about the original."""
        self._trip.keep()
        if refusal.status in _ASK_DECODE_AFTER and self._is_local_allowed():
            self._take(Route.LOCAL, RouteReason.PREFILL_REFUSED)
            return False
        self._trip.answer(refusal)
        return True

    def _is_local_allowed(self) -> bool:
        is_allowed = self._config.prefill_failure_policy is PrefillFailurePolicy.RETRY_THEN_LOCAL
        return is_allowed and self._request.traits.num_tokens <= self._config.local_prefill_max_tokens


def _status_after(error: LegError) -> int:
    if error.reason is FailureReason.TIMEOUT:
        return 504
    is_busy = error.reason is FailureReason.CAPACITY or error.status == 503
    return 503 if is_busy else 502
