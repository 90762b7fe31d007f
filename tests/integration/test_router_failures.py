import asyncio
import json
import re
import time

import pytest

from support.engine_faults import DECODE_FAULTS, PREFILL_FAULTS
from support.fake_engine import (
    DEFAULT_ANSWER,
    DEFAULT_EVENTS,
    DONE,
    hang,
    once_among,
    reset_before_headers,
    sse,
    status,
    stream,
)
from support.router_cluster import cluster

COMPLETIONS = "/v1/completions"
BODY = {"model": "m", "prompt": "hello"}
STREAMED = {**BODY, "stream": True}
both_modes = pytest.mark.parametrize("mode", ["pull", "push"])


@pytest.fixture(scope="module", params=["pull", "push"])
def two(request):
    with cluster(2, 2, mode=request.param, prefill_timeout_s=1.0, first_byte_timeout_s=1.0) as running:
        yield running


@pytest.fixture
def pairs(two):
    for engine in [*two.prefills, *two.decodes]:
        engine.forget()
    yield two
    two.wait_until_nothing_is_left()


def calls(engines):
    return [call for engine in engines for call in engine.calls]


@pytest.mark.parametrize("fault", PREFILL_FAULTS)
def test_a_failing_prefill_leg_is_tried_at_another_engine_with_a_fresh_transfer(pairs, fault):
    used = once_among(pairs.prefills, PREFILL_FAULTS[fault])
    assert pairs.post(COMPLETIONS, BODY).status == 200
    first, second = sorted(calls(pairs.prefills), key=lambda call: call.engine is not used[0])
    assert first.engine is not second.engine
    assert first.leg["transfer_id"] != second.leg["transfer_id"]
    # In a push the decode engine was asked for the first one too.
    aborted = [call for call in calls(pairs.decodes) if call.leg["transfer_id"] == first.leg["transfer_id"]]
    assert len(aborted) == (pairs.mode == "push")
    pairs.wait_for(lambda: all(call.was_aborted for call in aborted))
    (decode,) = [call for call in calls(pairs.decodes) if call not in aborted]
    assert decode.leg["transfer_id"] == second.leg["transfer_id"]
    assert decode.leg["source"]["engine_id"] == f"engine-{second.engine.name}"
    pairs.wait_for(lambda: first.leg["transfer_id"] in first.engine.released)
    assert second.engine.released == []


@pytest.mark.parametrize("fault", DECODE_FAULTS)
def test_a_decode_leg_that_fails_before_its_first_data_event_costs_the_pair_another_attempt(pairs, fault):
    used = once_among(pairs.decodes, DECODE_FAULTS[fault])
    reply = pairs.post(COMPLETIONS, STREAMED)
    assert (reply.status, reply.read_body) == (200, b"".join(DEFAULT_EVENTS))
    first, second = sorted(calls(pairs.decodes), key=lambda call: call.engine is not used[0])
    assert first.engine is not second.engine
    assert first.leg["transfer_id"] != second.leg["transfer_id"]
    assert {call.leg["transfer_id"] for call in calls(pairs.prefills)} == {
        first.leg["transfer_id"],
        second.leg["transfer_id"],
    }
    pairs.wait_for(
        lambda: [handle for engine in pairs.prefills for handle in engine.released] == [first.leg["transfer_id"]]
    )


def test_a_whole_answer_that_breaks_off_is_tried_again_since_the_client_has_seen_nothing(pairs):
    async def break_off(call):
        await call.send(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"id"')
        await call.reset()

    once_among(pairs.decodes, break_off)
    reply = pairs.post(COMPLETIONS, BODY)
    assert (reply.status, reply.json["id"]) == (200, "cmpl-1")


def test_retries_and_failures_are_counted_by_reason(pairs):
    def counts():
        names = (("leg_failures_total", {"reason": "status"}), ("retries_total", {}))
        return [pairs.metric(name, leg=leg, **labels) for name, labels in names for leg in ("prefill", "decode")]

    before = counts()
    once_among(pairs.prefills, status(500))
    pairs.post(COMPLETIONS, BODY)
    once_among(pairs.decodes, status(500))
    pairs.post(COMPLETIONS, BODY)
    assert [after - count for after, count in zip(counts(), before, strict=True)] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("fault", "expected"), [(status(500), 502), (status(503), 503), (hang, 504), (reset_before_headers, 502)]
)
def test_decode_engines_that_all_fail_are_a_clear_error_without_addresses(fault, expected):
    with cluster(1, 2, first_byte_timeout_s=0.5 if fault is hang else 10.0, max_attempts=3) as one:
        for decode in one.decodes:
            decode.script.extend([fault] * 3)
        reply = one.post(COMPLETIONS, STREAMED)
        assert reply.status == expected
        assert reply.json["error"]["code"] == expected
        assert reply.json["error"]["message"] == "The decode engines failed to answer."
        assert not re.search(rb"127|engine-|decode-\d|xfer-|scripted", reply.read_body)
        assert len(calls(one.decodes)) == 3
        one.wait_for(lambda: len(set(one.prefills[0].released)) == 3)
        assert one.metric("requests_total", endpoint="completions", outcome="unavailable") == 1
        assert (reply.headers.get("retry-after") == "1") == (expected == 503)


