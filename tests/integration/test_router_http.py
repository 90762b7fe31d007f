import contextlib
import json
import re
import socket
import time

import pytest

from support.fake_engine import hang, sse, stream
from support.router_cluster import cluster

COMPLETIONS = "/v1/completions"
BODY = {"model": "m", "prompt": "hello"}


def read_until_closed(client: socket.socket) -> bytes:
    pieces = []
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


@pytest.fixture(scope="module")
def one():
    with cluster(max_body_bytes=4096, max_header_bytes=2048) as running:
        yield running


def raw(cluster, data: bytes) -> bytes:
    client = cluster.connect()
    client.sendall(data)
    try:
        return read_until_closed(client)
    finally:
        client.close()


GET_HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
CLOSING = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def test_pipelined_requests_are_answered_in_order_on_one_connection(one):
    post = b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 27\r\n\r\n{"model":"m","prompt":"hi"}'
    data = raw(one, post + GET_HEALTH + b"GET /nope HTTP/1.1\r\nhost: x\r\n\r\n" + CLOSING)
    assert re.findall(rb"HTTP/1.1 (\d+)", data) == [b"200", b"200", b"404", b"200"]
    assert data.count(b"connection: close") == 1


def test_many_pipelined_requests_are_all_answered(one):
    data = raw(one, GET_HEALTH * 200 + CLOSING)
    assert data.count(b"HTTP/1.1 200 OK") == 201


def test_engine_connections_are_used_again(one):
    before = (one.prefills[0].num_connections, one.decodes[0].num_connections)
    for _ in range(10):
        assert one.post(COMPLETIONS, BODY).status == 200
        assert one.post(COMPLETIONS, {**BODY, "stream": True}).status == 200
    after = (one.prefills[0].num_connections, one.decodes[0].num_connections)
    assert max(after[0] - before[0], after[1] - before[1]) <= 2


def test_an_http_10_client_gets_its_stream_until_the_connection_closes(one):
    one.decodes[0].script.append(stream([sse("a"), b"data: [DONE]\n\n"]))
    body = b'{"model":"m","prompt":"hi","stream":true}'
    data = raw(one, b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    head, _, rest = data.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert b"connection: close" in head
    assert rest == sse("a") + b"data: [DONE]\n\n"


def test_a_chunked_request_body_reaches_the_engines_whole(one):
    one.decodes[0].calls.clear()
    data = raw(
        one,
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        b'd\r\n{"model":"m",\r\ne\r\n"prompt":"hi"}\r\n0\r\n\r\n',
    )
    assert data.startswith(b"HTTP/1.1 200")
    assert one.decodes[0].calls[0].body["prompt"] == "hi"


def test_a_client_that_expects_100_continue_gets_it_before_its_answer(one):
    client = one.connect()
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 27\r\n"
        b"connection: close\r\n\r\n"
    )
    assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.sendall(b'{"model":"m","prompt":"hi"}')
    assert read_until_closed(client).startswith(b"HTTP/1.1 200")
    client.close()


def test_a_client_that_expects_to_continue_with_too_much_is_told_at_once(one):
    data = raw(one, b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 99999\r\n\r\n")
    assert data.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4097\r\n\r\n" + b"x" * 4097, 413),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"x" * 4000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 1000, 431),
        (b"rubbish\r\n\r\n", 400),
    ],
)
def test_what_is_too_large_or_broken_gets_an_openai_error_and_the_connection_ends(one, data, status):
    before = one.metric("refused_total", status=str(status))
    answer = raw(one, data)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in answer
    assert b'{"error":{"message":"' in answer
    assert one.metric("refused_total", status=str(status)) == before + 1


