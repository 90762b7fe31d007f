"""The proxy that vLLM's connectors are measured behind, against fake engines: its legs, its turns, and its failures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kvshuttle.bench.proxy import Proxy, ProxyMode
from kvshuttle.bench.upstream_params import upstream_prefill_params, upstream_push_params
from kvshuttle.config import RouterConfig
from support.fake_engine import (
    DEFAULT_ANSWER,
    DEFAULT_EVENTS,
    FakeEngine,
    answer,
    hang,
    hang_after_headers,
    reset_before_headers,
    sse,
    status,
    stream,
)
from support.router_cluster import PATIENCE_S, QUICK, Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.fake_engine import Behaviour, Call

PATH = "/v1/completions"
BODY = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 8, "min_tokens": 8, "stream": True}
HELD = {"do_remote_prefill": True, "remote_engine_id": "prefill-0", "remote_block_ids": [1, 2]}
HOLDS = answer({**DEFAULT_ANSWER, "kv_transfer_params": HELD})
FIRST_BYTE_S = 1.5
STREAM = b"".join(DEFAULT_EVENTS)


class ProxyCluster(Cluster):
    """Fake engines and a proxy on a background loop."""

    def __init__(self, mode: ProxyMode, num_prefills: int, num_decodes: int) -> None:
        prefills = [FakeEngine(f"prefill-{index}") for index in range(num_prefills)]
        super().__init__(prefills, [FakeEngine(f"decode-{index}") for index in range(num_decodes)])
        self.proxy_mode = mode

    async def _start(self) -> None:
        for engine in [*self.prefills, *self.decodes]:
            await engine.start()
        urls = {"prefill": [each.url for each in self.prefills], "decode": [each.url for each in self.decodes]}
        self.proxy = Proxy(
            self.proxy_mode, RouterConfig.from_mapping({**QUICK, **urls, "first_byte_timeout_s": FIRST_BYTE_S})
        )
        self.port = await self.proxy.start()

    async def _stop(self) -> None:
        await self.proxy.stop()
        for engine in [*self.prefills, *self.decodes]:
            await engine.kill()


@contextlib.contextmanager
def proxied(mode: ProxyMode, num_prefills: int = 1, num_decodes: int = 1) -> Iterator[ProxyCluster]:
    made = ProxyCluster(mode, num_prefills, num_decodes)
    try:
        made.start_unpaired()
        yield made
    finally:
        made.stop()


def when_asked(other: FakeEngine, behave: Behaviour) -> Behaviour:
    """Answer once the other engine has been asked, too."""

    async def wait(call: Call) -> None:
        for _ in range(1000):
            if other.calls:
                break
            await asyncio.sleep(0.005)
        await behave(call)

    return wait


def params_of(engine: FakeEngine, index: int = 0) -> Any:
    return engine.calls[index].body["kv_transfer_params"]


def test_a_pull_hands_the_prefill_engines_answer_to_the_decode_engine() -> None:
    with proxied(ProxyMode.PULL) as cluster:
        (prefill,), (decode,) = cluster.prefills, cluster.decodes
        prefill.script.append(HOLDS)
        reply = cluster.post(PATH, BODY)
        assert (reply.status, reply.read_body) == (200, STREAM)
        assert params_of(prefill) == upstream_prefill_params()
        assert (prefill.calls[0].body["max_tokens"], prefill.calls[0].body["stream"]) == (1, False)
        assert decode.calls[0].body == {**BODY, "kv_transfer_params": HELD}


def test_a_push_sends_both_legs_at_once_under_one_request_id() -> None:
    with proxied(ProxyMode.PUSH) as cluster:
        (prefill,), (decode,) = cluster.prefills, cluster.decodes

        prefill.script.append(when_asked(decode, HOLDS))
        decode.script.append(when_asked(prefill, stream(DEFAULT_EVENTS)))
        assert cluster.post(PATH, BODY).read_body == STREAM
        ids = {engine.calls[0].headers["x-request-id"] for engine in (prefill, decode)}
        assert len(ids) == 1
        assert params_of(prefill) == upstream_prefill_params()
        assert params_of(decode) == upstream_push_params(ids.pop(), "prefill-0", "prefill-0.side:1")


WHOLE = {**BODY, "stream": False}
KEPT = {"do_remote_decode": True, "remote_engine_id": "decode-0", "remote_block_ids": [[7, 8, 9]]}
KEEPS = answer({**DEFAULT_ANSWER, "kv_transfer_params": KEPT})


def named(name: str) -> dict[str, str]:
    return {"x-conversation-id": name}


def lines_in(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """What the proxy has logged of requests."""
    return [json.loads(record.getMessage()) for record in caplog.records if record.name == "kvshuttle.router.requests"]


def test_both_ways_the_next_turn_is_told_once_where_its_history_is(caplog: pytest.LogCaptureFixture) -> None:
    with proxied(ProxyMode.BOTH) as cluster, caplog.at_level(logging.INFO, logger="kvshuttle.router.requests"):
        (prefill,), (decode,) = cluster.prefills, cluster.decodes
        usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 5}}
        holds_some = answer({**DEFAULT_ANSWER, "usage": usage, "kv_transfer_params": HELD})
        prefill.script.extend([HOLDS, HOLDS, holds_some, HOLDS])
        decode.script.extend([KEEPS, KEEPS, answer(DEFAULT_ANSWER), KEEPS])
        replies = [cluster.post(PATH, WHOLE, named("one")), cluster.post(PATH, WHOLE, named("two"))]
        assert "kvshuttle:retained_blocks 6\n" in cluster.get("/metrics").read_body.decode()
        replies.append(cluster.post(PATH, WHOLE, {**named("one"), "x-request-id": "client's own"}))
        replies.append(cluster.post(PATH, WHOLE, named("one")))
        assert [reply.json for reply in replies] == [{**DEFAULT_ANSWER, "kv_transfer_params": None}] * 2 + [
            DEFAULT_ANSWER,
            {**DEFAULT_ANSWER, "kv_transfer_params": None},
        ]
        fresh = upstream_prefill_params()
        assert [params_of(prefill, index) for index in range(4)] == [fresh, fresh, KEPT, fresh]
        assert [params_of(decode, index) for index in range(4)] == [HELD] * 4
        cluster.wait_for(lambda: len(lines_in(caplog)) == 4)
        lines = lines_in(caplog)
    assert [line["history"] for line in lines] == ["none", "none", "given", "none"]
    assert [line["request_id"] for line in lines] == [reply.headers["x-request-id"] for reply in replies]
    assert lines[2]["num_cached_tokens"] == 5
    assert lines[2]["request_id"] == "client's own" != prefill.calls[2].headers["x-request-id"]
    assert 0 < lines[2]["stages_s"]["prefill"] <= lines[2]["stages_s"]["total"]


@pytest.mark.parametrize(
    ("body", "headers", "told"), [(WHOLE, {}, "header x-conversation-id"), (BODY, named("one"), "stream: false")]
)
def test_both_ways_what_could_have_no_next_turn_is_refused(body, headers, told: str) -> None:
    with proxied(ProxyMode.BOTH) as cluster:
        reply = cluster.post(PATH, body, headers)
        assert reply.status == 400
        assert told in reply.json["error"]["message"]
        assert cluster.prefills[0].calls == []


def test_alone_the_decode_engine_gets_what_the_client_sent() -> None:
    with proxied(ProxyMode.ALONE) as cluster:
        assert cluster.post(PATH, BODY).read_body == STREAM
        assert cluster.decodes[0].calls[0].body == BODY
        assert cluster.prefills[0].calls == []


def test_engines_take_turns() -> None:
    with proxied(ProxyMode.PULL, 4, 2) as cluster:
        for engine in cluster.prefills:
            engine.script.extend([HOLDS] * 2)
        for _ in range(8):
            assert cluster.post(PATH, BODY).status == 200
        assert [len(engine.calls) for engine in cluster.prefills] == [2, 2, 2, 2]
        assert [len(engine.calls) for engine in cluster.decodes] == [4, 4]


def test_a_stream_passes_through_as_it_comes() -> None:
    with proxied(ProxyMode.ALONE) as cluster:
        cluster.decodes[0].script.append(stream([sse("first")], then="hang"))
        client = cluster.send_post(PATH, BODY)
        received = b""
        while b"first" not in received:
            piece = client.recv(65_536)
            assert piece, "the stream has ended"
            received += piece
        client.close()


def test_whole_answers_and_refusals_reach_the_client() -> None:
    with proxied(ProxyMode.ALONE) as cluster:
        assert cluster.post(PATH, {**BODY, "stream": False}).json == DEFAULT_ANSWER
        cluster.decodes[0].script.append(status(422, "no such thing"))
        reply = cluster.post(PATH, BODY)
        assert (reply.status, reply.json["error"]["message"]) == (422, "no such thing")


@pytest.mark.parametrize("mode", [ProxyMode.PULL, ProxyMode.PUSH])
@pytest.mark.parametrize("fault", [status(500), reset_before_headers, answer(DEFAULT_ANSWER)])
def test_a_prefill_leg_that_fails_fails_the_request(mode: ProxyMode, fault) -> None:
    with proxied(mode) as cluster:
        if mode is ProxyMode.PUSH:
            fault = when_asked(cluster.decodes[0], fault)
            cluster.decodes[0].script.append(hang)
        cluster.prefills[0].script.append(fault)
        reply = cluster.post(PATH, BODY)
        assert reply.status == 502
        assert reply.json["error"]["message"].startswith("A leg failed: ")
        if mode is ProxyMode.PUSH:
            cluster.wait_for(lambda: cluster.decodes[0].num_aborted == 1)


def test_a_decode_engine_that_dies_in_its_stream_leaves_the_stream_unfinished() -> None:
    with proxied(ProxyMode.ALONE) as cluster:
        cluster.decodes[0].script.append(stream([sse("hello")], then="reset"))
        client = cluster.send_post(PATH, BODY)
        received = b""
        while chunk := client.recv(65_536):
            received += chunk
        client.close()
        assert b"hello" in received
        assert not received.endswith(b"0\r\n\r\n")


def test_a_decode_engine_that_never_begins_fails_the_request_in_time() -> None:
    with proxied(ProxyMode.ALONE) as cluster:
        cluster.decodes[0].script.append(hang_after_headers)
        assert cluster.post(PATH, BODY).status == 502
        cluster.wait_for(lambda: cluster.decodes[0].num_aborted == 1)


def test_a_client_that_leaves_ends_both_legs() -> None:
    with proxied(ProxyMode.PUSH) as cluster:
        engines = [*cluster.prefills, *cluster.decodes]
        for engine in engines:
            engine.script.append(hang)
        client = cluster.send_post(PATH, BODY)
        cluster.wait_for(lambda: all(engine.calls for engine in engines))
        client.close()
        cluster.wait_for(lambda: all(engine.num_aborted == 1 for engine in engines))


def test_what_is_no_completion_is_refused() -> None:
    with proxied(ProxyMode.ALONE) as cluster:
        assert cluster.get("/health").status == 200
        assert cluster.post("/v1/embeddings", BODY).status == 404
        assert cluster.post(PATH, b"[").status == 400


def test_the_proxy_runs_as_a_process_of_its_own(unused_port: int) -> None:
    spec = {
        "mode": "alone",
        "port": unused_port,
        "prefill": ["http://127.0.0.1:9,127.0.0.1:8"],
        "decode": ["http://127.0.0.1:7,127.0.0.1:6"],
    }
    process = subprocess.Popen([sys.executable, "-m", "kvshuttle", "bench-proxy", json.dumps(spec)])
    try:
        with proxied(ProxyMode.ALONE) as cluster:
            cluster.wait_for(lambda: is_listening(unused_port), timeout_s=60)
            cluster.port = unused_port
            assert cluster.get("/health").status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


def is_listening(port: int) -> bool:
    """Asked by connecting: who looks whether the port is free takes it, for that moment, from whom it is for."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def unused_port() -> int:
    import random

    from kvshuttle.launcher.machine import free_ports

    return next(free_ports(random.Random()))
