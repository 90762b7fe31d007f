"""Takes one inference request through its legs.

::

    choose a way ── PAIR ── place P ── prefill leg ── place D ── decode leg ── first data event ── pass through
         │                     │            │             │           │               │
         └─ LOCAL ─────────────┴── failure ladder ────────┘           │               └ failure: error event, cut off
                                            └── other attempt, fresh transfer id ─────┘

Until the decode leg's first data event the client has seen nothing, so every failure becomes another attempt with a
fresh transfer id, preferring engines that did not fail this request, and after ``max_attempts`` what the policy
says. A handle that nobody will fetch is released at its holder in every case: failure, 4xx, cancellation.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import orjson

from kvshuttle.config import PrefillFailurePolicy
from kvshuttle.errors import RequestError
from kvshuttle.handoff.params import DecodeLeg, Peer, PrefillLeg, parse_result, to_params
from kvshuttle.ids import mint
from kvshuttle.policy import PlacementReason, Route, RouteReason, choose_route, place_decode, place_prefill
from kvshuttle.router.exchange import FailureReason, LegError, ResponseHead
from kvshuttle.router.http_text import engine_request, for_client
from kvshuttle.router.openai import InferenceRequest, decode_body, prefill_body, scrub_answer
from kvshuttle.router.relay import StreamRelay
from kvshuttle.router.sse import StreamError, StreamHead
from kvshuttle.router.telemetry import Leg, Outcome, Plain, Receipt, Stage, Window

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from kvshuttle.config import RouterConfig
    from kvshuttle.router.exchange import Exchange
    from kvshuttle.router.http_server import Responder
    from kvshuttle.router.prober import Prober
    from kvshuttle.router.registry import Engine, Registry
    from kvshuttle.router.telemetry import Telemetry

_FALL_BACK_REASONS = {
    PlacementReason.NO_ENGINE_UP: RouteReason.NO_PREFILL_ENGINE,
    PlacementReason.NO_COMPATIBLE_PAIR: RouteReason.NO_COMPATIBLE_PAIR,
    PlacementReason.MODEL_NOT_SERVED: RouteReason.MODEL_NOT_ON_PREFILL,
}
_ASK_DECODE_AFTER = frozenset({400, 404, 413, 422})
_NOT_IMPLEMENTED = 501


@dataclass(frozen=True, slots=True)
class Routing:
    """What all requests of one router share."""

    config: RouterConfig
    registry: Registry
    prober: Prober
    telemetry: Telemetry
    rng: random.Random
    now_s: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Held:
    """KV that a prefill engine holds for this request."""

    engine: Engine
    leg: DecodeLeg


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer of an engine."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Drive:
    """One request on its way. ``run`` answers through the responder, or raises ``RequestError`` before any byte."""

    def __init__(
        self, routing: Routing, request: InferenceRequest, headers: bytes, responder: Responder, receipt: Receipt
    ) -> None:
        self._routing = routing
        self._config = routing.config
        self._request = request
        self._headers = headers
        self._responder = responder
        self._receipt = receipt
        self._deadline_at_s = routing.now_s() + routing.config.total_timeout_s
        self._num_attempts = 0
        self._avoid: set[str] = set()
        self._dispatched: tuple[Engine, str] | None = None
        self._prefilled_at_s = 0.0

    async def run(self) -> None:
        """Serve the request. Raises ``RequestError`` when no engine could; cancellation releases what is held."""
        traits = self._request.traits
        decision = choose_route(traits, disaggregate_from_tokens=self._config.disaggregate_from_tokens)
        self._take(decision.route, decision.reason)
        try:
            while not await self._attempt():
                pass
        except asyncio.CancelledError:
            self._receipt.outcome = Outcome.DISCONNECTED
            self._release(is_again=True)
            raise

    # --- the ladder ---

    async def _attempt(self) -> bool:
        """One dispatch of the pair, or of the decode leg alone. True when the client has its answer."""
        held = None
        if self._receipt.route is Route.PAIR:
            prefill = self._place_prefill()
            if prefill is None:
                return False
            try:
                result = await self._prefill_leg(prefill)
            except LegError as error:
                await self._after_failure(Leg.PREFILL, prefill, error)
                return False
            if isinstance(result, Answer):
                return self._pass_refusal(result)
            held = result
        decode = self._place_decode(held)
        if decode is None:
            return False
        try:
            await self._decode_leg(decode, held)
        except LegError as error:
            self._release(is_again=False)
            await self._after_failure(Leg.DECODE, decode, error)
            return False
        return True

    def _place_prefill(self) -> Engine | None:
        """The engine for the prefill leg; None after a change of route."""
        registry = self._routing.registry
        placement = place_prefill(
            registry.prefill_views(), model=self._request.model, avoid=self._avoid, draw=self._routing.rng.random()
        )
        self._routing.telemetry.placed(Leg.PREFILL, placement.reason)
        if placement.engine is None:
            self._fall_back(_FALL_BACK_REASONS[placement.reason], 503)
            return None
        return registry.engines[placement.engine]

    def _place_decode(self, held: Held | None) -> Engine | None:
        """The engine for the decode leg; None after a change of route. Raises ``RequestError`` when there is none."""
        registry = self._routing.registry
        placement = place_decode(
            registry.decode_views(),
            model=self._request.model,
            source=held.engine.name if held else None,
            avoid=self._avoid,
            draw=self._routing.rng.random(),
        )
        self._routing.telemetry.placed(Leg.DECODE, placement.reason)
        if placement.engine is not None:
            return registry.engines[placement.engine]
        self._release(is_again=False)
        if held is not None and placement.reason is PlacementReason.NO_COMPATIBLE_PAIR:
            self._fall_back(RouteReason.NO_COMPATIBLE_PAIR, 503)
        else:
            self._give_up(503, "No decode engine is available.")
        return None

    async def _after_failure(self, leg: Leg, engine: Engine, error: LegError) -> None:
        """Count a failed leg and decide how the request goes on. Raises ``RequestError`` when it does not."""
        self._receipt.window = Window.BETWEEN
        self._receipt.failures.append(f"{leg}:{engine.name}:{error.reason}")
        self._routing.telemetry.failed(leg, error.reason)
        if error.reason is not FailureReason.CAPACITY:
            self._routing.registry.report_failure(engine, error.reason)
        self._avoid.add(engine.name)
        self._num_attempts += 1
        status = _status_after(error)
        if self._num_attempts >= self._config.max_attempts:
            if leg is Leg.DECODE:
                self._give_up(status, "The decode engines failed to answer.")
            self._fall_back(RouteReason.PREFILL_FAILED, status)
            return
        self._routing.telemetry.count(Plain.RETRIES)
        pause_s = self._config.retry_pause_s * 2 ** (self._num_attempts - 1)
        await asyncio.sleep(self._within_total(pause_s))

    def _fall_back(self, reason: RouteReason, status: int) -> None:
        """Let the decode engine compute the prompt, if the policy allows it. Raises ``RequestError`` otherwise."""
        if not self._is_local_allowed():
            self._give_up(status, "No prefill engine could serve the request.")
        self._take(Route.LOCAL, reason)

    def _pass_refusal(self, refusal: Answer) -> bool:
        """A 4xx of the prefill engine is about a body that we rewrote: ask the decode engine about the original."""
        if refusal.status in _ASK_DECODE_AFTER and self._is_local_allowed():
            self._take(Route.LOCAL, RouteReason.PREFILL_REFUSED)
            return False
        self._answer(refusal)
        return True

    def _is_local_allowed(self) -> bool:
        is_allowed = self._config.prefill_failure_policy is PrefillFailurePolicy.RETRY_THEN_LOCAL
        return is_allowed and self._request.traits.num_tokens <= self._config.local_prefill_max_tokens

    def _take(self, route: Route, reason: RouteReason) -> None:
        self._receipt.route, self._receipt.reason = route, reason

    def _give_up(self, status: int, message: str) -> NoReturn:
        self._receipt.outcome = Outcome.UNAVAILABLE
        raise RequestError(message, status=status)

    def _within_total(self, timeout_s: float) -> float:
        remaining_s = self._deadline_at_s - self._routing.now_s()
        if remaining_s <= 0:
            self._release(is_again=True)
            self._give_up(504, "The request took longer than the router's total time limit.")
        return min(timeout_s, remaining_s)

    # --- the legs ---

    async def _prefill_leg(self, engine: Engine) -> Held | Answer | None:
        """Have the prompt computed and held. None: computed, but nothing is held. Raises ``LegError``."""
        transfer_id = mint("xfer")
        card = engine.card
        assert card is not None, "only engines with a card have peers"
        body = prefill_body(self._request, to_params(PrefillLeg(transfer_id)), self._config.prefill_keep_fields)
        self._receipt.window, self._receipt.prefill_engine = Window.PREFILL, engine.name
        started_at_s = self._routing.now_s()
        num_tokens = self._request.traits.num_tokens
        engine.add_load(1, num_tokens)
        try:
            self._dispatched = (engine, transfer_id)
            answer = await self._whole_answer(engine, body, self._config.prefill_timeout_s)
        except LegError as error:
            self._release(is_again=error.reason not in (FailureReason.CONNECT, FailureReason.CAPACITY))
            raise
        finally:
            engine.add_load(-1, -num_tokens)
        self._receipt.window = Window.BETWEEN
        self._prefilled_at_s = self._routing.now_s()
        self._receipt.stages_s[Stage.PREFILL] = self._prefilled_at_s - started_at_s
        engine.absolve()
        if 400 <= answer.status < 500:
            self._dispatched = None
            return answer
        result = parse_result(_transfer_params(answer))
        if result is None or result.transfer_id != transfer_id:
            self._routing.telemetry.count(Plain.PREFILL_NOT_HELD)
            self._release(is_again=False)
            return None
        self._receipt.num_held_tokens = result.num_tokens
        source = Peer(engine.spec.side_address, card.engine_id, card.incarnation)
        return Held(engine, DecodeLeg(transfer_id, source))

    async def _whole_answer(self, engine: Engine, body: bytes, timeout_s: float) -> Answer:
        """Send a leg and read its whole answer. Raises ``LegError``, for 5xx and senseless statuses too."""
        exchange = await self._send(engine, body)
        try:
            exchange.set_deadline(self._within_total(timeout_s), engine.name)
            head = await exchange.read_head()
            _refuse_status(head)
            return Answer(head.status, head.headers, await exchange.read_all())
        finally:
            exchange.close()
            engine.end(exchange)

    async def _send(self, engine: Engine, body: bytes) -> Exchange:
        path = self._request.endpoint.value.encode()
        exchange = await engine.pool.send(engine_request(b"POST", path, engine.pool.host_header, self._headers, body))
        engine.begin(exchange)
        return exchange

    async def _decode_leg(self, engine: Engine, held: Held | None) -> None:
        """Have the answer generated and pass it on. Raises ``LegError`` only while the client has seen nothing."""
        params = to_params(held.leg) if held else None
        self._receipt.window, self._receipt.decode_engine = Window.DECODE, engine.name
        started_at_s = self._routing.now_s()
        if self._prefilled_at_s:
            self._receipt.stages_s[Stage.GAP] = started_at_s - self._prefilled_at_s
        num_tokens = self._request.traits.num_tokens
        engine.add_load(1, num_tokens)
        try:
            exchange = await self._send(engine, decode_body(self._request, params))
            try:
                await self._read_decode(engine, exchange, started_at_s)
            finally:
                exchange.close()
                engine.end(exchange)
        finally:
            engine.add_load(-1, -num_tokens)

    async def _read_decode(self, engine: Engine, exchange: Exchange, started_at_s: float) -> None:
        is_stream = bool(self._request.fields.get("stream"))
        timeout_s = self._config.first_byte_timeout_s if is_stream else self._config.total_timeout_s
        exchange.set_deadline(self._within_total(timeout_s), engine.name)
        head = await exchange.read_head()
        _refuse_status(head)
        if head.status == 200 and head.header(b"content-type").startswith(b"text/event-stream"):
            await self._stream(engine, exchange, head, started_at_s)
            return
        answer = Answer(head.status, head.headers, await exchange.read_all())
        self._receipt.stages_s[Stage.FIRST_BYTE] = self._routing.now_s() - started_at_s
        if head.status >= 400:
            self._release(is_again=False)
        engine.absolve()
        self._answer(answer)

    async def _stream(self, engine: Engine, exchange: Exchange, head: ResponseHead, started_at_s: float) -> None:
        beginning = StreamHead()
        verdict: bool | StreamError = False
        while verdict is False:
            data = await exchange.read_some()
            if not data:
                raise LegError(FailureReason.MALFORMED, "a stream that ended before its first data event")
            verdict = beginning.feed(data)
        if isinstance(verdict, StreamError):
            self._release(is_again=False)
            if verdict.status >= 500 and verdict.status != _NOT_IMPLEMENTED:
                raise LegError(FailureReason.STATUS, "an error event before any data", status=verdict.status)
            self._answer(Answer(verdict.status, [(b"content-type", b"application/json")], verdict.body))
            return
        self._receipt.stages_s[Stage.FIRST_BYTE] = self._routing.now_s() - started_at_s
        self._receipt.window = Window.STREAMING
        engine.absolve()
        relay = StreamRelay(exchange, self._responder, self._config, deadline_at_s=self._deadline_at_s)
        headers = [*for_client(head.headers), self._id_header()]
        try:
            await relay.run(headers, beginning.data)
        except LegError as error:
            self._receipt.outcome = Outcome.BROKEN_STREAM
            self._receipt.failures.append(f"stream:{engine.name}:{error.reason}")
            self._routing.telemetry.failed(Leg.DECODE, error.reason)
            self._routing.registry.report_failure(engine, error.reason)

    def _answer(self, answer: Answer) -> None:
        """Send an engine's whole answer, without anything internal."""
        if answer.status >= 400:
            self._receipt.outcome = Outcome.CLIENT_ERROR if answer.status < 500 else Outcome.UNAVAILABLE
        headers = [*for_client(answer.headers), self._id_header()]
        self._responder.send(answer.status, headers, scrub_answer(answer.body))

    def _id_header(self) -> tuple[bytes, bytes]:
        return b"x-request-id", self._receipt.request_id.encode()

    def _release(self, *, is_again: bool) -> None:
        """Give back what the last prefill leg may hold, if it was sent and nobody will fetch it."""
        if self._dispatched is None:
            return
        engine, transfer_id = self._dispatched
        self._dispatched = None
        self._routing.telemetry.count(Plain.RELEASES)
        self._routing.prober.release(engine, transfer_id, is_again=is_again)


def _refuse_status(head: ResponseHead) -> None:
    """Raise ``LegError`` for what another attempt may cure. 501 is the engine's word on the request."""
    if head.status >= 500 and head.status != _NOT_IMPLEMENTED:
        raise LegError(FailureReason.STATUS, f"status {head.status}", status=head.status)
    if head.status < 200 or 300 <= head.status < 400:
        raise LegError(FailureReason.MALFORMED, f"unexpected status {head.status}")


def _status_after(error: LegError) -> int:
    if error.reason is FailureReason.TIMEOUT:
        return 504
    is_busy = error.reason is FailureReason.CAPACITY or error.status == 503
    return 503 if is_busy else 502


def _transfer_params(answer: Answer) -> object:
    try:
        fields = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return None
    return fields.get("kv_transfer_params") if isinstance(fields, dict) else None
