"""The router process: routes, start, graceful stop. All state hangs on one ``Router`` object."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import random
import re
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import unquote

import orjson

from kvshuttle.clock import now_s
from kvshuttle.config import ModeChoice, PrefillFailurePolicy
from kvshuttle.config.checks import shortened
from kvshuttle.errors import ConfigError, RequestError
from kvshuttle.policy import ConversationTable
from kvshuttle.router.conversations import Conversations, caller_from
from kvshuttle.router.drive import Drive
from kvshuttle.router.engine_client import EnginePool, PoolLimits
from kvshuttle.router.exchange import LegError
from kvshuttle.router.http_server import HttpServer, Responder
from kvshuttle.router.http_text import MODE_HEADER, RETRY_AFTER, Request, engine_request, for_client, for_engine
from kvshuttle.router.openai import Endpoint, error_body, parse_request, unknown_model_message
from kvshuttle.router.prober import EngineChannel, Prober
from kvshuttle.router.registry import Engine, Registry
from kvshuttle.router.telemetry import METRICS_CONTENT_TYPE, Outcome, Receipt, Stage, Telemetry
from kvshuttle.router.trip import Routing, Trip

if TYPE_CHECKING:
    from kvshuttle.config import EngineSpec, RouterConfig

logger = logging.getLogger(__name__)

_JSON = (b"content-type", b"application/json")
_CONVERSATIONS = b"/v1/kvshuttle/conversations/"
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_KINDS = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}


Handler = Callable[[Request, Responder], Awaitable[None]]
Route = dict[bytes, Handler]
"""Handlers by method."""


class Router:
    """One router: engines, prober, metrics and the HTTP server in front of them. Lives on one event loop."""

    def __init__(self, config: RouterConfig, channel: EngineChannel) -> None:
        self.config = config
        limits = PoolLimits(
            max_connections=config.max_engine_connections,
            idle_s=config.engine_idle_s,
            connect_timeout_s=config.connect_timeout_s,
            max_response_bytes=config.max_response_bytes,
        )
        self.registry = Registry(config, [Engine(spec, _pool(spec, limits)) for spec in config.engines], now_s)
        self.prober = Prober(config, self.registry, channel)
        ttl_s = config.history_ttl_s - config.history_margin_s
        table = ConversationTable(max_turns=config.max_conversations, ttl_s=ttl_s)
        self.conversations = Conversations(config, self.registry, self.prober, table, now_s)
        self.telemetry = Telemetry(self.registry, table, is_logging_requests=config.is_logging_requests)
        self._routing = Routing(config, self.registry, self.prober, self.telemetry, random.Random(), now_s)  # noqa: S311
        self._server = HttpServer(config, self._handle, self.telemetry.refused)
        self._is_draining = False
        self._routes: dict[bytes, Route] = {
            b"/health": {b"GET": self._health},
            b"/metrics": {b"GET": self._metrics},
            b"/v1/models": {b"GET": self._models},
            **{endpoint.value.encode(): {b"POST": partial(self._infer, endpoint)} for endpoint in Endpoint},
        }
        self._conversation_route: Route = {b"GET": self._see_conversation, b"DELETE": self._forget_conversation}

    def __repr__(self) -> str:
        return f"<Router {self._server} pairs={self.registry.num_pairs()}>"

    async def start(self) -> int:
        """Start probing and listening; returns the port. Raises ``ConfigError`` when it cannot be had."""
        try:
            port = await self._server.start()
        except (OSError, UnicodeError) as error:  # the latter for names that DNS cannot hold
            raise _cannot_listen(self.config, error) from error
        self.prober.start()
        self.conversations.start()
        return port

    async def stop(self, drain_s: float) -> bool:
        """Let running requests end for ``drain_s``, then stop. True when none had to be cut off."""
        self._is_draining = True
        is_clean = await self._server.drain(drain_s)
        late_legs = list(self._routing.late_legs)
        for leg in late_legs:
            leg.cancel()
        await asyncio.gather(*late_legs, return_exceptions=True)
        await self.conversations.stop()
        await self.prober.stop()
        for engine in self.registry.engines.values():
            engine.pool.close_idle()
        return is_clean

    # --- routes ---

    async def _handle(self, request: Request, responder: Responder) -> None:
        responder.id_header = [(b"x-request-id", self._request_id(request).encode())]
        route = self._route(request.path)
        method = b"GET" if request.method == b"HEAD" else request.method
        try:
            if method == b"OPTIONS" and route:
                responder.send(204, [(b"allow", _allowed(route))], b"")
            elif method in route:
                await route[method](request, responder)
            else:
                _refuse(request, is_known=bool(route))
        except RequestError as error:
            _send_error(responder, error, _allowed(route))

    def _route(self, path: bytes) -> Route:
        """Handlers by method; empty when there is nothing."""
        if path.startswith(_CONVERSATIONS) and len(path) > len(_CONVERSATIONS):
            return self._conversation_route
        return self._routes.get(path, {})

    async def _infer(self, endpoint: Endpoint, request: Request, responder: Responder) -> None:
        started_at_s = now_s()
        ((_, request_id),) = responder.id_header
        receipt = Receipt(request_id.decode(), endpoint, outcome=Outcome.CLIENT_ERROR)
        try:
            parsed = parse_request(endpoint, request.body)
            receipt.model, receipt.num_tokens_estimated = parsed.model, parsed.traits.num_tokens
            self._check_model(parsed.model)
            asked = _asked_mode(request)
            receipt.outcome = Outcome.OK
            headers = for_engine(request.headers) + b"x-request-id: %b\r\n" % receipt.request_id.encode()
            turn = self.conversations.open(request.headers, parsed)
            receipt.conversation = turn.name
            trip = Trip(self._routing, parsed, turn, headers=headers, responder=responder, receipt=receipt)
            await Drive(trip, asked).run()
            receipt.status = responder.status
        except RequestError as error:
            receipt.status = error.status
            raise
        except asyncio.CancelledError:
            if not responder.is_cut_off:
                raise
            receipt.outcome, receipt.status = Outcome.STOPPED, responder.status or 503
            if responder.is_started:
                raise
            raise RequestError("The router is stopping; send the request again.", status=503) from None
        except Exception:
            receipt.outcome = Outcome.UNAVAILABLE
            raise
        finally:
            receipt.num_bytes = responder.num_bytes
            receipt.stages_s[Stage.TOTAL] = now_s() - started_at_s
            self.telemetry.finish(receipt)

    def _request_id(self, request: Request) -> str:
        """The client's id if it is fit for logs and headers, else a fresh one. It names, and opens nothing."""
        given = request.header(b"x-request-id")
        if given is not None and _REQUEST_ID.fullmatch(given):
            return given.decode("ascii")
        return f"req-{self._routing.rng.getrandbits(96):024x}"

    def _check_model(self, model: str) -> None:
        served = self.registry.served_models()
        if model and served is not None and model not in served:
            raise RequestError(unknown_model_message(model, served), status=404, param="model")

    async def _models(self, request: Request, responder: Responder) -> None:
        """A decode engine's own answer, under the client's own key."""
        for engine in self.registry.decodes:
            if engine.is_up:
                with contextlib.suppress(LegError):
                    return await self._pass_on(engine, request, responder)
        raise RequestError("No decode engine is available.", status=503)

    async def _pass_on(self, engine: Engine, request: Request, responder: Responder) -> None:
        headers = for_engine(request.headers)
        exchange = await engine.pool.send(engine_request(b"GET", request.path, engine.pool.host_header, headers, b""))
        try:
            exchange.set_deadline(self.config.probe_timeout_s, "models")
            head = await exchange.read_head()
            body = await exchange.read_all()
        finally:
            exchange.close()
        responder.send(head.status, for_client(head.headers), body)

    async def _see_conversation(self, request: Request, responder: Responder) -> None:
        found = self.conversations.describe(caller_from(request.headers), _conversation_in(request))
        _send_found(found, responder)

    async def _forget_conversation(self, request: Request, responder: Responder) -> None:
        forgotten = self.conversations.forget(caller_from(request.headers), _conversation_in(request))
        _send_found(forgotten, responder)

    async def _health(self, _request: Request, responder: Responder) -> None:
        registry = self.registry
        num_pairs = registry.num_pairs()
        num_decodes = sum(engine.is_up for engine in registry.decodes)
        is_local_allowed = self.config.prefill_failure_policy is PrefillFailurePolicy.RETRY_THEN_LOCAL
        is_serving = bool(num_pairs or (is_local_allowed and num_decodes)) and not self._is_draining
        body = {
            "status": "ok" if is_serving else "unavailable",
            "pairs": num_pairs,
            "prefill": {"up": sum(engine.is_up for engine in registry.prefills), "total": len(registry.prefills)},
            "decode": {"up": num_decodes, "total": len(registry.decodes)},
            "down": {engine.name: engine.why_down for engine in registry.engines.values() if not engine.is_up},
            "silent": {
                each.name: each.why_silent for each in registry.engines.values() if each.is_up and each.why_silent
            },
            "incompatible": [
                {"prefill": prefill, "decode": decode, "differences": differences}
                for (prefill, decode), differences in registry.incompatible_pairs().items()
            ],
        }
        responder.send(200 if is_serving else 503, [_JSON], orjson.dumps(body))

    async def _metrics(self, _request: Request, responder: Responder) -> None:
        # Requests do the same; a router that idles must not show, or keep, what nobody can continue any more.
        self.conversations.expire()
        responder.send(200, [(b"content-type", METRICS_CONTENT_TYPE)], self.telemetry.exposition())


