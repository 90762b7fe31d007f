"""A plain proxy for vLLM's own connectors: both legs of a request, the answer passed through as it comes.

vLLM's wheel brings none. This one is made of our router's own parts (HTTP server, connections to engines, the writing
of legs), so that what is compared is connectors and not HTTP stacks; it leaves out what makes ours a router: health,
placement by load, retries, metrics. Engines take turns. A leg that fails fails the request.

::

    pull    prefill leg ── its answer's kv_transfer_params ── decode leg ── stream
    push    prefill leg and decode leg at once, under one x-request-id ──── stream
    alone   decode leg only: what the proxy itself costs
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
from contextlib import closing
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import orjson
import uvloop

from kvshuttle.bench.upstream_params import upstream_prefill_params, upstream_push_params
from kvshuttle.config import EngineRole, RouterConfig
from kvshuttle.errors import ConfigError, RequestError
from kvshuttle.ids import mint
from kvshuttle.router.engine_client import EnginePool, PoolLimits
from kvshuttle.router.exchange import FailureReason, LegError
from kvshuttle.router.http_server import HttpServer
from kvshuttle.router.http_text import engine_request, for_client, for_engine
from kvshuttle.router.main import settle_process
from kvshuttle.router.openai import Endpoint, decode_body, error_body, parse_request, prefill_body

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping

    from kvshuttle.config import EngineSpec
    from kvshuttle.router.exchange import Exchange
    from kvshuttle.router.http_server import Responder
    from kvshuttle.router.http_text import Request
    from kvshuttle.router.openai import InferenceRequest

_JSON = (b"content-type", b"application/json")
_STREAM_TIMEOUT_S = 900.0
_DRAIN_S = 1.0


class ProxyMode(StrEnum):
    """Which legs a request has."""

    PULL = "pull"
    PUSH = "push"
    ALONE = "alone"


class _Legs:
    """One request's legs on the engines whose turn it is."""

    def __init__(
        self, request: Request, parsed: InferenceRequest, pools: Mapping[str, EnginePool], first_byte_timeout_s: float
    ) -> None:
        self.request_id = mint("bench")
        self._first_byte_timeout_s = first_byte_timeout_s
        self._parsed = parsed
        self._path = parsed.endpoint.value.encode()
        self._headers = for_engine(request.headers) + b"x-request-id: %b\r\n" % self.request_id.encode()
        self._pools = pools

    async def prefill(self, engine: EngineSpec) -> dict[str, Any]:
        """The prefill leg, to its end. Returns the answer's ``kv_transfer_params``. Raises ``LegError``."""
        body = prefill_body(self._parsed, upstream_prefill_params())
        with closing(await self._send(engine, body)) as exchange:
            head = await exchange.read_head()
            answer = await exchange.read_all()
        if head.status != 200:
            raise LegError(FailureReason.STATUS, answer[:200].decode(errors="replace"), status=head.status)
        params = orjson.loads(answer).get("kv_transfer_params")
        if not isinstance(params, dict):
            raise LegError(FailureReason.MALFORMED, "the prefill engine's answer has no kv_transfer_params")
        return params

    async def decode(self, engine: EngineSpec, params: dict[str, Any] | None, responder: Responder) -> None:
        """The decode leg, passed on as it comes. Raises ``LegError``."""
        with closing(await self._send(engine, decode_body(self._parsed, params))) as exchange:
            head = await exchange.read_head()
            if head.is_until_close or head.header(b"content-length"):
                responder.send(head.status, for_client(head.headers), await exchange.read_all())
                return
            # Engines send their head at once; only data says that they have begun.
            beginning = await exchange.read_some()
            exchange.set_deadline(_STREAM_TIMEOUT_S, "stream")
            responder.start(head.status, for_client(head.headers), beginning)
            responder.watch_flow(exchange.pause, exchange.resume)
            await exchange.forward(responder.write)
            responder.watch_flow(None, None)
            responder.finish()

    async def _send(self, engine: EngineSpec, body: bytes) -> Exchange:
        pool = self._pools[engine.name]
        exchange = await pool.send(engine_request(b"POST", self._path, pool.host_header, self._headers, body))
        exchange.set_deadline(self._first_byte_timeout_s, "first byte")
        return exchange


