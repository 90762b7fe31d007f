"""Engine connections over a scripted socket: what an engine may send, and what becomes of it."""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshuttle.router.engine_client import EngineConnection, EnginePool, PoolLimits
from kvshuttle.router.exchange import Exchange, FailureReason, LegError

T = TypeVar("T")

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\nX-T: 1\r\n\r\n"


class Socket:
    """A transport that remembers."""

    def __init__(self) -> None:
        self.sent = b""
        self.is_open = True
        self.is_reading = True

    def write(self, data: bytes) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return not self.is_open

    def abort(self) -> None:
        self.is_open = False

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True


class Wire:
    """A pool with one open connection, and an exchange on it."""

    def __init__(self) -> None:
        self.pool = EnginePool("127.0.0.1", 1, None, PoolLimits(4, 60.0, 1.0, 1000))
        self.socket = Socket()
        self.connection = EngineConnection(self.pool)
        self.connection.connection_made(self.socket)
        self.exchange = self.begin()

    def begin(self) -> Exchange:
        exchange = Exchange(self.connection, asyncio.get_running_loop(), 1000)
        self.connection.start(exchange, b"request")
        return exchange

    def feed(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.connection.data_received(piece)


def on_loop(test: Callable[[Wire], Awaitable[T]]) -> T:
    async def main() -> T:
        return await test(Wire())

    return asyncio.run(main())


async def answer_of(exchange: Exchange) -> tuple[int, bytes]:
    head = await exchange.read_head()
    return head.status, await exchange.read_all()


def failure_of(*pieces: bytes, lost: bool = False) -> FailureReason:
    async def test(wire: Wire) -> FailureReason:
        wire.feed(*pieces)
        if lost:
            wire.connection.connection_lost(None)
        with pytest.raises(LegError) as caught:
            await answer_of(wire.exchange)
        assert lost or not wire.socket.is_open
        return caught.value.reason

    return on_loop(test)


@pytest.mark.parametrize("data", [ANSWER, CHUNKED])
def test_an_answer_is_the_same_in_one_piece_and_byte_by_byte(data):
    async def whole(wire: Wire) -> tuple[int, bytes]:
        wire.feed(data)
        return await answer_of(wire.exchange)

    async def bytewise(wire: Wire) -> tuple[int, bytes]:
        wire.feed(*(data[at : at + 1] for at in range(len(data))))
        return await answer_of(wire.exchange)

    assert on_loop(whole) == on_loop(bytewise) == (200, b"hello")


def test_a_connection_is_used_again_after_a_whole_answer():
    async def test(wire: Wire) -> None:
        wire.feed(ANSWER)
        assert repr(wire.pool) == "<EnginePool open=1 idle=1>"
        exchange = await wire.pool.send(b"second")
        assert wire.socket.sent == b"requestsecond"
        wire.feed(CHUNKED)
        assert await answer_of(exchange) == (200, b"hello")
        assert await answer_of(wire.exchange) == (200, b"hello")

    on_loop(test)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nConnection: close\r\n", b"HTTP/1.0 200 OK\r\n"])
def test_a_connection_that_the_engine_will_close_is_not_used_again(head):
    async def test(wire: Wire) -> None:
        wire.feed(head + b"Content-Length: 0\r\n\r\n")
        assert not wire.socket.is_open
        assert "idle=0" in repr(wire.pool)
        assert await answer_of(wire.exchange) == (200, b"")

    on_loop(test)


def test_an_interim_answer_announces_the_real_one():
    async def test(wire: Wire) -> None:
        wire.feed(b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + ANSWER)
        assert await answer_of(wire.exchange) == (200, b"hello")
        assert (await wire.exchange.read_head()).header(b"link") == b""

    on_loop(test)


def test_an_answer_without_a_length_ends_with_its_connection():
    async def test(wire: Wire) -> None:
        wire.feed(b"HTTP/1.1 200 OK\r\n\r\nhel", b"lo")
        wire.connection.connection_lost(None)
        assert await answer_of(wire.exchange) == (200, b"hello")

    on_loop(test)


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([b"rubbish\r\n\r\n"], FailureReason.MALFORMED),
        ([ANSWER + ANSWER], FailureReason.MALFORMED),
        ([b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"], FailureReason.MALFORMED),
        ([b"HTTP/1.1 200 OK\r\n" + b"a: " + b"x" * 300_000 + b"\r\n\r\n"], FailureReason.MALFORMED),
    ],
)
def test_what_is_no_single_sound_answer_is_malformed(pieces, reason):
    assert failure_of(*pieces) is reason


@pytest.mark.parametrize("cut", [0, 10, len(ANSWER) - 1])
def test_a_connection_lost_before_the_end_is_a_reset(cut):
    assert failure_of(ANSWER[:cut], lost=True) is FailureReason.RESET


def test_an_answer_over_the_limit_fails():
    async def test(wire: Wire) -> None:
        wire.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n" + b"x" * 1001)
        with pytest.raises(LegError) as caught:
            await answer_of(wire.exchange)
        assert caught.value.reason is FailureReason.TOO_LARGE

    on_loop(test)


def test_bytes_that_nobody_asked_for_cost_the_connection():
    async def test(wire: Wire) -> None:
        wire.feed(ANSWER)
        wire.feed(b"HTTP/1.1 200 OK\r\n")
        assert not wire.socket.is_open
        wire.connection.connection_lost(None)
        assert repr(wire.pool) == "<EnginePool open=0 idle=0>"

    on_loop(test)


def test_closing_an_exchange_early_costs_the_connection_and_a_finished_one_does_not():
    async def test(wire: Wire) -> None:
        wire.feed(ANSWER)
        wire.exchange.close()
        assert wire.socket.is_open
        exchange = await wire.pool.send(b"second")
        exchange.close()
        assert not wire.socket.is_open

    on_loop(test)


def test_a_sink_gets_what_was_there_before_it_and_everything_after():
    async def test(wire: Wire) -> None:
        got: list[bytes] = []
        wire.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nab")
        reading = asyncio.create_task(wire.exchange.forward(got.append))
        await asyncio.sleep(0)
        wire.feed(b"cd", b"ef")
        await reading
        assert got == [b"ab", b"cd", b"ef"]

    on_loop(test)


def test_a_deadline_fails_the_exchange_and_a_later_one_replaces_it():
    async def test(wire: Wire) -> None:
        wire.exchange.set_deadline(0.0, "first")
        wire.exchange.set_deadline(60.0, "second")
        await asyncio.sleep(0.01)
        wire.exchange.set_deadline(0.0, "third")
        with pytest.raises(LegError, match="third"):
            await wire.exchange.read_head()

    on_loop(test)


def test_a_paused_exchange_stops_the_socket_and_a_finished_answer_starts_it_again():
    async def test(wire: Wire) -> None:
        wire.exchange.pause()
        assert not wire.socket.is_reading
        wire.exchange.resume()
        assert wire.socket.is_reading
        wire.exchange.pause()
        wire.feed(ANSWER)
        assert wire.socket.is_reading

    on_loop(test)


def test_an_idle_connection_that_is_too_old_is_not_used():
    async def test(wire: Wire) -> None:
        wire.feed(ANSWER)
        wire.pool.close_idle(older_than_s=60.0)
        assert wire.socket.is_open
        wire.pool.close_idle()
        assert not wire.socket.is_open

    on_loop(test)


@pytest.mark.parametrize("end", [asyncio.CancelledError, TimeoutError, OSError])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_connect_that_does_not_come_to_an_end_leaves_no_connection_behind(monkeypatch, end, is_open):
    """uvloop says nothing to a protocol whose connection was made in the moment in which its connect was cancelled."""

    async def test(wire: Wire) -> None:
        made, sockets = [], [Socket(), Socket()]

        async def connect(factory, *_args, **_knobs):
            made.append(factory())
            if is_open:
                made[-1].connection_made(sockets[len(made) - 1])
            raise end

        monkeypatch.setattr(wire.pool._loop, "create_connection", connect)
        for _ in sockets:
            with pytest.raises((asyncio.CancelledError, LegError)):
                await wire.pool.send(b"request")
        assert wire.pool._open == {wire.connection}
        late, socket = made[-1], sockets[-1]
        if not is_open:
            late.connection_made(socket)
        assert not socket.is_open
        late.connection_lost(None)
        assert wire.pool._open == {wire.connection}

    on_loop(test)


@settings(deadline=None, max_examples=150)
@given(st.binary(max_size=120), st.lists(st.integers(0, 300), max_size=4), st.booleans())
def test_whatever_an_engine_sends_an_exchange_ends(noise, cuts, is_prefixed):
    data = (CHUNKED[: len(noise)] if is_prefixed else b"") + noise
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]

    async def test(wire: Wire) -> None:
        for start, stop in itertools.pairwise(edges):
            if wire.socket.is_open and stop > start:
                wire.feed(data[start:stop])
        wire.connection.connection_lost(None)
        with contextlib.suppress(LegError):
            # Anything but an answer and a LegError fails the test, also no end at all.
            await asyncio.wait_for(answer_of(wire.exchange), 20)

    on_loop(test)
