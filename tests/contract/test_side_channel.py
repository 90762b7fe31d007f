"""The side channel over real sockets: what it promises to callers, and what strangers can and cannot do to it."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import zmq

from kvshuttle.clock import now_s
from kvshuttle.errors import ConfigError, IncompatiblePeer, PeerUnreachable, RemoteProtocolError, TransportError
from kvshuttle.handoff.messages import Busy, Hello, Message, Refused, Release, Released, Status, StatusReport
from kvshuttle.handoff.wire import MessageCodec
from kvshuttle.transport.framing import MAX_FRAME_BYTES, Frame, Kind, Sealer
from kvshuttle.transport.side_channel import Endpoint, SideChannelThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECRET = b"an operator's secret"
REPORT = StatusReport("engine", "inc", 1, 2, 3, 4, 5, 6, 7)
LIMIT_S = 30.0


class Answers:
    """Handler and its diary."""

    def __init__(self) -> None:
        self.seen: list[Message] = []

    def __call__(self, message: Message) -> Message | None:
        self.seen.append(message)
        if isinstance(message, Status):
            return REPORT
        if isinstance(message, Release):
            return Released()
        if isinstance(message, Hello):
            raise IncompatiblePeer("block_size_tokens: 16 != 128")
        if isinstance(message, StatusReport):
            raise TypeError("a bug with internals at 0xdeadbeef")
        return None


@pytest.fixture
def endpoints() -> Iterator[Callable[..., Endpoint[Message]]]:
    """Makes endpoints, and closes them at the end."""
    made: list[Endpoint[Message]] = []

    def make(
        handler: Callable[[Message], Message | None] = lambda _: None, secret: bytes | None = SECRET
    ) -> Endpoint[Message]:
        made.append(Endpoint(codec=MessageCodec(), secret=secret, sender="test", handler=handler, now_s=now_s))
        return made[-1]

    yield make
    for endpoint in made:
        endpoint.close()


def ask(
    client: Endpoint[Message], address: str, message: Message, *others: Endpoint[Message], timeout_s: float = LIMIT_S
) -> Message | TransportError | RemoteProtocolError:
    """One request, pumping every endpoint; asserts that there is exactly one reply."""
    replies: list[Message | TransportError | RemoteProtocolError] = []
    client.request(address, message, timeout_s=timeout_s, on_reply=replies.append)
    assert not replies, "replies come from poll, not from request"
    pump(lambda: bool(replies), client, *others)
    for endpoint in (client, *others):
        endpoint.poll(0.0)
    assert len(replies) == 1
    return replies[0]


def pump(is_so: Callable[[], bool], *endpoints: Endpoint[Message], limit_s: float = LIMIT_S) -> None:
    """Poll all endpoints until something is so."""
    deadline_at_s = now_s() + limit_s
    while not is_so():
        assert now_s() < deadline_at_s, f"in vain: {endpoints}"
        for endpoint in endpoints:
            endpoint.poll(0.002)


@contextmanager
def stranger(address: str) -> Iterator[zmq.Socket[bytes]]:
    """A raw DEALER that can send anything."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(f"tcp://{address}")
    try:
        yield dealer
    finally:
        dealer.close()
        context.term()


def frame_of(message: Message, *, secret: bytes | None = SECRET, version: int | None = None) -> bytes:
    codec = MessageCodec()
    shown = codec.version if version is None else version
    return Sealer(secret).seal(Frame(shown, Kind.REQUEST, secrets.token_bytes(16), codec.encode(message)))


@pytest.mark.parametrize("secret", [SECRET, None], ids=["secret", "open"])
def test_a_request_is_answered_once(endpoints: Callable[..., Endpoint[Message]], secret: bytes | None) -> None:
    answers = Answers()
    server, client = endpoints(answers, secret), endpoints(secret=secret)
    address = server.bind("127.0.0.1", 0)
    assert ask(client, address, Status(), server) == REPORT
    assert ask(client, address, Release(handles=("h",)), server) == Released()
    assert answers.seen == [Status(), Release(handles=("h",))]
    assert repr(client) == "<Endpoint test links=1 pending=0>"


