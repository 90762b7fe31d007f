"""An OpenAI engine in miniature: a raw asyncio server whose answers, and faults, are scripted.

A behaviour is a coroutine function over a ``Call``. Those in ``script`` are used up first, one for each inference
request; then come the defaults, which answer like vLLM with our connector. It also answers for its side channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvshuttle.errors import PeerUnreachable
from kvshuttle.handoff.cards import FEATURES
from kvshuttle.handoff.messages import (
    EngineCard,
    Fingerprint,
    Hello,
    HelloAck,
    Message,
    Release,
    Released,
    Renew,
    Renewed,
    Status,
    StatusReport,
)

_OTHER_LEG_S = 2.0
FINGERPRINT = Fingerprint("model", "bf16", 16, 2, 2, 64, 1, "layout", (1024,), "chain-v1")


@dataclass
class Call:
    """One inference request as the engine got it."""

    engine: FakeEngine
    path: str
    headers: dict[str, str]
    raw_body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    body: dict[str, Any] = field(default_factory=dict)
    was_aborted: bool = False

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def json(self, status: int, answer: Any, extra: str = "") -> None:
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        head = (
            f"HTTP/1.1 {status} X\r\ndate: yesterday\r\nserver: uvicorn\r\ncontent-length: {len(body)}\r\n"
            f"content-type: application/json\r\n{extra}\r\n"
        )
        await self.send(head.encode() + body)

    async def begin_stream(self, extra: str = "") -> None:
        head = (
            "HTTP/1.1 200 OK\r\ndate: yesterday\r\nserver: uvicorn\r\n"
            f"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n{extra}\r\n"
        )
        await self.send(head.encode())

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        await self.send(b"0\r\n\r\n")

    async def reset(self) -> None:
        """Close with RST, as a killed process does."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def hang(self) -> None:
        """Answer nothing until the router goes away."""
        with contextlib.suppress(ConnectionError):
            await self.reader.read(1)
        self.was_aborted = True
        self.engine.num_aborted += 1

    async def wait_for_push(self) -> bool:
        """Until the other leg of this transfer is computed; False when the router has gone away before."""
        assert self.leg is not None
        computed = asyncio.ensure_future(FakeEngine.computed[self.leg["transfer_id"]].wait())
        gone = asyncio.ensure_future(self.hang())
        await asyncio.wait((computed, gone), return_when=asyncio.FIRST_COMPLETED)
        is_gone = gone.done()
        for future in (computed, gone):
            future.cancel()
        # Or the next request would be read while this still reads.
        await asyncio.gather(computed, gone, return_exceptions=True)
        return not is_gone

    @property
    def leg(self) -> dict[str, Any] | None:
        """Our part of its kv_transfer_params; None for vLLM's own."""
        params = self.body.get("kv_transfer_params")
        return params.get("kvshuttle") if params else None

    @property
    def handles(self) -> set[str]:
        """Of the transfer, and of the turn that is to be kept."""
        leg = self.leg or {}
        return {leg.get("transfer_id", ""), leg.get("keep", {}).get("handle", "")} - {""}


Behaviour = Callable[[Call], Awaitable[None]]


def status(code: int, message: str = "scripted") -> Behaviour:
    async def behave(call: Call) -> None:
        await call.json(code, {"error": {"message": message, "type": "T", "param": None, "code": code}})

    return behave


async def reset_before_headers(call: Call) -> None:
    await call.reset()


async def reset_after_headers(call: Call) -> None:
    await call.begin_stream()
    await asyncio.sleep(0.02)
    await call.reset()


async def hang(call: Call) -> None:
    await call.hang()


async def hang_after_headers(call: Call) -> None:
    await call.begin_stream()
    await call.hang()


def stream(events: list[bytes], *, gap_s: float = 0.0, then: str = "end") -> Behaviour:
    """Chunks as given, one by one; then "end", "reset" or "hang"."""

    async def behave(call: Call) -> None:
        await call.begin_stream()
        for event in events:
            await call.chunk(event)
            await asyncio.sleep(gap_s)
        if then == "end":
            await call.end_stream()
        elif then == "reset":
            await asyncio.sleep(0.02)
            await call.reset()
        else:
            await call.hang()

    return behave


def answer(fields: dict[str, Any]) -> Behaviour:
    async def behave(call: Call) -> None:
        await call.json(200, fields)

    return behave


