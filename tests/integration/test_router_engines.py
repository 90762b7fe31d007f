import asyncio
import socket
import time

import msgspec
import pytest

from kvshuttle.handoff.messages import Hello
from support.fake_engine import FINGERPRINT, FakeEngine, default_behaviour, hang, once_among, status, stream
from support.router_cluster import Cluster, cluster

COMPLETIONS = "/v1/completions"
BODY = {"model": "m", "prompt": "hello"}


@pytest.fixture
def one():
    with cluster() as running:
        yield running


def source_of(call):
    return call.leg["source"]["incarnation"]


def test_health_counts_engines_and_pairs_and_names_no_address(one):
    reply = one.get("/health")
    assert (reply.status, reply.json) == (
        200,
        {
            "status": "ok",
            "pairs": 1,
            "prefill": {"up": 1, "total": 1},
            "decode": {"up": 1, "total": 1},
            "down": {},
            "silent": {},
            "incompatible": [],
        },
    )


@pytest.mark.parametrize(
    ("is_silent", "reason"), [(False, "health: cannot connect: ConnectionRefusedError"), (True, "health: probe")]
)
def test_an_engine_that_never_comes_up_is_logged_once_and_health_says_why(caplog, is_silent, reason):
    with socket.socket() as server:
        # Ours as long as the test lasts; who connects to it is refused until it listens.
        server.bind(("127.0.0.1", 0))
        host, port = server.getsockname()
        if is_silent:
            server.listen()
        knobs = {"prefill": [f"http://{host}:{port},{host}:1"], "probe_timeout_s": 0.5}
        dead = Cluster([FakeEngine("prefill-0")], [FakeEngine("decode-0")], **knobs)
        dead.start_unpaired()
        try:
            dead.wait_for(lambda: dead.health()["down"].get("prefill-0", "").startswith(reason))
            dead.wait_for(lambda: dead.health()["decode"]["up"] == 1)
            assert list(dead.health()["down"]) == ["prefill-0"]
            assert str(port) not in dead.health()["down"]["prefill-0"]
            time.sleep(0.3)
            (line,) = [record for record in caplog.records if "prefill-0 is down" in record.getMessage()]
            assert line.levelname == "WARNING"
            assert reason in line.message
        finally:
            dead.stop()


def test_a_killed_prefill_engine_is_down_at_the_first_refused_connection_and_clients_are_served():
    with cluster(probe_interval_s=30) as one:
        one.run(one.prefills[0].kill())
        assert one.post(COMPLETIONS, BODY).status == 200
        assert one.metric("engine_up", engine="prefill-0") == 0
        assert one.decodes[0].calls[-1].leg is None


def test_a_prefill_engine_killed_while_it_computes_costs_no_client_its_answer(one):
    one.prefills[0].script.append(hang)
    client = one.send_post(COMPLETIONS, BODY)
    one.wait_for(lambda: len(one.prefills[0].calls) == 1)
    one.run(one.prefills[0].kill())
    assert client.recv(12) == b"HTTP/1.1 200"
    client.close()


def test_a_prefill_engine_restarted_at_its_address_is_a_new_peer_without_anything_touched(one):
    assert one.post(COMPLETIONS, BODY).status == 200
    one.run(one.prefills[0].kill())
    one.wait_for(lambda: one.health()["pairs"] == 0)
    assert one.post(COMPLETIONS, BODY).status == 200
    one.run(one.prefills[0].restart())
    one.wait_for(lambda: one.health()["pairs"] == 1)
    assert one.post(COMPLETIONS, BODY).status == 200
    assert [call.leg and source_of(call) for call in one.decodes[0].calls] == ["life-1", None, "life-2"]


def test_a_restart_too_quick_to_be_seen_as_down_is_noticed_by_its_incarnation(one):
    one.prefills[0].incarnation = "life-2"
    one.wait_for(lambda: one.post(COMPLETIONS, BODY).status == 200 and source_of(one.decodes[0].calls[-1]) == "life-2")


def test_without_a_decode_engine_clients_are_told_to_come_back(one):
    one.run(one.decodes[0].kill())
    one.wait_for(lambda: one.get("/health").status == 503)
    reply = one.post(COMPLETIONS, BODY)
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    assert one.prefills[0].calls == []
    assert one.get("/v1/models").status == 503
    one.run(one.decodes[0].restart())
    one.wait_for(lambda: one.health()["pairs"] == 1)
    assert one.post(COMPLETIONS, BODY).status == 200


