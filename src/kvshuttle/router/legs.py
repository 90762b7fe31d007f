"""The two HTTP calls that a request becomes, each with its engine's load and its deadline."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import orjson

from kvshuttle.handoff.params import DecodeLeg, LocalLeg, Mode, PrefillLeg, PrefillResult, parse_result, to_params
from kvshuttle.router.exchange import FailureReason, LegError, ResponseHead
from kvshuttle.router.http_text import engine_request
from kvshuttle.router.openai import decode_body, prefill_body
from kvshuttle.router.relay import StreamRelay
from kvshuttle.router.sse import StreamError, StreamHead
from kvshuttle.router.telemetry import Leg, Outcome, Stage, Window
from kvshuttle.router.trip import Answer, LegFailed
from kvshuttle.router.usage import put_right

if TYPE_CHECKING:
    from kvshuttle.router.exchange import Exchange
    from kvshuttle.router.registry import Engine
    from kvshuttle.router.trip import Dispatch, Trip

_NOT_IMPLEMENTED = 501
NEVER_ARRIVED = frozenset({FailureReason.CONNECT, FailureReason.CAPACITY})


class LegCall:
    """One request to an engine, counted as its load until ``close``."""

    def __init__(self, trip: Trip, engine: Engine, body: bytes) -> None:
        self._trip = trip
        self._engine = engine
        self._body = body
        self._exchange: Exchange | None = None
        self._num_tokens = trip.request.traits.num_tokens
        self._ends_at_s = 0.0
        self._is_open = True
        engine.add_load(1, self._num_tokens)

    async def send(self) -> Exchange:
        """Send it. Raises ``LegError``."""
        engine, trip = self._engine, self._trip
        path = trip.request.endpoint.value.encode()
        request = engine_request(b"POST", path, engine.pool.host_header, trip.headers, self._body)
        exchange = self._exchange = await engine.pool.send(request)
        engine.begin(exchange)
        self._arm()
        return exchange

    def expect(self, timeout_s: float) -> None:
        """Its answer must be here within ``timeout_s`` from now; replaces an earlier deadline."""
        self._ends_at_s = self._trip.routing.now_s() + timeout_s
        self._arm()

    def close(self) -> None:
        """End it; an answer that is not whole makes the engine abort. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        if self._exchange is not None:
            self._exchange.close()
            self._engine.end(self._exchange)
        self._engine.add_load(-1, -self._num_tokens)

    def _arm(self) -> None:
        if self._exchange is not None and self._is_open:
            remaining_s = self._ends_at_s - self._trip.routing.now_s()
            self._exchange.set_deadline(max(remaining_s, 0.0), self._engine.name)


async def run_prefill(trip: Trip, dispatch: Dispatch, mode: Mode, timeout_s: float) -> Answer | PrefillResult | None:
    """Have the prompt computed and held. None: nothing is held. An ``Answer``: the engine refuses, 4xx.

    Raises ``LegFailed``.
    """
    engine = dispatch.engine
    params = to_params(PrefillLeg(dispatch.transfer_id, mode, trip.turn.history_for(engine)))
    started_at_s = trip.routing.now_s()
    with closing(LegCall(trip, engine, prefill_body(trip.request, params, trip.config.prefill_keep_fields))) as call:
        call.expect(timeout_s)
        try:
            exchange = await call.send()
            head = await exchange.read_head()
            _refuse_status(head)
            answer = Answer(head.status, head.headers, await exchange.read_all())
        except LegError as error:
            dispatch.is_running = error.reason not in NEVER_ARRIVED
            raise LegFailed(Leg.PREFILL, engine, error) from error
    dispatch.is_running = False
    engine.absolve()
    trip.prefilled(trip.routing.now_s() - started_at_s)
    if 400 <= answer.status < 500:
        return answer
    result = parse_result(_transfer_params(answer))
    if result is None or result.transfer_id != dispatch.transfer_id:
        return None
    dispatch.num_cached_tokens = result.num_cached_tokens
    trip.receipt.num_held_tokens = result.num_tokens
    trip.receipt.num_cached_tokens = result.num_cached_tokens or 0
    return result if result.num_tokens else None


