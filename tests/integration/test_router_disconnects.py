import socket

import pytest

from support.fake_engine import default_behaviour, hang, hang_after_headers, sse, stream
from support.router_cluster import cluster

COMPLETIONS = "/v1/completions"
BODY = {"model": "m", "prompt": "hello"}
STREAMED = {**BODY, "stream": True}


@pytest.fixture(params=["pull", "push"])
def one(request):
    with cluster(mode=request.param) as running:
        yield running
        running.wait_until_nothing_is_left()


def gone(one, window: str) -> bool:
    return one.metric("client_disconnects_total", window=window) == 1


def is_released_once(one) -> bool:
    wanted = one.prefills[0].calls[0].leg["transfer_id"]
    return set(one.prefills[0].released) == {wanted}


@pytest.mark.parametrize("body", [BODY, STREAMED])
def test_a_client_that_leaves_while_the_prefill_runs_ends_it_and_releases_the_handle(one, body):
    one.prefills[0].script.append(hang)
    client = one.send_post(COMPLETIONS, body)
    one.wait_for(lambda: len(one.prefills[0].calls) == 1)
    one.wait_for(lambda: len(one.decodes[0].calls) == (one.mode == "push"))
    client.close()
    one.wait_for(lambda: one.prefills[0].num_aborted == 1)
    one.wait_for(lambda: gone(one, "prefill"))
    one.wait_for(lambda: is_released_once(one))
    # In a push the decode leg runs beside it.
    one.wait_for(lambda: one.decodes[0].num_aborted == len(one.decodes[0].calls) == (one.mode == "push"))
    one.wait_until_nothing_is_left()


def test_a_prefill_that_ends_after_its_client_left_is_released_by_the_second_release(one):
    one.prefills[0].script.append(hang)
    client = one.send_post(COMPLETIONS, BODY)
    one.wait_for(lambda: len(one.prefills[0].calls) == 1)
    client.close()
    one.wait_for(lambda: len(one.prefills[0].released) == 2)
    assert is_released_once(one)


def test_a_client_that_leaves_between_the_legs_gets_no_decode_leg_and_its_handle_released():
    with cluster(mode="pull", retry_pause_s=5) as one:
        one.decodes[0].script.append(lambda call: call.reset())
        client = one.send_post(COMPLETIONS, BODY)
        one.wait_for(lambda: len(one.decodes[0].calls) == 1)
        one.wait_for(lambda: is_released_once(one))
        client.close()
        one.wait_for(lambda: gone(one, "between"))
        assert len(one.prefills[0].calls) == 1


@pytest.mark.parametrize(("body", "behaviour"), [(BODY, hang), (STREAMED, hang), (STREAMED, hang_after_headers)])
def test_a_client_that_leaves_before_the_first_data_event_ends_the_decode_leg_and_releases(one, body, behaviour):
    one.decodes[0].script.append(behaviour)
    client = one.send_post(COMPLETIONS, body)
    one.wait_for(lambda: len(one.decodes[0].calls) == 1)
    one.wait_for(lambda: one.prefills[0].calls and one.metric("outstanding_requests", engine="prefill-0") == 0)
    client.close()
    one.wait_for(lambda: one.decodes[0].num_aborted == 1)
    one.wait_for(lambda: gone(one, "decode"))
    one.wait_for(lambda: is_released_once(one))
    assert one.metric("outstanding_requests", engine="decode-0") == 0


def test_a_client_that_leaves_while_streaming_ends_the_decode_leg(one):
    one.decodes[0].script.append(stream([sse("a")], then="hang"))
    client = one.send_post(COMPLETIONS, STREAMED)
    assert client.recv(12) == b"HTTP/1.1 200"
    client.close()
    one.wait_for(lambda: one.decodes[0].num_aborted == 1)
    one.wait_for(lambda: gone(one, "streaming"))
    one.wait_for(lambda: is_released_once(one))
    assert one.metric("requests_total", endpoint="completions", outcome="disconnected") == 1


def test_a_client_that_closes_only_its_sending_side_counts_as_gone(one):
    one.decodes[0].script.append(hang)
    client = one.send_post(COMPLETIONS, BODY)
    one.wait_for(lambda: len(one.decodes[0].calls) == 1)
    client.shutdown(socket.SHUT_WR)
    one.wait_for(lambda: one.decodes[0].num_aborted == 1)
    client.close()


def test_a_client_that_leaves_is_noticed_although_it_pipelined_another_request(one):
    one.decodes[0].script.append(hang)
    client = one.send_post(COMPLETIONS, BODY)
    client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    one.wait_for(lambda: len(one.decodes[0].calls) == 1)
    client.close()
    one.wait_for(lambda: one.decodes[0].num_aborted == 1)


def test_a_local_request_that_is_left_ends_its_only_leg_and_releases_nothing(one):
    one.decodes[0].script.append(hang)
    client = one.send_post(COMPLETIONS, {**BODY, "prompt": ["a", "b"]})
    one.wait_for(lambda: len(one.decodes[0].calls) == 1)
    client.close()
    one.wait_for(lambda: one.decodes[0].num_aborted == 1)
    one.wait_for(lambda: gone(one, "decode"))
    assert one.prefills[0].released == []


def test_twenty_clients_that_leave_at_any_time_leave_nothing_behind(one):
    for number in range(20):
        engine, behaviour = [
            (one.prefills[0], hang),
            (one.decodes[0], hang),
            (one.decodes[0], stream([sse("a")], then="hang")),
        ][number % 3]
        if engine is one.decodes[0]:
            one.prefills[0].script.append(default_behaviour)
        asked = [*one.prefills, *one.decodes] if one.mode == "push" else [engine]
        before = [len(each.calls) for each in asked]
        engine.script.append(behaviour)
        client = one.send_post(COMPLETIONS, STREAMED)
        # All legs: one that has not arrived would never be heard of.
        for each, num_calls in zip(asked, before, strict=True):
            one.wait_for(lambda each=each, num_calls=num_calls: len(each.calls) > num_calls)
        client.close()
        one.wait_for(lambda: not one.prefills[0].script and not one.decodes[0].script)
    handles = {call.leg["transfer_id"] for call in one.prefills[0].calls}
    assert len(handles) == 20
    one.wait_for(lambda: set(one.prefills[0].released) == handles)
    num_twice = 7 if one.mode == "push" else 0
    one.wait_for(lambda: one.prefills[0].num_aborted + one.decodes[0].num_aborted == 20 + num_twice)
    for engine in ("prefill-0", "decode-0"):
        assert one.metric("outstanding_requests", engine=engine) == 0
    one.wait_for(lambda: one.prefills[0].num_open <= 3)
    assert one.post(COMPLETIONS, BODY).status == 200