def test_a_decode_engine_killed_while_streaming_cuts_the_stream_and_the_next_request_is_served_elsewhere():
    with cluster(1, 2) as two:
        events = [b"data: 1\n\n"]
        for decode in two.decodes:
            decode.script.append(stream(events, then="hang"))
        client = two.send_post(COMPLETIONS, {**BODY, "stream": True})
        assert client.recv(12) == b"HTTP/1.1 200"
        (busy,) = [decode for decode in two.decodes if decode.calls]
        two.run(busy.kill())
        data = b""
        while piece := client.recv(65536):
            data += piece
        client.close()
        assert b"EngineFailedError" in data
        for decode in two.decodes:
            decode.script.clear()
        assert two.post(COMPLETIONS, BODY).status == 200


def test_without_a_prefill_engine_the_router_is_healthy_only_if_local_prefill_is_allowed():
    for policy, expected in (("retry_then_local", 200), ("retry_then_fail", 503)):
        with cluster(prefill_failure_policy=policy) as one:
            one.run(one.prefills[0].kill())
            one.wait_for(lambda one=one: one.health()["pairs"] == 0)
            assert one.get("/health").status == expected
            assert one.post(COMPLETIONS, BODY).status == expected


def test_an_engine_whose_health_is_bad_is_not_used(one):
    one.prefills[0].health_status = 503
    one.wait_for(lambda: one.health()["prefill"]["up"] == 0)
    one.post(COMPLETIONS, BODY)
    assert one.prefills[0].calls == []
    one.prefills[0].health_status = 200
    one.wait_for(lambda: one.health()["pairs"] == 1)


def test_an_engine_that_is_silent_on_its_side_channel_forms_no_pair_but_decodes_alone(one):
    one.decodes[0].is_side_up = False
    one.wait_for(lambda: one.health()["pairs"] == 0)
    assert one.health()["silent"].keys() == {"decode-0"}
    assert one.health()["silent"]["decode-0"].startswith("side channel: decode-0 gave no answer in ")
    assert one.post(COMPLETIONS, BODY).status == 200
    assert one.metric("decisions_total", route="local", reason="no_compatible_pair") == 1
    one.decodes[0].is_side_up = True
    one.wait_for(lambda: one.health()["pairs"] == 1)
    assert one.health()["silent"] == {}


@pytest.mark.parametrize("policy", ["retry_then_local", "retry_then_fail"])
def test_without_a_decode_engine_a_request_is_refused_and_the_reason_says_so(policy):
    with cluster(prefill_failure_policy=policy) as one:
        one.run(one.decodes[0].kill())
        one.wait_for(lambda: one.health()["decode"]["up"] == 0)
        answer = one.post(COMPLETIONS, BODY)
        assert (answer.status, answer.json["error"]["message"]) == (503, "No decode engine is available.")
        assert one.metric("decisions_total", route="pair", reason="no_decode_engine") == 1
        assert one.metric("placements_total", leg="decode", reason="no_engine_up") == 1
        assert one.prefills[0].calls == []


def test_an_engine_that_is_dead_on_both_channels_fails_what_waits_for_it():
    with cluster(unhealthy_after=2) as one:
        one.prefills[0].script.append(hang)
        client = one.send_post(COMPLETIONS, BODY)
        one.wait_for(lambda: len(one.prefills[0].calls) == 1)
        one.call(lambda: setattr(one.prefills[0], "health_status", 503))
        one.call(lambda: setattr(one.prefills[0], "is_side_up", False))
        assert client.recv(12) == b"HTTP/1.1 200"
        client.close()
        assert one.metric("leg_failures_total", leg="prefill", reason="engine_down") == 1


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_prefill_engine_that_hangs_behind_a_healthy_http_server_fails_what_waits_for_it(mode):
    with cluster(mode=mode, probe_interval_s=0.1, unhealthy_after=2) as one:
        one.prefills[0].script.append(hang)
        if mode == "push":
            one.decodes[0].script.append(hang)
        client = one.send_post(COMPLETIONS, BODY)
        one.wait_for(lambda: len(one.prefills[0].calls) == 1)
        one.call(lambda: setattr(one.prefills[0], "is_side_up", False))
        assert client.recv(12) == b"HTTP/1.1 200"
        client.close()
        assert one.health()["prefill"] == {"up": 1, "total": 1}
        assert one.metric("leg_failures_total", leg="prefill", reason="engine_down") == 1