class DecodeCall:
    """A decode leg: begun, then passed on to the client. ``close`` must be called in every case.

    ``dispatch``: the prefill leg that hands off to it, if one does.
    """

    def __init__(
        self, trip: Trip, engine: Engine, leg: DecodeLeg | LocalLeg | None, dispatch: Dispatch | None = None
    ) -> None:
        self._trip = trip
        self._engine = engine
        self._dispatch = dispatch
        self._is_stream = bool(trip.request.fields.get("stream"))
        self._call = LegCall(trip, engine, decode_body(trip.request, to_params(leg) if leg else None))
        self._started_at_s = trip.routing.now_s()
        self._beginning = StreamHead()
        self._stream: tuple[Exchange, ResponseHead] | None = None
        trip.receipt.decode_engine = engine.name

    def expect(self, *, after_s: float = 0.0) -> None:
        """Its answer may now be waited for as long as the configuration says, or ``after_s`` longer.

        Raises ``RequestError`` when the request has no time left.
        """
        config = self._trip.config
        timeout_s = config.first_byte_timeout_s + after_s if self._is_stream else config.total_timeout_s
        self._call.expect(self._trip.within_total(timeout_s))

    async def begin(self) -> Answer | None:
        """Send it and wait for the first data event (None), or for a whole answer. Raises ``LegFailed``."""
        try:
            exchange = await self._call.send()
            answer = await self._read_beginning(exchange)
        except LegError as error:
            raise LegFailed(Leg.DECODE, self._engine, error) from error
        self._engine.absolve()
        now_s, stages_s = self._trip.routing.now_s(), self._trip.receipt.stages_s
        stages_s[Stage.FIRST_BYTE] = now_s - self._started_at_s
        if self._dispatch is not None:
            stages_s[Stage.HANDOFF] = now_s - (self._trip.prefilled_at_s or now_s)
        return answer if answer is None else replace(answer, body=self._put_right(answer.body))

    async def pass_on(self) -> bool:
        """Pass a stream that has begun to the client, to its end. False when it broke off, which the client knows."""
        assert self._stream is not None, "only what has begun as a stream is passed on as one"
        exchange, head = self._stream
        trip = self._trip
        trip.receipt.window = Window.STREAMING
        relay = StreamRelay(
            exchange,
            trip.responder,
            trip.config,
            deadline_at_s=trip.deadline_at_s,
            on_done=trip.turn.answered,
            put_right=self._put_right if self._dispatch is not None else None,
        )
        try:
            await relay.run(trip.client_headers(head.headers), self._beginning.data)
        except LegError as error:
            trip.receipt.outcome = Outcome.BROKEN_STREAM
            # What an engine says is the request's fault does not count against the engine.
            is_engines = not error.status or _is_curable(error.status)
            trip.note_failure(Leg.DECODE, self._engine, error.reason, where="stream", is_engines=is_engines)
            return False
        return True

    def close(self) -> None:
        """End it. Idempotent."""
        self._call.close()

    def _put_right(self, body: bytes) -> bytes:
        """An answer, or an event of one, that says of its prompt what is known by now."""
        return body if self._dispatch is None else put_right(body, self._dispatch.num_cached_tokens)

    async def _read_beginning(self, exchange: Exchange) -> Answer | None:
        head = await exchange.read_head()
        _refuse_status(head)
        if head.status != 200 or not head.header(b"content-type").startswith(b"text/event-stream"):
            return Answer(head.status, head.headers, await exchange.read_all())
        verdict: bool | StreamError = False
        while verdict is False:
            data = await exchange.read_some()
            if not data:
                raise LegError(FailureReason.MALFORMED, "a stream that ended before its first data event")
            verdict = self._beginning.feed(data)
        if isinstance(verdict, StreamError):
            if _is_curable(verdict.status):
                raise LegError(FailureReason.STATUS, "an error event before any data", status=verdict.status)
            return Answer(verdict.status, [(b"content-type", b"application/json")], verdict.body)
        self._stream = exchange, head
        return None


def _is_curable(status: int) -> bool:
    """Whether another attempt may do better. 501 is the engine's word on the request."""
    return status >= 500 and status != _NOT_IMPLEMENTED


def _refuse_status(head: ResponseHead) -> None:
    """Raise ``LegError`` for what another attempt may cure."""
    if _is_curable(head.status):
        raise LegError(FailureReason.STATUS, f"status {head.status}", status=head.status)
    if head.status < 200 or 300 <= head.status < 400:
        raise LegError(FailureReason.MALFORMED, f"unexpected status {head.status}")


def _transfer_params(answer: Answer) -> object:
    try:
        fields = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return None
    return fields.get("kv_transfer_params") if isinstance(fields, dict) else None