@both_modes
def test_when_no_prefill_engine_works_the_decode_engine_computes_and_the_reason_is_counted(mode):
    with cluster(mode=mode) as one:
        one.prefills[0].script.extend([status(500)] * 3)
        assert one.post(COMPLETIONS, BODY).status == 200
        assert one.decodes[0].calls[-1].body == BODY
        one.wait_for(lambda: all(call.was_aborted for call in one.decodes[0].calls[:-1]))
        assert len(one.prefills[0].calls) == 3
        assert one.metric("decisions_total", route="local", reason="prefill_failed") == 1


@both_modes
def test_the_policy_may_forbid_that(mode):
    with cluster(mode=mode, prefill_failure_policy="retry_then_fail") as one:
        one.prefills[0].script.extend([status(500)] * 3)
        reply = one.post(COMPLETIONS, BODY)
        assert (reply.status, reply.json["error"]["message"]) == (502, "No prefill engine could serve the request.")
        one.wait_for(lambda: one.decodes[0].num_aborted == len(one.decodes[0].calls))
        assert len(one.decodes[0].calls) == (3 if mode == "push" else 0)


def test_a_prompt_over_the_cap_is_not_computed_by_the_decode_engine():
    with cluster(local_prefill_max_tokens=5) as one:
        one.prefills[0].script.extend([status(500)] * 6)
        assert one.post(COMPLETIONS, {"model": "m", "prompt": [1] * 6}).status == 502
        assert one.post(COMPLETIONS, {"model": "m", "prompt": [1] * 5}).status == 200


@both_modes
def test_a_prefill_4xx_is_passed_on_when_the_decode_engine_may_not_compute(mode):
    with cluster(mode=mode, prefill_failure_policy="retry_then_fail") as one:
        one.prefills[0].script.append(status(400, "bad"))
        reply = one.post(COMPLETIONS, BODY)
        assert (reply.status, reply.json["error"]["message"]) == (400, "bad")
        one.wait_for(lambda: one.decodes[0].num_aborted == len(one.decodes[0].calls))
        assert len(one.decodes[0].calls) == (mode == "push")


def test_the_total_deadline_ends_retries():
    with cluster(prefill_timeout_s=30, total_timeout_s=0.3, max_attempts=9) as one:
        one.prefills[0].script.extend([hang] * 9)
        started_at_s = time.monotonic()
        assert one.post(COMPLETIONS, BODY).status == 504
        assert time.monotonic() - started_at_s < 10


@pytest.mark.parametrize("end", ["reset", "hang"])
def test_a_stream_that_dies_ends_with_an_error_event_and_neither_done_nor_a_last_chunk(end):
    with cluster(idle_timeout_s=1.0) as one:
        one.decodes[0].script.append(stream([sse("a"), sse("b") + b'data: {"half'], then=end))
        client = one.send_post(COMPLETIONS, STREAMED)
        data = b""
        while piece := client.recv(65536):
            data += piece
        client.close()
        assert data.startswith(b"HTTP/1.1 200")
        assert not data.endswith(b"0\r\n\r\n")
        assert b"[DONE]" not in data
        assert b"half" not in data
        assert data.count(sse("a")) == data.count(sse("b")) == 1
        error = json.loads(data.rpartition(b"data: ")[2].split(b"\n")[0])["error"]
        assert error["code"] == (502 if end == "reset" else 504)
        assert one.metric("requests_total", endpoint="completions", outcome="broken_stream") == 1
        # What D held of the transfer is D's to release; nothing is retried.
        assert len(one.prefills[0].calls) == 1