def test_a_hundred_requests_in_flight_get_their_own_answers(endpoints: Callable[..., Endpoint[Message]]) -> None:
    server, client = endpoints(lambda message: Refused("x") if message == Status() else message), endpoints()
    address = server.bind("127.0.0.1", 0)
    replies: dict[int, object] = {}
    for index in range(100):
        message = Release(handles=(f"h{index}",))
        client.request(address, message, timeout_s=LIMIT_S, on_reply=lambda r, i=index: replies.setdefault(i, r))
    pump(lambda: len(replies) == 100, client, server)
    assert replies == {index: Release(handles=(f"h{index}",)) for index in range(100)}


def test_a_one_way_message_arrives_and_is_not_answered(endpoints: Callable[..., Endpoint[Message]]) -> None:
    answers = Answers()
    server, client = endpoints(answers), endpoints()
    address = server.bind("127.0.0.1", 0)
    client.send(address, Busy("me", 1.0))
    pump(lambda: bool(answers.seen), client, server)
    assert answers.seen == [Busy("me", 1.0)]
    assert not server.counts["handler_error"]


def test_a_peer_that_does_not_listen_is_unreachable_when_the_time_is_over(
    endpoints: Callable[..., Endpoint[Message]],
) -> None:
    client = endpoints()
    started_at_s = now_s()
    reply = ask(client, "127.0.0.1:1", Status(), timeout_s=0.2)
    assert isinstance(reply, PeerUnreachable)
    assert "127.0.0.1:1" in str(reply)
    assert 0.2 <= now_s() - started_at_s < LIMIT_S
    assert client.counts["expired_unsent"] == 1


def test_a_peer_that_listens_but_does_not_answer_is_unreachable(endpoints: Callable[..., Endpoint[Message]]) -> None:
    server, client = endpoints(Answers()), endpoints()
    reply = ask(client, server.bind("127.0.0.1", 0), Status(), timeout_s=0.2)
    assert isinstance(reply, PeerUnreachable)


def test_a_reply_that_comes_too_late_is_counted_and_dropped(endpoints: Callable[..., Endpoint[Message]]) -> None:
    server, client = endpoints(Answers()), endpoints()
    address = server.bind("127.0.0.1", 0)
    # Long enough to connect in: what was not sent in time is never sent.
    assert isinstance(ask(client, address, Status(), timeout_s=1.5), PeerUnreachable)
    pump(lambda: client.counts["unexpected_reply"] == 1, client, server)
    assert ask(client, address, Status(), server) == REPORT


@pytest.mark.parametrize(
    "address",
    [
        "",
        "nonsense",
        "127.0.0.1",
        "127.0.0.1:notaport",
        "127.0.0.1:99999999",
        "127.0.0.1:0",
        "eth0;127.0.0.1:1",
        "[::1",
        "a b:1",
        "../x:1",
    ],
)
def test_an_address_that_is_none_is_reported_and_not_raised(
    endpoints: Callable[..., Endpoint[Message]], address: str
) -> None:
    client = endpoints()
    reply = ask(client, address, Status())
    assert isinstance(reply, PeerUnreachable)
    client.send(address, Busy("me", 1.0))
    assert client.counts["unsent"] == 1


def test_a_peer_restarted_at_the_same_address_is_reached_again(endpoints: Callable[..., Endpoint[Message]]) -> None:
    first, client = endpoints(Answers()), endpoints()
    address = first.bind("127.0.0.1", 0)
    assert ask(client, address, Status(), first) == REPORT
    first.close()
    assert isinstance(ask(client, address, Status(), timeout_s=0.3), PeerUnreachable)
    second = endpoints(Answers())
    assert second.bind("127.0.0.1", int(address.rpartition(":")[2])) == address
    assert ask(client, address, Status(), second) == REPORT


def test_what_was_for_a_dead_peer_does_not_reach_its_successor(endpoints: Callable[..., Endpoint[Message]]) -> None:
    first, client = endpoints(Answers()), endpoints()
    address = first.bind("127.0.0.1", 0)
    assert ask(client, address, Status(), first) == REPORT
    first.close()
    for index in range(5):
        reply = ask(client, address, Release(handles=(f"stale{index}",)), timeout_s=0.05)
        assert isinstance(reply, PeerUnreachable)
    answers = Answers()
    second = endpoints(answers)
    second.bind("127.0.0.1", int(address.rpartition(":")[2]))
    assert ask(client, address, Status(), second) == REPORT
    pump_for(0.3, client, second)
    assert answers.seen == [Status()]


