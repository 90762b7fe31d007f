import asyncio
import json

import pytest

from support.fake_engine import DEFAULT_ANSWER, DEFAULT_EVENTS, FakeEngine, answer, sse, status, stream
from support.router_cluster import PATIENCE_S, cluster

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = {"model": "m", "prompt": "hello", "max_tokens": 5}


@pytest.fixture(scope="module", params=["pull", "push"])
def shared(request):
    with cluster(mode=request.param) as running:
        yield running


pull_only = pytest.mark.parametrize("shared", ["pull"], indirect=True)


@pytest.fixture
def one(shared):
    for engine in (shared.prefills[0], shared.decodes[0]):
        engine.forget()
    return shared


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_both_legs_carry_one_transfer_and_the_decode_leg_names_its_source(one, path):
    reply = one.post(path, BODY)
    assert reply.status == 200
    (prefill,), (decode,) = one.prefills[0].calls, one.decodes[0].calls
    assert (prefill.path, decode.path) == (path, path)
    transfer_id = prefill.leg["transfer_id"]
    assert prefill.leg == {"leg": "prefill", "transfer_id": transfer_id, "mode": one.mode}
    source = {"address": one.prefills[0].side_address, "engine_id": "engine-prefill-0", "incarnation": "life-1"}
    assert decode.leg == {"leg": "decode", "transfer_id": transfer_id, "source": source, "mode": one.mode}
    assert (prefill.body["max_tokens"], decode.body["max_tokens"]) == (1, 5)


def test_every_request_has_a_transfer_id_of_its_own(one):
    for _ in range(3):
        one.post(COMPLETIONS, BODY)
    assert len({call.leg["transfer_id"] for call in one.prefills[0].calls}) == 3


def test_a_whole_answer_passes_byte_for_byte(one):
    raw = b'{"id": "cmpl-1",   "choices":[{"text":"\xc3\xa9"}], "kv_transfer_params":null}'
    one.decodes[0].script.append(lambda call: call.json(200, raw))
    assert one.post(COMPLETIONS, BODY).read_body == raw


def test_a_stream_passes_byte_for_byte(one):
    events = [b": ping\n\n", sse("a"), sse("b\u00e9"), b": ping\n\n", b"data: x\r\n\r\n", b"data: [DONE]\n\n"]
    one.decodes[0].script.append(stream(events))
    reply = one.post(COMPLETIONS, {**BODY, "stream": True})
    assert reply.read_body == b"".join(events)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["transfer-encoding"] == "chunked"


def test_a_stream_of_large_and_torn_chunks_passes_byte_for_byte(one):
    big = b'data: {"text":"' + b"x" * 300_000 + b'"}\n\n'
    whole = sse("a") + big * 5 + b"data: [DONE]\n\n"
    pieces = [whole[at : at + 70_001] for at in range(0, len(whole), 70_001)]
    one.decodes[0].script.append(stream(pieces))
    assert one.post(COMPLETIONS, {**BODY, "stream": True}).read_body == whole


def test_headers_are_the_routers_own_where_they_must_be(one):
    one.decodes[0].script.append(
        lambda call: call.json(200, DEFAULT_ANSWER, "x-custom: kept\r\nconnection: keep-alive, x-hop\r\nx-hop: 1\r\n")
    )
    headers = one.post(COMPLETIONS, BODY, {"x-request-id": "mine-1"}).headers
    assert headers["x-custom"] == "kept"
    assert headers["x-request-id"] == "mine-1"
    assert headers["date"].endswith("GMT")
    assert not {"server", "x-hop", "connection"} & set(headers)


def test_engines_see_the_clients_headers_but_not_those_of_the_hop(one):
    given = {
        "authorization": "Bearer k",
        "traceparent": "00-1",
        "x-session-id": "s",
        "x-request-id": "mine-2",
        "accept-encoding": "gzip",
        "x-data-parallel-rank": "1",
        "te": "trailers",
        "connection": "keep-alive, x-secret",
        "x-secret": "1",
    }
    one.post(COMPLETIONS, BODY, given)
    for call in (one.prefills[0].calls[0], one.decodes[0].calls[0]):
        kept = {name: call.headers.get(name) for name in ("authorization", "traceparent", "x-session-id")}
        assert kept == {"authorization": "Bearer k", "traceparent": "00-1", "x-session-id": "s"}
        assert call.headers["x-request-id"] == "mine-2"
        assert call.headers["content-type"] == "application/json"
        assert not {"accept-encoding", "x-data-parallel-rank", "te", "x-secret", "connection"} & set(call.headers)