async def serve(
    config: RouterConfig, channel: EngineChannel, ready: Callable[[int], None], stop: asyncio.Event
) -> bool:
    """Serve until ``stop`` is set, then drain. ``ready`` gets the port. True when no request had to be cut off."""
    router = Router(config, channel)
    ready(await router.start())
    await stop.wait()
    logger.info("stopping: running requests have %g s", config.drain_s)
    return await router.stop(config.drain_s)


async def serve_until_signalled(config: RouterConfig, channel: EngineChannel, ready: Callable[[int], None]) -> bool:
    """``serve``, stopped by SIGINT or SIGTERM; a second signal ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        stop.set()
        loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return await serve(config, channel, ready, stop)


def _pool(spec: EngineSpec, limits: PoolLimits) -> EnginePool:
    tls = ssl.create_default_context() if spec.is_tls else None
    return EnginePool(spec.host, spec.port, tls, limits)


def _asked_mode(request: Request) -> ModeChoice | None:
    """The mode that a request asks for itself. Raises ``RequestError`` for one that does not exist."""
    given = request.header(MODE_HEADER)
    if given is None:
        return None
    try:
        return ModeChoice(given.decode("latin-1").strip().lower())
    except ValueError:
        shown, allowed = given.decode("latin-1")[:50], ", ".join(ModeChoice)
        raise RequestError(f"{MODE_HEADER.decode()} header: one of {allowed}, got {shown!r}.") from None


def _refuse(request: Request, *, is_known: bool) -> NoReturn:
    if is_known:
        raise RequestError(f"{request.method.decode('latin-1')} is not allowed here.", status=405)
    raise RequestError(f"There is no {request.path.decode('latin-1')[:200]} here.", status=404)


def _conversation_in(request: Request) -> str:
    return unquote(request.path[len(_CONVERSATIONS) :].decode("latin-1"))


def _send_found(found: dict[str, object] | None, responder: Responder) -> None:
    if found is None:
        raise RequestError("There is no such conversation of this caller.", status=404)
    responder.send(200, [_JSON, *responder.id_header], orjson.dumps(found))


def _allowed(route: Route) -> bytes:
    methods = [method for known in route for method in ((b"GET", b"HEAD") if known == b"GET" else (known,))]
    return b", ".join([*methods, b"OPTIONS"])


def _send_error(responder: Responder, error: RequestError, allow: bytes) -> None:
    headers = [_JSON, *responder.id_header]
    if error.status == 405:
        headers.append((b"allow", allow))
    if error.status == 503:
        headers.append(RETRY_AFTER)
    kind = _KINDS.get(error.status, "InternalServerError")
    responder.send(
        error.status,
        headers,
        error_body(str(error), status=error.status, kind=kind, param=error.param, code=error.code),
    )


def _cannot_listen(config: RouterConfig, error: OSError | UnicodeError) -> ConfigError:
    is_of_host = (
        not isinstance(error, OSError) or isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
    )
    fix = "host", "give an address of this machine, such as 127.0.0.1"
    name, advice = fix if is_of_host else ("port", "choose another, or 0 for a free one")
    where = f"{shortened(config.host)} port {config.port}"
    return ConfigError(f"{name}: cannot listen on {where}: {error}; {advice}")