def pump_for(duration_s: float, *endpoints: Endpoint[Message]) -> None:
    until_s = now_s() + duration_s
    while now_s() < until_s:
        for endpoint in endpoints:
            endpoint.poll(0.002)


def test_what_the_handler_refuses_is_told_and_what_it_breaks_is_not(
    endpoints: Callable[..., Endpoint[Message]], caplog: pytest.LogCaptureFixture
) -> None:
    server, client = endpoints(Answers()), endpoints()
    address = server.bind("127.0.0.1", 0)
    refused = ask(client, address, Hello(1, "me"), server)
    assert isinstance(refused, RemoteProtocolError)
    assert "block_size_tokens: 16 != 128" in str(refused)
    broken = ask(client, address, REPORT, server)
    assert isinstance(broken, RemoteProtocolError)
    assert "internal error" in str(broken)
    assert "0xdeadbeef" not in str(broken)
    assert "0xdeadbeef" in caplog.text
    unanswered = ask(client, address, Released(), server)
    assert isinstance(unanswered, RemoteProtocolError)
    assert "Released is not a request" in str(unanswered)
    assert server.counts["handler_error"] == 1


def test_a_callback_that_fails_does_not_end_the_reactor(endpoints: Callable[..., Endpoint[Message]]) -> None:
    def fail(reply: object) -> None:
        raise RuntimeError("callback")

    server, client = endpoints(Answers()), endpoints()
    address = server.bind("127.0.0.1", 0)
    client.request(address, Status(), timeout_s=LIMIT_S, on_reply=fail)
    pump(lambda: client.counts["callback_error"] == 1, client, server)
    assert ask(client, address, Status(), server) == REPORT


def test_a_callback_may_ask_again(endpoints: Callable[..., Endpoint[Message]]) -> None:
    server, client = endpoints(Answers()), endpoints()
    address = server.bind("127.0.0.1", 0)
    replies: list[object] = []

    def ask_again(reply: object) -> None:
        replies.append(reply)
        if len(replies) < 3:
            client.request(address, Status(), timeout_s=LIMIT_S, on_reply=ask_again)

    client.request(address, Status(), timeout_s=LIMIT_S, on_reply=ask_again)
    pump(lambda: len(replies) == 3, client, server)
    assert replies == [REPORT] * 3


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(SECRET, b"another secret, longer"), (SECRET, None), (None, SECRET)],
    ids=["other", "no", "one"],
)
def test_without_the_same_secret_nothing_is_handled_or_answered(
    endpoints: Callable[..., Endpoint[Message]], ours: bytes | None, theirs: bytes | None
) -> None:
    answers = Answers()
    server, client = endpoints(answers, ours), endpoints(secret=theirs)
    reply = ask(client, server.bind("127.0.0.1", 0), Status(), server, timeout_s=1.5)
    assert isinstance(reply, PeerUnreachable)
    assert not answers.seen
    assert server.counts["wrong_tag"] == 1


def test_garbage_is_counted_logged_seldom_and_survived(
    endpoints: Callable[..., Endpoint[Message]], caplog: pytest.LogCaptureFixture
) -> None:
    answers = Answers()
    server, client = endpoints(answers), endpoints()
    address = server.bind("127.0.0.1", 0)
    good = frame_of(Status())
    garbage = [b"", b"\x00", b"KVSH", os.urandom(300), good[:-1] + bytes([good[-1] ^ 1]), good[:30], good + b"x"]
    with caplog.at_level(logging.WARNING), stranger(address) as dealer:
        for data in garbage:
            dealer.send(data)
        dealer.send_multipart([b"two", b"parts"])
        bad = len(garbage) + 1
        pump(lambda: server.counts["malformed"] + server.counts["wrong_tag"] == bad, server)
    assert not answers.seen
    assert len([record for record in caplog.records if "so far" in record.message]) <= 2
    assert ask(client, address, Status(), server) == REPORT


def test_bytes_that_are_no_zmq_at_all_are_survived(endpoints: Callable[..., Endpoint[Message]]) -> None:
    server, client = endpoints(Answers()), endpoints()
    address = server.bind("127.0.0.1", 0)
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as http:
        http.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert ask(client, address, Status(), server) == REPORT