def sse(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
DEFAULT_EVENTS = [sse("hello"), sse(" world"), DONE]
DEFAULT_ANSWER = {"id": "cmpl-1", "choices": [{"index": 0, "text": "hello world"}], "kv_transfer_params": None}


class FakeEngine:
    """One engine on a free loopback port.

    ``begun``, ``computed``: transfers whose prompts some engine was asked to compute, and has computed.
    """

    begun: ClassVar[defaultdict[str, asyncio.Event]] = defaultdict(asyncio.Event)
    computed: ClassVar[defaultdict[str, asyncio.Event]] = defaultdict(asyncio.Event)

    def __init__(self, name: str, *, models: tuple[str, ...] = ("m",), fingerprint: Fingerprint = FINGERPRINT) -> None:
        self.name = name
        self.models = models
        self.fingerprint = fingerprint
        self.incarnation = "life-1"
        self.port = 0
        self.side_address = f"{name}.side:1"
        self.script: deque[Behaviour] = deque()
        self.calls: list[Call] = []
        self.released: list[str] = []
        self._forgotten: set[str] = set()
        self.num_connections = 0
        self.num_aborted = 0
        self.num_open = 0
        self.health_status = 200
        self.is_side_up = True
        self.report: dict[str, int] = {}
        self.features = FEATURES
        self.num_cached_tokens: int | None = None
        """What prefill answers say that was not computed for them; None for nothing."""
        self.remaining_s: dict[str, float] = {}
        """Of kept turns, as it tells them who renews; what is not here is gone."""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    # --- life ---

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 26)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """As kill -9: the port refuses, connections are reset."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            with contextlib.suppress(OSError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        self.is_side_up = False

    async def restart(self) -> None:
        """At the same address, as a new incarnation."""
        self.incarnation = f"life-{int(self.incarnation.removeprefix('life-')) + 1}"
        self.is_side_up = True
        await self.start()

    def forget(self) -> None:
        """Between tests that share this engine. A second release, seconds after the first, is not the next test's."""
        self._forgotten |= {handle for call in self.calls for handle in call.handles}
        self._forgotten |= set(self.released)
        self.num_cached_tokens = None
        self.script.clear()
        self.calls.clear()
        self.released.clear()

    @property
    def load(self) -> dict[str, int]:
        """What it reports: ``report``, and of an idle engine what that does not say."""
        idle = {"num_running": 0, "num_waiting": 0, "num_loading": 0, "num_slots": 0}
        return idle | {"num_blocks": 100, "num_free_blocks": 100} | self.report

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port},{self.side_address}"

    def answer_side(self, message: Message) -> Message:
        if not self.is_side_up:
            raise PeerUnreachable(f"{self.side_address} gave no answer in 1 s")
        if isinstance(message, Hello):
            engine_id = f"engine-{self.name}"
            card = EngineCard(engine_id, self.incarnation, "kv_both", 1, "0.32.0", self.fingerprint, (), self.features)
            return HelloAck(card)
        if isinstance(message, Status):
            return StatusReport(
                engine_id=f"engine-{self.name}", incarnation=self.incarnation, num_held_blocks=0, num_holdings=0,
                num_leases=0, **self.load,
            )  # fmt: skip
        if isinstance(message, Renew):
            remaining_s = tuple(self.remaining_s.get(handle, -1.0) for handle in message.handles)
            return Renewed(remaining_s=(), handles_remaining_s=remaining_s)
        assert isinstance(message, Release)
        self.released += [handle for handle in message.handles if handle not in self._forgotten]
        return Released()

    # --- HTTP ---

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.num_open += 1
        self._writers.add(writer)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.num_open -= 1
            self._writers.discard(writer)
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        raw_body = await reader.readexactly(int(headers.get("content-length", "0")))
        call = Call(self, path, headers, raw_body, reader, writer)
        if path == "/health":
            await call.json(self.health_status, {})
        elif path == "/v1/models":
            cards = [{"id": model, "object": "model"} for model in self.models]
            await call.json(200, {"object": "list", "data": cards, "auth": headers.get("authorization")})
        elif method == "GET":
            await call.json(404, {})
        else:
            assert method == "POST", method
            call.body = json.loads(raw_body)
            self.calls.append(call)
            await self._meet_the_other_leg(call)
            behave = self.script.popleft() if self.script else default_behaviour
            await behave(call)
        return not writer.is_closing() and not call.was_aborted

    async def _meet_the_other_leg(self, call: Call) -> None:
        """Legs that are sent at once arrive in any order: so that a test knows what there is, the decode leg waits."""
        leg = call.leg
        if leg is None or leg.get("mode") != "push":
            return
        begun = FakeEngine.begun[leg["transfer_id"]]
        if leg["leg"] == "prefill":
            begun.set()
        else:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(begun.wait(), _OTHER_LEG_S)


async def default_behaviour(call: Call) -> None:
    """What a healthy engine does with the leg it is given."""
    leg = call.leg
    if leg is not None and leg["leg"] == "prefill":
        # As in a push, where the decode engine has everything before the prefill engine answers.
        FakeEngine.computed[leg["transfer_id"]].set()
        held = {"leg": "prefilled", "transfer_id": leg["transfer_id"], "num_tokens": 7, "lease_s": 30.0}
        if call.engine.num_cached_tokens is not None:
            held["num_cached_tokens"] = call.engine.num_cached_tokens
        await call.json(200, {**DEFAULT_ANSWER, "kv_transfer_params": {"kvshuttle": held}})
        return
    if leg is not None and leg.get("mode") == "push" and not await call.wait_for_push():
        return
    if call.body.get("stream"):
        await stream(DEFAULT_EVENTS)(call)
    else:
        await call.json(200, DEFAULT_ANSWER)


def once_among(engines: list[FakeEngine], behaviour: Behaviour) -> list[FakeEngine]:
    """The engine that is asked first behaves so, then all behave well. Returns a list that will name it."""
    used: list[FakeEngine] = []

    async def once(call: Call) -> None:
        if used:
            await default_behaviour(call)
            return
        used.append(call.engine)
        await behaviour(call)

    for engine in engines:
        engine.script.append(once)
    return used