@pytest.mark.parametrize("given", ["", "a b", "x" * 200, "\u00e9"])
def test_a_request_id_unfit_for_logs_is_replaced(one, given):
    reply = one.post(COMPLETIONS, BODY, {"x-request-id": given})
    assert reply.headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize("body", [b"{", {**BODY, "model": "unknown"}])
def test_a_request_refused_before_a_route_was_chosen_counts_as_no_decision_and_is_named(one, caplog, body):
    before = one.metric("decisions_total", route="pair", reason="default")
    with caplog.at_level("INFO", logger="kvshuttle.router.requests"):
        reply = one.post(COMPLETIONS, body, {"x-request-id": "refused-1"})
        one.wait_for(lambda: any("refused-1" in record.getMessage() for record in caplog.records))
    assert reply.status in (400, 404)
    assert reply.headers["x-request-id"] == "refused-1"
    (line,) = [record.getMessage() for record in caplog.records if "refused-1" in record.getMessage()]
    receipt = json.loads(line)
    assert (receipt["route"], receipt["reason"], receipt["outcome"]) == ("", "", "client_error")
    assert one.metric("decisions_total", route="pair", reason="default") == before


def test_an_error_without_a_clients_id_carries_a_fresh_one(one):
    assert one.post(COMPLETIONS, b"{").headers["x-request-id"].startswith("req-")


def test_clients_cannot_set_transfer_params(one):
    evil = {"kv_transfer_params": {"kvshuttle": {"leg": "decode", "transfer_id": "stolen"}}, "remote_host": "h"}
    assert one.post(COMPLETIONS, {**BODY, **evil}).status == 200
    for call in (one.prefills[0].calls[0], one.decodes[0].calls[0]):
        assert b"stolen" not in call.raw_body
        assert b"remote_host" not in call.raw_body


def test_clients_never_see_transfer_params(one):
    params = {"kvshuttle": {"address": "10.0.0.1:5"}}
    one.decodes[0].script.append(answer({"id": "x", "kv_transfer_params": params}))
    assert one.post(COMPLETIONS, BODY).json == {"id": "x", "kv_transfer_params": None}
    event = b"data: " + json.dumps({"id": "x", "kv_transfer_params": params}).encode() + b"\n\n"
    one.decodes[0].script.append(stream([sse("a"), event, event, b"data: [DONE]\n\n"]))
    body = one.post(COMPLETIONS, {**BODY, "stream": True}).read_body
    assert b"10.0.0.1" not in body
    assert body.count(b'"kv_transfer_params":null') == 2
    one.decodes[0].script.append(lambda call: call.json(400, {"error": {"message": "m"}, "kv_transfer_params": params}))
    assert b"10.0.0.1" not in one.post(COMPLETIONS, BODY).read_body


def test_requests_that_no_prefill_leg_can_serve_go_to_the_decode_engine_untouched(one):
    before = one.metric("decisions_total", route="local", reason="several_prompts")
    raw = b'{"model":"m",  "prompt":["a","b"]}'
    assert one.post(COMPLETIONS, raw).status == 200
    assert one.prefills[0].calls == []
    assert one.decodes[0].calls[0].raw_body == raw
    assert one.metric("decisions_total", route="local", reason="several_prompts") == before + 1


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b'{"model":"m"'])
def test_a_body_that_is_no_json_object_reaches_no_engine(one, raw):
    reply = one.post(CHAT, raw)
    assert reply.status == 400
    assert reply.json["error"]["type"] == "BadRequestError"
    assert one.prefills[0].calls == one.decodes[0].calls == []


def test_an_unknown_model_reaches_no_engine(one):
    reply = one.post(CHAT, {"model": "nope", "messages": []})
    assert reply.status == 404
    assert reply.json == {
        "error": {
            "message": "The model `nope` does not exist. Valid aliases: m.",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
        }
    }
    assert one.prefills[0].calls == one.decodes[0].calls == []