def test_an_authentic_but_undecodable_request_is_refused_with_the_reason(
    endpoints: Callable[..., Endpoint[Message]],
) -> None:
    server = endpoints(Answers())
    address = server.bind("127.0.0.1", 0)
    with stranger(address) as dealer:
        for payload in (b"", b"\xc1", b"\x80", b"\x81\xa4type\xa6unheard"):
            dealer.send(Sealer(SECRET).seal(Frame(MessageCodec.version, Kind.REQUEST, os.urandom(16), payload)))
            pump(lambda: bool(dealer.poll(0)), server)
            answer = MessageCodec().decode(Sealer(SECRET).open(dealer.recv()).payload)
            assert isinstance(answer, Refused)
            assert "undecodable" in answer.reason
    assert server.counts["undecodable"] == 4


def test_a_request_of_another_protocol_version_is_refused_with_both_versions(
    endpoints: Callable[..., Endpoint[Message]],
) -> None:
    answers = Answers()
    server = endpoints(answers)
    address = server.bind("127.0.0.1", 0)
    with stranger(address) as dealer:
        dealer.send(frame_of(Status(), version=99))
        pump(lambda: bool(dealer.poll(0)), server)
        answer = MessageCodec().decode(Sealer(SECRET).open(dealer.recv()).payload)
    assert answer == Refused("protocol version 99 is not 1")
    assert not answers.seen


def test_a_replayed_request_is_handled_once(endpoints: Callable[..., Endpoint[Message]]) -> None:
    answers = Answers()
    server = endpoints(answers)
    address = server.bind("127.0.0.1", 0)
    recorded = frame_of(Release(handles=("h",)))
    with stranger(address) as dealer:
        for _ in range(3):
            dealer.send(recorded)
        pump(lambda: server.counts["replayed"] == 2, server)
    assert len(answers.seen) == 1


def test_a_reply_for_another_request_is_not_accepted(endpoints: Callable[..., Endpoint[Message]]) -> None:
    client = endpoints()
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    replies: list[object] = []
    try:
        client.request(f"127.0.0.1:{port}", Status(), timeout_s=2.0, on_reply=replies.append)
        pump(lambda: bool(router.poll(0)), client)
        identity, request = router.recv_multipart()
        asked = Sealer(SECRET).open(request)
        payload = MessageCodec().encode(REPORT)
        forged = (
            Sealer(SECRET).seal(Frame(1, Kind.REPLY, os.urandom(16), payload)),
            Sealer(SECRET).seal(Frame(1, Kind.REQUEST, asked.correlation_id, payload)),
            Sealer(b"somebody else's key").seal(Frame(1, Kind.REPLY, asked.correlation_id, payload)),
            Sealer(None).seal(Frame(1, Kind.REPLY, asked.correlation_id, payload)),
        )
        for frame in forged:
            router.send_multipart([identity, frame])
        pump(lambda: (client.counts["unexpected_reply"], client.counts["wrong_tag"]) == (2, 2), client)
        pump(lambda: bool(replies), client)
    finally:
        router.close()
        context.term()
    assert isinstance(replies[0], PeerUnreachable)


def test_an_oversize_frame_ends_its_connection_and_nothing_else(endpoints: Callable[..., Endpoint[Message]]) -> None:
    answers = Answers()
    server, client = endpoints(answers), endpoints()
    address = server.bind("127.0.0.1", 0)
    with stranger(address) as dealer:
        dealer.send(frame_of(Release(handles=("x" * MAX_FRAME_BYTES,))))
        pump_for(0.3, server)
    assert not answers.seen
    assert not server.counts
    assert ask(client, address, Status(), server) == REPORT


def test_a_message_over_the_limit_is_not_sent(endpoints: Callable[..., Endpoint[Message]]) -> None:
    big = Release(handles=("x" * MAX_FRAME_BYTES,))
    server, client = endpoints(lambda message: message if message == big else big), endpoints()
    address = server.bind("127.0.0.1", 0)
    reply = ask(client, address, big)
    assert isinstance(reply, TransportError)
    assert "over the limit" in str(reply)
    answer = ask(client, address, Status(), server)
    assert isinstance(answer, RemoteProtocolError)
    assert "too large" in str(answer)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_listening_to_other_machines_needs_a_secret(endpoints: Callable[..., Endpoint[Message]], host: str) -> None:
    with pytest.raises(ConfigError, match="KVSHUTTLE_SECRET"):
        endpoints(secret=None).bind(host, 0)


