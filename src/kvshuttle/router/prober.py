"""Looks after the engines: HTTP health, identity and load over the side channel, model names.

Two loops for each engine, since a dead side channel takes its whole timeout to say so while a refused connection is
known at once. A failure that a request reports wakes both early.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvshuttle.config import EngineRole
from kvshuttle.errors import RemoteProtocolError, TransportError
from kvshuttle.handoff.messages import (
    PROTOCOL_VERSION,
    Hello,
    HelloAck,
    Message,
    Refused,
    Release,
    Renew,
    Renewed,
    Status,
    StatusReport,
)
from kvshuttle.router.exchange import FailureReason, LegError
from kvshuttle.router.http_text import engine_request
from kvshuttle.router.openai import model_names

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from kvshuttle.config import RouterConfig
    from kvshuttle.router.registry import Engine, Registry

logger = logging.getLogger(__name__)

_MIN_PAUSE_S = 0.1
"""Between probes that failures ask for; a burst of them is one reason to look."""
_MODELS_REFRESH_PROBES = 30
_MODELS_RETRY_PROBES = 5
_RELEASE_AGAIN_S = 2.0
_LAST_RELEASES_S = 0.5

T = TypeVar("T")


class EngineChannel(Protocol):
    """The side channel as the router needs it. Raises ``TransportError`` or ``RemoteProtocolError``."""

    async def request(self, address: str, message: Message, timeout_s: float) -> Message:
        """Ask an engine's scheduler half."""
        ...