def test_a_request_that_names_no_model_is_served(one):
    assert one.post(CHAT, {"messages": []}).status == 200


@pull_only
def test_a_4xx_of_the_prefill_engine_becomes_the_decode_engines_own_answer(one):
    one.prefills[0].script.append(status(400, "you requested 1 output tokens"))
    one.decodes[0].script.append(status(400, "you requested 5 output tokens"))
    before = one.metric("decisions_total", route="local", reason="prefill_refused")
    reply = one.post(COMPLETIONS, BODY)
    assert (reply.status, reply.json["error"]["message"]) == (400, "you requested 5 output tokens")
    assert one.decodes[0].calls[0].body == BODY
    assert one.metric("decisions_total", route="local", reason="prefill_refused") == before + 1


@pull_only
def test_a_refused_key_is_passed_on_from_the_prefill_engine(one):
    one.prefills[0].script.append(lambda call: call.json(401, {"error": "Unauthorized"}))
    reply = one.post(COMPLETIONS, BODY)
    assert (reply.status, reply.json) == (401, {"error": "Unauthorized"})
    assert one.decodes[0].calls == []


def test_a_4xx_of_the_decode_engine_is_passed_on_and_the_prefill_released(one):
    one.decodes[0].script.append(lambda call: call.json(429, {"error": {"message": "slow"}}, "retry-after: 7\r\n"))
    reply = one.post(COMPLETIONS, BODY)
    assert (reply.status, reply.headers["retry-after"]) == (429, "7")
    one.wait_for(lambda: one.prefills[0].released == [one.prefills[0].calls[0].leg["transfer_id"]])


def test_an_error_event_before_any_data_becomes_a_real_status(one):
    error = {"error": {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}}
    one.decodes[0].script.append(stream([b"data: " + json.dumps(error).encode() + b"\n\n", b"data: [DONE]\n\n"]))
    reply = one.post(COMPLETIONS, {**BODY, "stream": True})
    assert (reply.status, reply.json) == (400, error)
    assert reply.headers["content-type"] == "application/json"


def test_headers_are_held_until_the_first_data_event(one):
    opened = asyncio.Event()

    async def held_back(call):
        await call.begin_stream()
        for event in [b": ping\n\n", b": ping\n\n"]:
            await call.chunk(event)
        await opened.wait()
        for event in DEFAULT_EVENTS:
            await call.chunk(event)
        await call.end_stream()

    one.decodes[0].script.append(held_back)
    client = one.send_post(COMPLETIONS, {**BODY, "stream": True})
    one.wait_for(lambda: len(one.decodes[0].calls) == 1)
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.recv(1)
    one.call(opened.set)
    client.settimeout(PATIENCE_S)
    assert client.recv(15) == b"HTTP/1.1 200 OK"
    client.close()


def test_not_implemented_is_the_engines_word_and_not_tried_again(one):
    one.decodes[0].script.append(status(501))
    assert one.post(COMPLETIONS, BODY).status == 501
    assert len(one.decodes[0].calls) == 1


@pull_only
def test_a_prefill_answer_that_holds_nothing_is_counted_and_the_decode_engine_computes(one):
    before = one.metric("prefill_not_held_total")
    one.prefills[0].script.append(answer(DEFAULT_ANSWER))
    assert one.post(COMPLETIONS, BODY).status == 200
    assert one.decodes[0].calls[0].body == BODY
    assert one.metric("prefill_not_held_total") == before + 1


def test_a_prefill_answer_whose_kv_is_through_already_still_says_what_was_cached(one, caplog):
    async def through(call):
        FakeEngine.computed[call.leg["transfer_id"]].set()
        held = {"transfer_id": call.leg["transfer_id"], "num_tokens": 0, "lease_s": 0.0, "num_cached_tokens": 5}
        await call.json(200, {**DEFAULT_ANSWER, "kv_transfer_params": {"kvshuttle": {"leg": "prefilled", **held}}})

    one.prefills[0].script.append(through)
    with caplog.at_level("INFO", logger="kvshuttle.router.requests"):
        assert one.post(COMPLETIONS, BODY, {"x-request-id": "through-1"}).status == 200
        one.wait_until_nothing_is_left()
    (receipt,) = [json.loads(record.getMessage()) for record in caplog.records if "through-1" in record.getMessage()]
    assert (receipt["num_held_tokens"], receipt["num_cached_tokens"]) == (0, 5)
    # Nothing is there to be read, so a decode engine that comes afterwards is not sent for it.
    assert (one.decodes[0].calls[0].leg is None) is (one.mode == "pull")


