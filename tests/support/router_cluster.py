"""A whole router with fake engines, on a background event loop, for tests that are plain blocking clients."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import uvloop

from kvshuttle.config import RouterConfig
from kvshuttle.errors import PeerUnreachable
from kvshuttle.router.app import Router
from support.fake_engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from kvshuttle.handoff.messages import Message

T = TypeVar("T")

PATIENCE_S = 20.0
"""Far beyond any wait here, on a busy machine too; a test that gets there has failed."""
QUICK = {
    "port": 0,
    "probe_interval_s": 0.1,
    # Nothing here is slow to answer but a busy machine; tests of silence shorten the timeout that they are about.
    "probe_timeout_s": 5.0,
    "retry_pause_s": 0.01,
    "quarantine_s": 0.2,
    "drain_s": 0.5,
    "connect_timeout_s": 5.0,
    # What legs say of history depends on the requests before; the tests of conversations turn it on.
    "is_reusing_history": False,
}


class FakeChannel:
    """The side channel of all fake engines."""

    def __init__(self, engines: list[FakeEngine]) -> None:
        self._engines = {engine.side_address: engine for engine in engines}
        self.messages: list[tuple[str, Message]] = []

    async def request(self, address: str, message: Message, timeout_s: float) -> Message:
        await asyncio.sleep(0)
        engine = self._engines.get(address)
        if engine is None:
            raise PeerUnreachable(address)
        self.messages.append((address, message))
        return engine.answer_side(message)


class Cluster:
    """Engines and a router; everything public is meant for the test's thread."""

    def __init__(self, prefills: list[FakeEngine], decodes: list[FakeEngine], **knobs: Any) -> None:
        self.prefills = prefills
        self.decodes = decodes
        self.port = 0
        self.channel = FakeChannel([*prefills, *decodes])
        self._knobs = {**QUICK, **knobs}
        self.mode = knobs.get("mode", "auto")
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = PATIENCE_S) -> T:
        """Run a coroutine on the cluster's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the cluster's loop."""
        done: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(lambda: done.set_result(function()))
        return done.result(PATIENCE_S)

    def start_unpaired(self) -> None:
        """Start without waiting for anything."""
        self._thread.start()
        self.run(self._start())

    def start(self) -> None:
        self.start_unpaired()
        self.wait_for(lambda: self.health()["pairs"] == len(self.prefills) * len(self.decodes))

    async def _start(self) -> None:
        for engine in [*self.prefills, *self.decodes]:
            await engine.start()
        config = RouterConfig.from_mapping(
            {
                "prefill": [engine.url for engine in self.prefills],
                "decode": [engine.url for engine in self.decodes],
                **self._knobs,
            }
        )
        self.router = Router(config, self.channel)
        self.port = await self.router.start()

    def stop(self) -> None:
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    async def _stop(self) -> None:
        await self.router.stop(0.2)
        for engine in [*self.prefills, *self.decodes]:
            await engine.kill()
        await asyncio.sleep(0.02)

    # --- the client's side ---

    def health(self) -> dict[str, Any]:
        return json.loads(self.get("/health").read_body)

    def get(self, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> Reply:
        return self.request(method, path, None, headers)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, data, {"content-type": "application/json", **(headers or {})})

    def request(self, method: str, path: str, body: bytes | None, headers: dict[str, str] | None) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)

    def send_post(self, path: str, body: Any, headers: str = "") -> socket.socket:
        """Send a request and leave the answer unread."""
        data = json.dumps(body).encode()
        client = self.connect()
        client.sendall(
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{headers}"
            f"content-length: {len(data)}\r\n\r\n".encode()
            + data
        )
        return client

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric as scraped; 0 when it is absent."""
        wanted = "kvshuttle_router_" + name
        text = self.get("/metrics").read_body.decode()
        for line in text.splitlines():
            if line.startswith(wanted) and all(f'{key}="{value}"' in line for key, value in labels.items()):
                head, _, value = line.rpartition(" ")
                if head.split("{")[0] == wanted:
                    return float(value)
        return 0.0

    def left_over(self) -> dict[str, object]:
        """What the router still has of requests that are over; empty when nothing."""
        return self.call(self._left_over)

    def _left_over(self) -> dict[str, object]:
        found: dict[str, object] = {"legs": list(self.router._routing.late_legs)}
        found["claims"] = dict(self.router.conversations.table._claims)
        for name, engine in self.router.registry.engines.items():
            found[f"{name} exchanges"] = list(engine._exchanges)
            found[f"{name} load"] = engine.outstanding_requests or engine.outstanding_tokens
            found[f"{name} connections"] = engine.pool._open - set(engine.pool._idle)
        return {name: what for name, what in found.items() if what}

    def wait_until_nothing_is_left(self) -> None:
        """No task, exchange, busy connection or load of a request; fails the test otherwise."""
        left_over: dict[str, object] = {}

        def is_clean() -> bool:
            left_over.clear()
            left_over.update(self.left_over())
            return not left_over

        with contextlib.suppress(AssertionError):
            self.wait_for(is_clean)
        assert not left_over

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        """Poll until a condition holds; fails the test when it does not in time."""
        deadline_at_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_at_s, "the condition did not come true in time"
            time.sleep(0.01)


class Reply:
    """An answer read whole."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.read_body = body

    @property
    def json(self) -> Any:
        return json.loads(self.read_body)


@contextlib.contextmanager
def cluster(num_prefills: int = 1, num_decodes: int = 1, **knobs: Any) -> Iterator[Cluster]:
    """A running cluster of healthy engines."""
    made = Cluster(
        [FakeEngine(f"prefill-{index}") for index in range(num_prefills)],
        [FakeEngine(f"decode-{index}") for index in range(num_decodes)],
        **knobs,
    )
    try:
        made.start()
        yield made
    finally:
        made.stop()
