"""Both legs at once: what either one's end does to the other, before and after the client has seen anything."""

import asyncio
import json
import time

import pytest

from support.engine_faults import EARLY_DECODE_FAULTS, FAULTS, PREFILL_FAULTS
from support.fake_engine import (
    DEFAULT_ANSWER,
    DEFAULT_EVENTS,
    answer,
    default_behaviour,
    hang,
    once_among,
    sse,
    status,
    stream,
)
from support.router_cluster import cluster

COMPLETIONS = "/v1/completions"
BODY = {"model": "m", "prompt": "hello", "max_tokens": 5}
STREAMED = {**BODY, "stream": True}
WHOLE = b"".join(DEFAULT_EVENTS)
LEG_S = 2.0
"""Of either leg: some tests wait for it to pass, and in the others it must not, on a busy machine too."""


@pytest.fixture(scope="module")
def shared():
    with cluster(mode="push", prefill_timeout_s=LEG_S, first_byte_timeout_s=LEG_S, quarantine_s=0.01) as running:
        yield running


@pytest.fixture
def one(shared):
    for engine in (shared.prefills[0], shared.decodes[0]):
        engine.forget()
    yield shared
    shared.wait_until_nothing_is_left()


@pytest.fixture(scope="module")
def two():
    with cluster(2, 2, mode="push", prefill_timeout_s=LEG_S, first_byte_timeout_s=LEG_S) as running:
        yield running


@pytest.fixture
def pairs(two):
    for engine in [*two.prefills, *two.decodes]:
        engine.forget()
    yield two
    two.wait_until_nothing_is_left()