def test_with_a_secret_it_may_listen_to_other_machines(endpoints: Callable[..., Endpoint[Message]]) -> None:
    server, client = endpoints(Answers()), endpoints()
    port = server.bind("0.0.0.0", 0).rpartition(":")[2]
    assert ask(client, f"127.0.0.1:{port}", Status(), server) == REPORT


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "[::1]"])
def test_every_spelling_of_loopback_can_be_bound_and_reached(
    endpoints: Callable[..., Endpoint[Message]], host: str
) -> None:
    server, client = endpoints(Answers(), None), endpoints(secret=None)
    address = server.bind(host, 0)
    assert address.startswith(("[::1]:", "127.0.0.1:", "localhost:"))
    assert ask(client, address, Status(), server) == REPORT


def test_a_port_in_use_is_named(endpoints: Callable[..., Endpoint[Message]]) -> None:
    port = int(endpoints().bind("127.0.0.1", 0).rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"side_channel_port.*{port}"):
        endpoints().bind("127.0.0.1", port)


@pytest.mark.parametrize(("host", "port"), [("no.such.host.invalid", 0), ("127.0.0.1", 70000), ("192.0.2.254", 0)])
def test_a_host_or_port_that_is_not_ours_is_a_setting_to_fix(
    endpoints: Callable[..., Endpoint[Message]], host: str, port: int
) -> None:
    with pytest.raises(ConfigError, match="side_channel_"):
        endpoints().bind(host, port)


def test_closing_answers_what_is_in_flight_and_later_requests(endpoints: Callable[..., Endpoint[Message]]) -> None:
    client = endpoints()
    replies: list[object] = []
    client.request("127.0.0.1:1", Status(), timeout_s=60.0, on_reply=replies.append)
    client.close()
    client.close()
    assert [type(reply) for reply in replies] == [TransportError]
    client.request("127.0.0.1:1", Status(), timeout_s=60.0, on_reply=replies.append)
    assert [type(reply) for reply in replies] == [TransportError] * 2
    client.send("127.0.0.1:1", Busy("me", 1.0))
    client.wake()
    assert repr(client) == "<Endpoint test closed>"


# -- the thread ---------------------------------------------------------------------------------------------------


@pytest.fixture
def threads(endpoints: Callable[..., Endpoint[Message]]) -> Iterator[Callable[..., SideChannelThread[Message]]]:
    """Makes started side-channel threads, and stops them at the end."""
    made: list[SideChannelThread[Message]] = []

    def make(
        endpoint: Endpoint[Message], tick: Callable[[float], float | None] | None = None
    ) -> SideChannelThread[Message]:
        made.append(SideChannelThread(endpoint, tick=tick, name="test-side"))
        made[-1].start()
        return made[-1]

    yield make
    assert all(thread.stop(LIMIT_S) for thread in made)


def test_a_coroutine_gets_its_reply_or_the_error(
    endpoints: Callable[..., Endpoint[Message]], threads: Callable[..., SideChannelThread[Message]]
) -> None:
    server = endpoints(Answers())
    address = server.bind("127.0.0.1", 0)
    threads(server)
    client = threads(endpoints())

    async def converse() -> None:
        assert await client.request_async(address, Status(), timeout_s=LIMIT_S) == REPORT
        many = await asyncio.gather(*(client.request_async(address, Status(), timeout_s=LIMIT_S) for _ in range(50)))
        assert many == [REPORT] * 50
        with pytest.raises(RemoteProtocolError, match="internal error"):
            await client.request_async(address, REPORT, timeout_s=LIMIT_S)
        with pytest.raises(PeerUnreachable):
            await client.request_async("127.0.0.1:1", Status(), timeout_s=0.1)

    asyncio.run(converse())