def test_the_answer_to_a_huge_upload_is_readable_although_the_upload_goes_on(one):
    client = one.connect()
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        for _ in range(20):
            client.sendall(b"x" * 10_000)
    assert client.recv(12) == b"HTTP/1.1 413"
    client.close()


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/", 404, None),
        ("POST", "/v1/embeddings", 404, None),
        ("GET", "/v1/completions", 405, "POST, OPTIONS"),
        ("DELETE", "/v1/chat/completions", 405, "POST, OPTIONS"),
        ("POST", "/health", 405, "GET, HEAD, OPTIONS"),
        ("POST", "/v1/models", 405, "GET, HEAD, OPTIONS"),
        ("OPTIONS", "/v1/completions", 204, "POST, OPTIONS"),
        ("OPTIONS", "/nope", 404, None),
    ],
)
def test_unknown_paths_and_methods_are_answered_as_openai_does(one, method, path, status, allow):
    reply = one.get(path, method)
    assert reply.status == status
    assert reply.headers.get("allow") == allow
    assert ("x-request-id" in reply.headers) == (status >= 400)
    if status >= 400:
        assert reply.json["error"]["code"] == status


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models"])
def test_head_is_get_without_a_body(one, path):
    head, get = one.get(path, "HEAD"), one.get(path)
    assert (head.status, head.read_body) == (get.status, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


def test_an_idle_connection_is_closed_after_a_while():
    with cluster(keep_alive_s=0.6) as one:
        client = one.connect()
        client.sendall(GET_HEALTH)
        started_at_s = time.monotonic()
        assert read_until_closed(client).startswith(b"HTTP/1.1 200")
        assert time.monotonic() - started_at_s > 0.5
        client.close()


def test_a_request_that_dribbles_in_is_refused_in_time():
    with cluster(request_timeout_s=0.4) as one:
        client = one.connect()
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert read_until_closed(client).startswith(b"HTTP/1.1 408")
        client.close()


def test_connections_over_the_limit_are_told_so():
    with cluster(max_connections=3) as few:
        held = [few.connect() for _ in range(3)]
        time.sleep(0.1)
        answer = raw(few, b"")
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"\r\nretry-after: 1\r\n" in answer
        for client in held:
            client.close()
        few.wait_for(lambda: few.get("/health").status == 200)


def test_a_client_that_does_not_read_stops_the_engine_from_sending_and_loses_nothing():
    num_events = 400
    event = b"data: " + b"x" * 50_000 + b"\n\n"
    with cluster(client_buffer_bytes=65_536) as one:
        sent = []

        async def flood(call):
            await call.begin_stream()
            for index in range(num_events):
                await call.chunk(event)
                sent.append(index)
            await call.end_stream()

        one.decodes[0].script.append(flood)
        client = one.connect()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 41\r\n\r\n"
            b'{"model":"m","prompt":"hi","stream":true}'
        )
        one.wait_for(lambda: len(sent) > 2)
        stalled, since_s = len(sent), time.monotonic()
        while time.monotonic() - since_s < 0.4:
            time.sleep(0.02)
            if len(sent) != stalled:
                stalled, since_s = len(sent), time.monotonic()
        assert stalled < num_events * 0.9
        data = read_until_closed(client)
        client.close()
        assert data.count(event) == num_events
        assert data.endswith(b"0\r\n\r\n")


def test_a_client_that_never_reads_is_dropped_and_its_engine_with_it():
    with cluster(client_buffer_bytes=65_536, slow_client_timeout_s=0.3) as one:
        aborted = []

        async def flood(call):
            await call.begin_stream()
            try:
                while True:
                    await call.chunk(b"data: " + b"x" * 50_000 + b"\n\n")
            except ConnectionError:
                aborted.append(True)
                raise

        one.decodes[0].script.append(flood)
        client = one.send_post(COMPLETIONS, {**BODY, "stream": True})
        one.wait_for(lambda: bool(aborted))
        one.wait_for(lambda: one.metric("client_disconnects_total", window="streaming") == 1)
        client.close()


def test_a_stop_lets_running_requests_end_and_takes_no_new_ones():
    with cluster(drain_s=5) as one:
        one.decodes[0].script.append(stream([sse("a"), sse("b"), b"data: [DONE]\n\n"], gap_s=0.15))
        client = one.send_post(COMPLETIONS, {**BODY, "stream": True})
        assert client.recv(12) == b"HTTP/1.1 200"
        assert one.run(one.router.stop(5)) is True
        assert read_until_closed(client).endswith(b"0\r\n\r\n")
        client.close()
        with pytest.raises(ConnectionError):
            one.connect()


def num_completions(one, outcome: str) -> float:
    """By outcome, of a router that has stopped and cannot be asked."""
    start = f'kvshuttle_router_requests_total{{endpoint="completions",outcome="{outcome}"}} '
    lines = one.router.telemetry.exposition().decode().splitlines()
    return float(next(line for line in lines if line.startswith(start)).removeprefix(start))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_stop_tells_those_who_have_no_answer_yet_to_come_again(is_streamed):
    with cluster() as one:
        one.decodes[0].script.append(hang)
        client = one.send_post(COMPLETIONS, {**BODY, "stream": is_streamed})
        one.wait_for(lambda: len(one.decodes[0].calls) == 1)
        assert one.run(one.router.stop(0.1)) is False
        head, _, body = read_until_closed(client).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: " in head
        assert b"connection: close" in head
        assert json.loads(body)["error"]["message"] == "The router is stopping; send the request again."
        one.wait_for(lambda: one.decodes[0].num_aborted == 1)
        assert num_completions(one, "stopped") == 1
        client.close()


def test_a_stop_cuts_off_what_does_not_end_in_time():
    with cluster() as one:
        one.decodes[0].script.append(stream([sse("a")], then="hang"))
        client = one.send_post(COMPLETIONS, {**BODY, "stream": True})
        assert client.recv(12) == b"HTTP/1.1 200"
        assert one.run(one.router.stop(0.1)) is False
        rest = read_until_closed(client)
        assert b"The router stopped while it was answering." in rest
        assert rest.rstrip().endswith(b"}")
        assert b"[DONE]" not in rest
        assert num_completions(one, "stopped") == 1
        assert num_completions(one, "disconnected") == 0
        one.wait_for(lambda: one.decodes[0].num_aborted == 1)
        assert one.prefills[0].released == [one.prefills[0].calls[0].leg["transfer_id"]]
        client.close()