@pull_only
@pytest.mark.parametrize(
    "params",
    [
        {"kvshuttle": {"leg": "prefilled", "transfer_id": "other", "num_tokens": 1, "lease_s": 1.0}},
        {"kvshuttle": {"leg": "prefilled"}},
        {"remote_host": "h"},
        "text",
    ],
)
def test_a_prefill_answer_that_makes_no_sense_counts_as_nothing_held(one, params):
    one.prefills[0].script.append(answer({**DEFAULT_ANSWER, "kv_transfer_params": params}))
    assert one.post(COMPLETIONS, BODY).status == 200
    assert one.decodes[0].calls[0].leg is None


def test_models_are_the_engines_own_answer_under_the_clients_key(one):
    reply = one.get("/v1/models", headers={"authorization": "Bearer k"})
    assert reply.json == {"object": "list", "data": [{"id": "m", "object": "model"}], "auth": "Bearer k"}


def test_success_releases_nothing_since_the_decode_engine_does(one):
    one.post(COMPLETIONS, BODY)
    one.post(COMPLETIONS, {**BODY, "stream": True})
    assert one.prefills[0].released == []


def test_metrics_count_what_happened(one):
    names = {
        "ok": ("requests_total", {"endpoint": "completions", "outcome": "ok"}),
        "decision": ("decisions_total", {"route": "pair", "reason": "default"}),
        "bytes": ("response_bytes_total", {}),
        "mode": ("modes_total", {"mode": one.mode, "reason": "configured"}),
        "prefill": ("stage_seconds_count", {"mode": one.mode, "stage": "prefill"}),
        "first": ("stage_seconds_count", {"mode": one.mode, "stage": "first_byte"}),
        "handoff": ("stage_seconds_count", {"mode": one.mode, "stage": "handoff"}),
        "total": ("stage_seconds_count", {"mode": one.mode, "stage": "total"}),
        "placed": ("placements_total", {"leg": "decode", "reason": "only_candidate"}),
    }
    if one.mode == "pull":
        names["gap"] = ("stage_seconds_count", {"mode": "pull", "stage": "gap"})
    before = {key: one.metric(name, **labels) for key, (name, labels) in names.items()}
    reply = one.post(COMPLETIONS, {**BODY, "stream": True})
    grown = {key: one.metric(name, **labels) - before[key] for key, (name, labels) in names.items()}
    assert grown.pop("bytes") == len(reply.read_body)
    assert set(grown.values()) == {1}, grown
    assert one.metric("outstanding_requests", engine="decode-0") == 0
    assert one.metric("outstanding_tokens", engine="prefill-0") == 0
    assert one.metric("engine_up", engine="prefill-0") == 1
    assert one.metric("engine_pairs", engine="decode-0") == 1
    assert "127.0.0.1" not in one.get("/metrics").read_body.decode()


def test_the_log_line_tells_the_decision_and_no_text(one, caplog):
    with caplog.at_level("INFO", logger="kvshuttle.router.requests"):
        one.post(COMPLETIONS, {**BODY, "prompt": "a secret"}, {"x-request-id": "log-1"})
        one.wait_for(lambda: any("log-1" in record.getMessage() for record in caplog.records))
    (line,) = [record.getMessage() for record in caplog.records if "log-1" in record.getMessage()]
    receipt = json.loads(line)
    assert (receipt["route"], receipt["prefill_engine"], receipt["decode_engine"]) == ("pair", "prefill-0", "decode-0")
    assert (receipt["mode"], receipt["mode_reason"]) == (one.mode, "configured")
    assert (receipt["num_held_tokens"], receipt["outcome"], receipt["status"]) == (7, "ok", 200)
    assert "secret" not in line