class Gate:
    """Holds behaviours back until a test, or another behaviour, opens it."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()

    def then(self, behaviour):
        async def behave(call) -> None:
            await self._opened.wait()
            await behaviour(call)

        return behave

    def opened_after(self, events):
        """A stream that opens it after ``events`` and ends well a little later."""

        async def behave(call) -> None:
            await call.begin_stream()
            for event in events:
                await call.chunk(event)
            self._opened.set()
            await asyncio.sleep(0.1)
            for event in DEFAULT_EVENTS[len(events) :]:
                await call.chunk(event)
            await call.end_stream()

        return behave

    def open(self, one) -> None:
        one.call(self._opened.set)


def metrics(one, *names):
    """A function that tells how much each has grown since now."""

    def read():
        return [one.metric(name, **labels) for name, labels in names]

    before = read()
    return lambda: [now - then for now, then in zip(read(), before, strict=True)]


def handle_of(call) -> str:
    return call.leg["transfer_id"]


# --- both well ---------------------------------------------------------------------------------------


def test_neither_leg_waits_for_the_other(one):
    gate = Gate()
    one.prefills[0].script.append(gate.then(default_behaviour))
    client = one.send_post(COMPLETIONS, BODY)
    one.wait_for(lambda: len(one.prefills[0].calls) == len(one.decodes[0].calls) == 1)
    gate.open(one)
    assert client.recv(12) == b"HTTP/1.1 200"
    client.close()
    (prefill,), (decode,) = one.prefills[0].calls, one.decodes[0].calls
    assert (prefill.leg["mode"], decode.leg["mode"]) == ("push", "push")
    assert handle_of(prefill) == handle_of(decode)
    assert one.prefills[0].released == []


@pytest.mark.parametrize("body", [BODY, STREAMED])
def test_an_answer_that_is_whole_before_the_prefill_leg_ends_is_not_held_back_and_the_load_stays(one, body):
    grown = metrics(one, ("stage_seconds_count", {"mode": "push", "stage": "prefill"}))
    gate = Gate()
    one.prefills[0].script.append(gate.then(default_behaviour))
    one.decodes[0].script.append(stream(DEFAULT_EVENTS) if "stream" in body else answer(DEFAULT_ANSWER))
    assert one.post(COMPLETIONS, body).status == 200
    assert one.metric("outstanding_requests", engine="prefill-0") == 1
    assert one.metric("outstanding_tokens", engine="prefill-0") > 0
    assert one.metric("outstanding_requests", engine="decode-0") == 0
    assert grown() == [0]
    gate.open(one)
    one.wait_until_nothing_is_left()
    assert grown() == [1]
    assert not one.prefills[0].calls[0].was_aborted
    assert one.prefills[0].released == []


def test_a_prefill_leg_that_outlives_its_request_has_its_own_deadline_still(one):
    grown = metrics(
        one, ("leg_failures_total", {"leg": "prefill", "reason": "timeout"}), ("retries_total", {"leg": "prefill"})
    )
    one.prefills[0].script.append(hang)
    one.decodes[0].script.append(answer(DEFAULT_ANSWER))
    assert one.post(COMPLETIONS, BODY).status == 200
    assert grown() == [0, 0]
    one.wait_until_nothing_is_left()
    assert grown() == [1, 0]


def test_a_prefill_leg_that_outlives_its_request_ends_with_the_router():
    with cluster(mode="push") as one:
        one.prefills[0].script.append(hang)
        one.decodes[0].script.append(answer(DEFAULT_ANSWER))
        assert one.post(COMPLETIONS, BODY).status == 200
        one.run(one.router.stop(0.1))
        one.wait_for(lambda: one.prefills[0].num_aborted == 1)
        assert one.left_over() == {}


def test_a_prefill_leg_that_holds_nothing_leaves_it_to_the_decode_engine(one):
    grown = metrics(one, ("prefill_not_held_total", {}))
    gate = Gate()
    one.prefills[0].script.append(answer(DEFAULT_ANSWER))
    one.decodes[0].script.append(gate.then(answer(DEFAULT_ANSWER)))
    client = one.send_post(COMPLETIONS, BODY)
    one.wait_for(lambda: one.metric("outstanding_requests", engine="prefill-0") == 0 and one.prefills[0].calls)
    gate.open(one)
    assert client.recv(12) == b"HTTP/1.1 200"
    client.close()
    assert len(one.decodes[0].calls) == 1
    assert grown() == [0]


def test_the_first_data_event_has_its_whole_time_after_a_long_prefill():
    async def slow(call) -> None:
        await asyncio.sleep(1.2)
        await default_behaviour(call)

    async def pinging(call) -> None:
        await call.begin_stream()
        await call.chunk(b": ping\n\n")
        await call.wait_for_push()
        for event in [b": ping\n\n", *DEFAULT_EVENTS]:
            await call.chunk(event)
        await call.end_stream()

    with cluster(mode="push", first_byte_timeout_s=1.0) as one:
        one.prefills[0].script.append(slow)
        one.decodes[0].script.append(pinging)
        assert one.post(COMPLETIONS, STREAMED).status == 200
        assert len(one.decodes[0].calls) == 1


def test_the_handoff_is_timed_from_the_prefill_legs_answer(one, caplog):
    async def late(call) -> None:
        await call.wait_for_push()
        await asyncio.sleep(0.2)
        await call.json(200, DEFAULT_ANSWER)

    one.decodes[0].script.extend([late, answer(DEFAULT_ANSWER)])
    gate = Gate()
    one.prefills[0].script.extend([default_behaviour, gate.then(default_behaviour)])
    with caplog.at_level("INFO", logger="kvshuttle.router.requests"):
        for name in ("stages-1", "stages-2"):
            one.post(COMPLETIONS, BODY, {"x-request-id": name})
            one.wait_for(lambda name=name: any(name in record.getMessage() for record in caplog.records))
    gate.open(one)
    after, before = (json.loads(record.getMessage())["stages_s"] for record in caplog.records)
    assert 0.1 < after["handoff"] < after["first_byte"] <= after["total"]
    assert set(after) == {"prefill", "first_byte", "handoff", "total"}
    # The decode engine was first: nothing was waited for, and the prefill leg's time is not known yet.
    assert before["handoff"] == 0
    assert set(before) == {"first_byte", "handoff", "total"}


# --- the prefill leg fails ---------------------------------------------------------------------------


@pytest.mark.parametrize("fault", PREFILL_FAULTS)
def test_a_prefill_leg_that_fails_after_the_first_data_event_costs_the_client_nothing(one, fault):
    grown = metrics(
        one, ("retries_total", {"leg": "prefill"}), ("requests_total", {"endpoint": "completions", "outcome": "ok"})
    )
    reasons = {"hang": "timeout", "500": "status", "503": "status", "no_http": "malformed", "odd_status": "malformed"}
    failed = metrics(one, ("leg_failures_total", {"leg": "prefill", "reason": reasons.get(fault, "reset")}))
    gate = Gate()
    one.prefills[0].script.append(gate.then(PREFILL_FAULTS[fault]))
    one.decodes[0].script.append(gate.opened_after(DEFAULT_EVENTS[:1]))
    assert one.post(COMPLETIONS, STREAMED).read_body == WHOLE
    one.wait_for(lambda: failed() == [1])
    assert grown() == [0, 1]
    assert len(one.prefills[0].calls) == len(one.decodes[0].calls) == 1


@pytest.mark.parametrize("fault", PREFILL_FAULTS)
def test_a_prefill_leg_that_fails_before_it_ends_the_decode_leg_and_both_are_tried_again(one, fault):
    one.prefills[0].script.append(PREFILL_FAULTS[fault])
    assert one.post(COMPLETIONS, STREAMED).read_body == WHOLE
    first, second = one.prefills[0].calls
    abandoned, served = one.decodes[0].calls
    assert handle_of(first) == handle_of(abandoned) != handle_of(second) == handle_of(served)
    one.wait_for(lambda: abandoned.was_aborted)
    one.wait_for(lambda: set(one.prefills[0].released) == {handle_of(first)})


def test_a_prefill_engine_that_may_still_compute_is_told_twice(one):
    one.prefills[0].script.append(hang)
    assert one.post(COMPLETIONS, BODY).status == 200
    one.wait_for(lambda: one.prefills[0].released == [handle_of(one.prefills[0].calls[0])] * 2)


@pytest.mark.parametrize(("code", "num_asked"), [(400, 2), (401, 1)])
def test_a_prefill_leg_that_is_refused_ends_the_decode_leg_which_may_be_asked_about_the_original(one, code, num_asked):
    one.prefills[0].script.append(status(code, "you requested 1 output tokens"))
    reply = one.post(COMPLETIONS, BODY)
    one.wait_for(lambda: one.decodes[0].calls[0].was_aborted)
    assert reply.status == (200 if num_asked == 2 else code)
    assert len(one.decodes[0].calls) == num_asked
    assert [call.body for call in one.decodes[0].calls[1:]] == [BODY] * (num_asked - 1)
    assert one.prefills[0].released == []


# --- the decode leg fails ----------------------------------------------------------------------------


@pytest.mark.parametrize("fault", EARLY_DECODE_FAULTS)
def test_a_decode_leg_that_fails_while_the_prompt_is_computed_ends_that_and_both_are_tried_again(pairs, fault):
    used = once_among(pairs.prefills, hang)
    broken = once_among(pairs.decodes, EARLY_DECODE_FAULTS[fault])
    assert pairs.post(COMPLETIONS, STREAMED).read_body == WHOLE
    (abandoned, *_), (failed, *_) = used[0].calls, broken[0].calls
    assert handle_of(abandoned) == handle_of(failed)
    pairs.wait_for(lambda: abandoned.was_aborted and handle_of(abandoned) in used[0].released)
    served = [call for engine in pairs.decodes for call in engine.calls if call is not failed]
    assert [call.engine for call in served] != [broken[0]]
    assert {handle_of(call) for call in served} == {
        handle_of(call) for engine in pairs.prefills for call in engine.calls if call is not abandoned
    }


@pytest.mark.parametrize("behaviour", [status(429, "slow down"), status(501)])
def test_a_decode_leg_that_is_refused_ends_the_prefill_leg_and_the_client_hears_of_it(one, behaviour):
    timed_out = metrics(one, ("leg_failures_total", {"leg": "prefill", "reason": "timeout"}))
    one.prefills[0].script.append(hang)
    one.decodes[0].script.append(behaviour)
    assert one.post(COMPLETIONS, BODY).status in (429, 501)
    assert timed_out() == [0]
    (call,) = one.prefills[0].calls
    one.wait_for(lambda: call.was_aborted and set(one.prefills[0].released) == {handle_of(call)})


@pytest.mark.parametrize("prefill", [default_behaviour, hang])
def test_a_stream_that_breaks_off_is_marked_and_ends_the_prefill_leg(one, prefill):
    one.prefills[0].script.append(prefill)
    one.decodes[0].script.append(stream([sse("a"), b'data: {"half'], then="reset"))
    client = one.send_post(COMPLETIONS, STREAMED)
    data = b""
    while piece := client.recv(65536):
        data += piece
    client.close()
    assert b"EngineFailedError" in data
    assert b"[DONE]" not in data
    (call,) = one.prefills[0].calls
    if prefill is hang:
        one.wait_for(lambda: call.was_aborted and handle_of(call) in one.prefills[0].released)


@pytest.mark.parametrize("fault", FAULTS)
def test_two_legs_that_fail_at_once_cost_one_attempt(one, fault):
    grown = metrics(one, ("retries_total", {"leg": "prefill"}), ("retries_total", {"leg": "decode"}))
    one.prefills[0].script.append(FAULTS[fault])
    one.decodes[0].script.append(FAULTS[fault])
    assert one.post(COMPLETIONS, BODY).status == 200
    assert sum(grown()) == 1
    assert len(one.prefills[0].calls) == len(one.decodes[0].calls) == 2


# --- deadlines and clients ---------------------------------------------------------------------------


def test_the_total_deadline_ends_both_legs():
    with cluster(mode="push", total_timeout_s=1.0) as one:
        one.prefills[0].script.append(hang)
        started_at_s = time.monotonic()
        assert one.post(COMPLETIONS, STREAMED).status == 504
        assert time.monotonic() - started_at_s < 10
        one.wait_for(lambda: one.prefills[0].num_aborted == one.decodes[0].num_aborted == 1)
        one.wait_until_nothing_is_left()


def test_a_client_that_leaves_while_a_stream_outruns_its_prefill_leg_ends_both(one):
    grown = metrics(one, ("client_disconnects_total", {"window": "streaming"}))
    one.prefills[0].script.append(hang)
    one.decodes[0].script.append(stream([sse("a")], then="hang"))
    client = one.send_post(COMPLETIONS, STREAMED)
    assert client.recv(12) == b"HTTP/1.1 200"
    client.close()
    one.wait_for(lambda: grown() == [1])
    (prefill,), (decode,) = one.prefills[0].calls, one.decodes[0].calls
    one.wait_for(lambda: prefill.was_aborted and decode.was_aborted)
    one.wait_for(lambda: set(one.prefills[0].released) == {handle_of(prefill)})


@pytest.mark.parametrize(("prefill", "window"), [(hang, "prefill"), (default_behaviour, "decode")])
def test_a_client_that_leaves_is_counted_by_the_leg_that_was_waited_for(one, prefill, window):
    grown = metrics(one, ("client_disconnects_total", {"window": window}))
    one.prefills[0].script.append(prefill)
    one.decodes[0].script.append(hang)
    client = one.send_post(COMPLETIONS, BODY)
    one.wait_for(lambda: len(one.prefills[0].calls) == len(one.decodes[0].calls) == 1)
    if prefill is default_behaviour:
        one.wait_for(lambda: one.metric("outstanding_requests", engine="prefill-0") == 0)
    client.close()
    one.wait_for(lambda: grown() == [1])
    one.wait_for(lambda: set(one.prefills[0].released) == {handle_of(one.prefills[0].calls[0])})


def test_a_client_that_reads_slowly_holds_the_decode_engine_back_and_nothing_else(one):
    big = b'data: {"text":"' + b"x" * 100_000 + b'"}\n\n'
    events = [big] * 200
    one.decodes[0].script.append(stream([*events, DEFAULT_EVENTS[-1]]))
    client = one.send_post(COMPLETIONS, STREAMED)
    assert client.recv(12) == b"HTTP/1.1 200"
    one.wait_for(lambda: one.metric("outstanding_requests", engine="prefill-0") == 0)
    time.sleep(0.2)
    assert one.metric("outstanding_requests", engine="decode-0") == 1
    received = bytearray()
    while not received.endswith(b"0\r\n\r\n"):
        received += client.recv(1 << 20)
    client.close()
    assert received.count(big) == 200
    assert b"[DONE]" in received