class Proxy:
    """One proxy on one event loop. ``config``: engines and where to listen; its other knobs are the HTTP server's."""

    def __init__(self, mode: ProxyMode, config: RouterConfig) -> None:
        limits = PoolLimits(
            max_connections=config.max_engine_connections,
            idle_s=config.engine_idle_s,
            connect_timeout_s=config.connect_timeout_s,
            max_response_bytes=config.max_response_bytes,
        )
        self._mode = mode
        self._first_byte_timeout_s = config.first_byte_timeout_s
        self._pools = {engine.name: EnginePool(engine.host, engine.port, None, limits) for engine in config.engines}
        self._prefills, self._decodes = (_turns(config, role) for role in (EngineRole.PREFILL, EngineRole.DECODE))
        self._server = HttpServer(config, self._handle, lambda _status: None)

    async def start(self) -> int:
        """Listen; returns the port. Raises ``OSError`` when it cannot be had."""
        return await self._server.start()

    async def stop(self) -> None:
        """Let running requests end for a second, then stop."""
        await self._server.drain(_DRAIN_S)
        for pool in self._pools.values():
            pool.close_idle()

    async def _handle(self, request: Request, responder: Responder) -> None:
        if request.path == b"/health":
            responder.send(200, [_JSON], b"{}")
            return
        try:
            parsed = parse_request(Endpoint(request.path.decode("latin-1")), request.body)
        except ValueError:
            responder.send(404, [_JSON], error_body("There is no such path here.", status=404, kind="NotFoundError"))
            return
        except RequestError as error:
            responder.send(400, [_JSON], error_body(str(error), status=400, kind="BadRequestError"))
            return
        try:
            await self._serve(_Legs(request, parsed, self._pools, self._first_byte_timeout_s), responder)
        except LegError as error:
            _fail(responder, error)

    async def _serve(self, legs: _Legs, responder: Responder) -> None:
        decode = next(self._decodes)
        if self._mode is ProxyMode.ALONE:
            await legs.decode(decode, None, responder)
            return
        prefill = next(self._prefills)
        if self._mode is ProxyMode.PULL:
            await legs.decode(decode, await legs.prefill(prefill), responder)
            return
        params = upstream_push_params(legs.request_id, prefill.name, prefill.side_address)
        await _both(legs.prefill(prefill), legs.decode(decode, params, responder))


async def _both(*legs: Coroutine[Any, Any, object]) -> None:
    """Run both to their end; when one fails or the client goes, neither is left running."""
    tasks = [asyncio.ensure_future(leg) for leg in legs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _turns(config: RouterConfig, role: EngineRole) -> Iterator[EngineSpec]:
    return itertools.cycle([engine for engine in config.engines if engine.role is role])


def _fail(responder: Responder, error: LegError) -> None:
    if responder.is_started:
        if not responder.is_finished:
            responder.abort()
        return
    body = error_body(f"A leg failed: {error}", status=502, kind="BadGatewayError")
    responder.send(502, [_JSON], body)


def proxy_from_json(text: str) -> tuple[ProxyMode, RouterConfig]:
    """``{"mode", "port", "prefill": ["URL,SIDE", …], "decode": […]}``, and further knobs of the router.

    Raises ``ConfigError``.
    """
    try:
        values = json.loads(text)
        mode = ProxyMode(values.pop("mode"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"bench-proxy: an object with mode, port, prefill and decode, got {text!r}") from error
    return mode, RouterConfig.from_mapping(values)


def run_proxy(mode: ProxyMode, config: RouterConfig) -> None:
    """Serve until SIGINT or SIGTERM, with the same event loop and the same settings of the process as our router."""
    settle_process()
    uvloop.run(_serve_until_signalled(mode, config))


async def _serve_until_signalled(mode: ProxyMode, config: RouterConfig) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    proxy = Proxy(mode, config)
    await proxy.start()
    await stop.wait()
    await proxy.stop()