class Prober:
    """Keeps a registry true."""

    def __init__(self, config: RouterConfig, registry: Registry, channel: EngineChannel) -> None:
        self._config = config
        self._registry = registry
        self._channel = channel
        self._watches: set[asyncio.Task[None]] = set()
        self._releases: set[asyncio.Task[None]] = set()
        self._http_failures: dict[str, int] = {}
        self._side_failures: dict[str, int] = {}

    def start(self) -> None:
        """Begin probing every engine."""
        for engine in self._registry.engines.values():
            _spawn(self._watch_http(engine), self._watches)
            _spawn(self._watch_side(engine), self._watches)

    async def stop(self) -> None:
        """End all probing, after a moment for releases that are under way."""
        if self._releases:
            await asyncio.wait(self._releases, timeout=_LAST_RELEASES_S)
        tasks = self._watches | self._releases
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def release(self, engine: Engine, handle: str, *, is_again: bool) -> None:
        """Tell an engine that nobody will fetch ``handle``.

        ``is_again``: its prefill may end after the release arrives, so say it once more a little later.
        """
        _spawn(self._release(engine, handle, is_again=is_again), self._releases)

    async def renew(self, engine: Engine, handles: Sequence[str], duration_s: float) -> tuple[float, ...]:
        """Have an engine keep turns for ``duration_s`` from now, where that is longer than it would.

        Returns the seconds that remain for each, negative when it is gone; nothing when the engine does not say.
        """
        renew = Renew(lease_ids=(), duration_s=duration_s, handles=tuple(handles))
        try:
            reply = await self._channel.request(engine.spec.side_address, renew, self._config.probe_timeout_s)
        except (TransportError, RemoteProtocolError) as error:
            logger.debug("renewal of %d turns at %s: %s", len(handles), engine.name, error)
            return ()
        return reply.handles_remaining_s if isinstance(reply, Renewed) else ()

    # --- HTTP ---

    async def _watch_http(self, engine: Engine) -> None:
        num_probes = 0
        while True:
            was_up = engine.is_up
            await self._probe_http(engine)
            pause_probes = _MODELS_RETRY_PROBES if engine.models is None else _MODELS_REFRESH_PROBES
            if engine.is_up and (not was_up or num_probes >= pause_probes):
                num_probes = 0
                await self._learn_models(engine)
            num_probes += 1
            engine.pool.close_idle(self._config.engine_idle_s)
            await self._pause(engine.http_kick)

    async def _probe_http(self, engine: Engine) -> None:
        try:
            status, _ = await self._get(engine, b"/health")
        except LegError as error:
            if error.reason is FailureReason.CAPACITY:
                return  # says nothing about the engine
            failures = self._http_failures.get(engine.name, 0) + 1
            self._http_failures[engine.name] = failures
            # One that is not up has no good name to lose: say at once why.
            is_lost = failures >= self._config.unhealthy_after or not engine.is_up
            if error.reason is FailureReason.CONNECT or is_lost:
                self._registry.set_up(engine, is_up=False, why=f"health: {error}")
                self._bury(engine)
            return
        if status == 200:
            self._http_failures[engine.name] = 0
            self._registry.set_up(engine, is_up=True, why="health: 200")
        else:
            self._registry.set_up(engine, is_up=False, why=f"health: {status}")

    async def _learn_models(self, engine: Engine) -> None:
        with contextlib.suppress(LegError):
            status, body = await self._get(engine, b"/v1/models")
            self._registry.set_models(engine, model_names(body) if status == 200 else None)

    async def _get(self, engine: Engine, path: bytes) -> tuple[int, bytes]:
        key = self._config.engine_api_key
        headers = f"authorization: Bearer {key}\r\n".encode() if key else b""
        exchange = await engine.pool.send(engine_request(b"GET", path, engine.pool.host_header, headers, b""))
        try:
            exchange.set_deadline(self._config.probe_timeout_s, "probe")
            head = await exchange.read_head()
            return head.status, await exchange.read_all()
        finally:
            exchange.close()

    # --- side channel ---

    async def _watch_side(self, engine: Engine) -> None:
        while True:
            try:
                await self._probe_side(engine)
                self._side_failures[engine.name] = 0
                engine.why_silent = ""
            except (TransportError, RemoteProtocolError) as error:
                failures = self._side_failures.get(engine.name, 0) + 1
                self._side_failures[engine.name] = failures
                if failures == self._config.unhealthy_after:
                    logger.warning("%s does not answer on its side channel: %s", engine.name, error)
                if failures >= self._config.unhealthy_after or engine.card is None:
                    # Anybody may read it at /health, so it names no address.
                    engine.why_silent = f"side channel: {error}".replace(engine.spec.side_address, engine.name)
                if failures >= self._config.unhealthy_after:
                    self._registry.set_card(engine, None)
                    self._bury(engine)
            await self._pause(engine.side_kick)

    async def _probe_side(self, engine: Engine) -> None:
        report = await self._ask(engine, Status(), StatusReport)
        if engine.card is None or engine.card.incarnation != report.incarnation:
            hello = Hello(protocol_version=PROTOCOL_VERSION, sender="router")
            acknowledged = await self._ask(engine, hello, HelloAck)
            self._registry.set_card(engine, acknowledged.card)
        self._registry.set_report(engine, report)

    async def _ask(self, engine: Engine, message: Message, expected: type[T]) -> T:
        reply = await self._channel.request(engine.spec.side_address, message, self._config.probe_timeout_s)
        if isinstance(reply, expected):
            return reply
        detail = reply.reason if isinstance(reply, Refused) else type(reply).__name__
        raise RemoteProtocolError(f"{engine.name} answered {type(message).__name__} with: {detail}")

    async def _release(self, engine: Engine, handle: str, *, is_again: bool) -> None:
        for pause_s in (0.0, _RELEASE_AGAIN_S) if is_again else (0.0,):
            await asyncio.sleep(pause_s)
            try:
                await self._channel.request(
                    engine.spec.side_address, Release(handles=(handle,)), self._config.probe_timeout_s
                )
            except (TransportError, RemoteProtocolError) as error:
                # The lease ends by itself; a dead engine holds nothing.
                logger.debug("release of %s at %s: %s", handle, engine.name, error)

    # --- both ---

    def _bury(self, engine: Engine) -> None:
        """Fail what waits for an engine that answers on neither channel, and prompts of one that can hand nothing off.

        vLLM's HTTP server goes on saying that all is well while the process that computes hangs; the side channel is
        in that process. A decode engine's streams may still be alive.
        """
        is_silent = self._side_failures.get(engine.name, 0) >= self._config.unhealthy_after
        if is_silent and (not engine.is_up or engine.spec.role is EngineRole.PREFILL):
            engine.fail_exchanges()

    async def _pause(self, kick: asyncio.Event) -> None:
        await asyncio.sleep(min(_MIN_PAUSE_S, self._config.probe_interval_s))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.probe_interval_s):
                await kick.wait()
        kick.clear()


def _spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