def test_a_cancelled_coroutine_leaves_nothing_behind(
    endpoints: Callable[..., Endpoint[Message]], threads: Callable[..., SideChannelThread[Message]]
) -> None:
    client = threads(endpoints())

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.request_async("127.0.0.1:1", Status(), timeout_s=1.5), 0.05)

    asyncio.run(give_up())
    # The reply comes when the loop is closed; the thread has to live on.
    done = threading.Event()
    client.submit(lambda e: e.request("127.0.0.1:1", Status(), timeout_s=1.6, on_reply=lambda _: done.set()))
    assert done.wait(LIMIT_S)
    assert not client.counts


def test_the_thread_sleeps_until_its_deadline_or_until_it_is_woken(
    endpoints: Callable[..., Endpoint[Message]], threads: Callable[..., SideChannelThread[Message]]
) -> None:
    ticks: list[float] = []
    deadlines: list[float | None] = [0.2, None]
    ran = threading.Event()

    def tick(at_s: float) -> float | None:
        ticks.append(at_s)
        ran.set()
        after_s = deadlines.pop(0) if deadlines else None
        return None if after_s is None else at_s + after_s

    thread = threads(endpoints(), tick)
    assert wait_until(lambda: len(ticks) == 2)
    assert ticks[1] - ticks[0] >= 0.2
    time.sleep(0.3)
    assert len(ticks) == 2, "nothing to do, and yet it ticks"
    submitted = threading.Event()
    thread.submit(lambda _: submitted.set())
    assert submitted.wait(LIMIT_S)
    assert wait_until(lambda: len(ticks) == 3)


def test_failures_of_ticks_and_submissions_are_counted_and_survived(
    endpoints: Callable[..., Endpoint[Message]], threads: Callable[..., SideChannelThread[Message]]
) -> None:
    def tick(at_s: float) -> float | None:
        raise RuntimeError("tick")

    def submission(_: Endpoint[Message]) -> None:
        raise RuntimeError("submission")

    thread = threads(endpoints(), tick)
    thread.submit(submission)
    assert wait_until(lambda: thread.counts["submission_error"] == 1 and thread.counts["tick_error"] >= 1)
    done = threading.Event()
    thread.submit(lambda _: done.set())
    assert done.wait(LIMIT_S)


def test_submissions_before_the_stop_run_and_later_ones_are_refused(
    endpoints: Callable[..., Endpoint[Message]], threads: Callable[..., SideChannelThread[Message]]
) -> None:
    thread = threads(endpoints())
    ran: list[int] = []
    replies: list[object] = []
    thread.submit(lambda e: e.request("127.0.0.1:1", Status(), timeout_s=60.0, on_reply=replies.append))
    thread.submit(lambda _: ran.append(1))
    assert thread.stop(LIMIT_S)
    assert thread.stop(LIMIT_S)
    assert ran == [1]
    assert [type(reply) for reply in replies] == [TransportError]
    with pytest.raises(TransportError, match="stopped"):
        thread.submit(lambda _: ran.append(2))
    assert "stopped" in repr(thread)


def test_a_thread_that_was_never_started_stops_too(endpoints: Callable[..., Endpoint[Message]]) -> None:
    thread = SideChannelThread(endpoints())
    replies: list[object] = []
    thread.submit(lambda e: e.request("127.0.0.1:1", Status(), timeout_s=60.0, on_reply=replies.append))
    assert thread.stop(LIMIT_S)
    assert [type(reply) for reply in replies] == [TransportError]


def test_nothing_is_left_open_after_closing(endpoints: Callable[..., Endpoint[Message]]) -> None:
    def opened() -> set[str]:
        return {entry.name for entry in os.scandir("/proc/self/fd")}

    before, threads_before = opened(), threading.active_count()
    server = endpoints(Answers())
    address = server.bind("127.0.0.1", 0)
    thread = SideChannelThread(endpoints())
    thread.start()
    thread.submit(lambda e: e.send(address, Busy("me", 1.0)))
    pump_for(0.1, server)
    assert thread.stop(LIMIT_S)
    server.close()
    assert wait_until(lambda: len(opened()) <= len(before))
    assert wait_until(lambda: threading.active_count() <= threads_before)


def wait_until(is_so: Callable[[], bool]) -> bool:
    deadline_at_s = now_s() + LIMIT_S
    while not is_so() and now_s() < deadline_at_s:
        time.sleep(0.005)
    return is_so()