def test_a_decode_engine_that_is_silent_on_its_side_channel_may_finish_its_answers():
    with cluster(probe_interval_s=0.1, unhealthy_after=2) as one:
        goes_on = asyncio.Event()

        async def answer_later(call):
            await goes_on.wait()
            await default_behaviour(call)

        one.decodes[0].script.append(answer_later)
        client = one.send_post(COMPLETIONS, BODY)
        one.wait_for(lambda: len(one.decodes[0].calls) == 1)
        one.call(lambda: setattr(one.decodes[0], "is_side_up", False))
        one.wait_for(lambda: one.health()["silent"])
        one.call(goes_on.set)
        assert client.recv(12) == b"HTTP/1.1 200"
        client.close()
        assert len(one.decodes[0].calls) == 1


def test_engines_whose_fingerprints_differ_are_never_paired_and_the_fields_are_named(caplog):
    other = msgspec.structs.replace(FINGERPRINT, block_size_tokens=32, kv_dtype="fp8")
    odd = Cluster([FakeEngine("prefill-0")], [FakeEngine("decode-0", fingerprint=other), FakeEngine("decode-1")])
    odd.start_unpaired()
    try:
        odd.wait_for(lambda: odd.health()["pairs"] == 1 and odd.health()["incompatible"] != [])
        (entry,) = odd.health()["incompatible"]
        assert (entry["prefill"], entry["decode"]) == ("prefill-0", "decode-0")
        assert entry["differences"] == ["kv_dtype: 'bf16' != 'fp8'", "block_size_tokens: 16 != 32"]
        for _ in range(5):
            assert odd.post(COMPLETIONS, BODY).status == 200
        assert odd.decodes[0].calls == []
        assert len(odd.decodes[1].calls) == 5
        time.sleep(0.5)
        assert sum("cannot exchange KV" in record.getMessage() for record in caplog.records) == 1
    finally:
        odd.stop()


def test_identity_is_asked_for_once_for_each_life(one):
    one.wait_for(lambda: len(one.channel.messages) > 20)
    hellos = [address for address, message in one.channel.messages if isinstance(message, Hello)]
    assert sorted(hellos) == sorted([one.prefills[0].side_address, one.decodes[0].side_address])


def test_a_model_that_only_the_decode_engine_has_is_served_there_alone():
    some = Cluster([FakeEngine("prefill-0")], [FakeEngine("decode-0", models=("m", "adapter"))])
    some.start()
    try:
        assert some.post(COMPLETIONS, {**BODY, "model": "adapter"}).status == 200
        assert some.prefills[0].calls == []
        assert some.metric("decisions_total", route="local", reason="model_not_on_prefill") == 1
    finally:
        some.stop()


def test_load_is_spread_by_outstanding_prefill_tokens_and_decode_requests():
    with cluster(2, 2, mode="push") as two:
        for engine in [*two.prefills, *two.decodes]:
            engine.script.extend([hang] * 2)
        clients = [two.send_post(COMPLETIONS, BODY) for _ in range(4)]
        two.wait_for(lambda: sum(len(engine.calls) for engine in [*two.prefills, *two.decodes]) == 8)
        assert [len(prefill.calls) for prefill in two.prefills] == [2, 2]
        assert [len(decode.calls) for decode in two.decodes] == [2, 2]
        for client in clients:
            client.close()


def test_a_failing_engine_is_avoided_for_a_while():
    with cluster(2, 1, quarantine_s=60.0) as two:
        used = once_among(two.prefills, status(500))
        two.post(COMPLETIONS, BODY)
        (bad,) = used
        for _ in range(10):
            two.post(COMPLETIONS, BODY)
        assert len(bad.calls) == 1


def test_a_failing_engine_that_was_avoided_for_a_while_is_used_again():
    with cluster(2, 1, quarantine_s=0.2) as two:
        used = once_among(two.prefills, status(500))
        two.post(COMPLETIONS, BODY)
        (bad,) = used
        two.wait_for(lambda: two.post(COMPLETIONS, BODY).status == 200 and len(bad.calls) > 1)