def told_error(code):
    return b"data: " + json.dumps({"error": {"message": "EngineCore died", "code": code}}).encode() + b"\n\n"


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("then", ["end", "hang"])
@pytest.mark.parametrize("is_in_one_read", [True, False])
def test_an_error_that_an_engine_tells_in_its_stream_ends_it_in_the_engines_words(mode, then, is_in_one_read):
    events = [sse("a"), told_error(500), DONE]
    with cluster(mode=mode) as one:
        one.decodes[0].script.append(stream([b"".join(events)] if is_in_one_read else events, gap_s=0.02, then=then))
        client = one.send_post(COMPLETIONS, STREAMED)
        data = b""
        while piece := client.recv(65536):
            data += piece
        client.close()
        assert data.count(sse("a")) == data.count(told_error(500)) == 1
        assert b"[DONE]" not in data
        assert not data.endswith(b"0\r\n\r\n")
        assert one.metric("requests_total", endpoint="completions", outcome="broken_stream") == 1
        assert one.metric("leg_failures_total", leg="decode", reason="status") == 1
        assert one.post(COMPLETIONS, STREAMED).read_body == b"".join(DEFAULT_EVENTS)


@pytest.mark.parametrize(("code", "is_blamed"), [(500, True), (400, False)])
def test_an_error_in_a_stream_that_is_the_requests_own_is_not_held_against_the_engine(code, is_blamed):
    with cluster(num_decodes=2, quarantine_s=30) as two:
        failing = once_among(two.decodes, stream([sse("a"), told_error(code), DONE]))
        client = two.send_post(COMPLETIONS, STREAMED)
        while client.recv(65536):
            pass
        client.close()
        assert len(failing) == 1
        for _ in range(4):
            assert two.post(COMPLETIONS, STREAMED).status == 200
        assert (len(failing[0].calls) == 1) is is_blamed


@pytest.mark.parametrize("end", ["reset", "hang"])
def test_a_stream_that_dies_after_its_last_event_was_whole(end):
    with cluster(idle_timeout_s=1.0) as one:
        one.decodes[0].script.append(stream(DEFAULT_EVENTS, then=end))
        assert one.post(COMPLETIONS, STREAMED).read_body == b"".join(DEFAULT_EVENTS)
        assert one.metric("requests_total", endpoint="completions", outcome="broken_stream") == 0
        # Its connection is not used again.
        assert one.post(COMPLETIONS, STREAMED).read_body == b"".join(DEFAULT_EVENTS)


def test_a_slow_stream_is_not_an_idle_one():
    with cluster(idle_timeout_s=1.5, first_byte_timeout_s=1.5) as one:
        one.decodes[0].script.append(stream([*DEFAULT_EVENTS, *DEFAULT_EVENTS], gap_s=0.4))
        assert one.post(COMPLETIONS, STREAMED).read_body == b"".join(DEFAULT_EVENTS) * 2


def test_a_whole_answer_may_take_longer_than_a_first_byte():
    with cluster(first_byte_timeout_s=0.1) as one:

        async def slow(call):
            await asyncio.sleep(0.3)
            await call.json(200, DEFAULT_ANSWER)

        one.decodes[0].script.append(slow)
        assert one.post(COMPLETIONS, BODY).status == 200


def test_an_answer_larger_than_the_limit_is_not_buffered_without_end():
    with cluster(max_response_bytes=10_000) as one:
        one.decodes[0].script.extend([lambda call: call.json(200, b"x" * 50_000)] * 3)
        assert one.post(COMPLETIONS, BODY).status == 502
        assert one.metric("leg_failures_total", leg="decode", reason="too_large") == 3


def test_too_many_connections_to_an_engine_are_capacity_and_not_its_fault():
    with cluster(max_engine_connections=2, max_attempts=1, probe_interval_s=30) as one:
        one.decodes[0].script.extend([hang] * 2)
        clients = [one.send_post(COMPLETIONS, BODY) for _ in range(2)]
        one.wait_for(lambda: len(one.decodes[0].calls) == 2)
        reply = one.post(COMPLETIONS, BODY)
        assert reply.status == 503
        assert one.metric("leg_failures_total", leg="decode", reason="capacity") == 1
        assert one.metric("engine_up", engine="decode-0") == 1
        for client in clients:
            client.close()


def test_health_probes_do_not_take_a_busy_engine_for_dead():
    with cluster(max_engine_connections=1, unhealthy_after=1, max_attempts=1) as one:
        one.decodes[0].script.append(hang)
        client = one.send_post(COMPLETIONS, BODY)
        one.wait_for(lambda: len(one.decodes[0].calls) == 1)
        time.sleep(0.5)
        assert one.metric("engine_up", engine="decode-0") == 1
        client.close()


def test_a_reset_of_the_only_engines_costs_an_attempt_and_not_the_disaggregation():
    with cluster() as one:
        one.post(COMPLETIONS, BODY)
        one.prefills[0].script.append(reset_before_headers)
        one.decodes[0].script.append(reset_before_headers)
        assert one.post(COMPLETIONS, BODY).status == 200
        assert one.decodes[0].calls[-1].leg["transfer_id"] == one.prefills[0].calls[-1].leg["transfer_id"]
        assert one.metric("decisions_total", route="pair", reason="default") == 2
