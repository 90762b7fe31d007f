import itertools

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshuttle.router.sse import EventTail, StreamError, StreamHead, error_event

ERROR = b'{"error":{"message":"m","type":"T","param":null,"code":503}}'


@pytest.mark.parametrize(
    "data",
    [
        b'data: {"choices":[]}\n\n',
        b'data:{"choices":[]}\n\n',
        b'data: {"choices":[]}\r\n\r\n',
        b": keep-alive\n\ndata: 1\n\n",
        b"event: message\nid: 3\ndata: 1\n\n",
        b"data: [DONE]\n\n",
        b'data: {"choices":[{"delta":{"content":"error"}}],"error":null}\n\n',
        b'data: "error"\n\n',
        b'data: {"error" not json\n\n',
    ],
)
def test_the_first_data_event_begins_an_answer_and_stays_untouched(data):
    head = StreamHead()
    assert head.feed(data) is True
    assert head.data == data


@pytest.mark.parametrize("data", [b"", b": keep-alive\n\n", b"data: {", b"event: x\n\n", b"data: 1\n"])
def test_comments_and_half_events_begin_nothing(data):
    assert StreamHead().feed(data) is False


@pytest.mark.parametrize(
    ("payload", "status"),
    [
        (ERROR, 503),
        (b'{"error":{"message":"m","code":400}}', 400),
        (b'{"error":{"message":"m","code":"strange"}}', 500),
        (b'{"error":{"message":"m","code":200}}', 500),
        (b'{"error":{"message":"m"}}', 500),
        (b'{"error":"m"}', 500),
    ],
)
def test_an_error_before_any_data_is_told_with_its_status(payload, status):
    assert StreamHead().feed(b": hi\n\ndata: " + payload + b"\n\n") == StreamError(status, payload)


def test_a_first_event_is_recognised_byte_by_byte():
    head = StreamHead()
    data = b": c\n\ndata: " + ERROR + b"\n\n"
    verdicts = [head.feed(data[at : at + 1]) for at in range(len(data))]
    assert verdicts[:-1] == [False] * (len(data) - 1)
    assert verdicts[-1] == StreamError(503, ERROR)


def test_a_head_without_end_is_passed_on():
    assert StreamHead().feed(b"data: " + b"x" * (1 << 20)) is True


EVENTS = [b"data: {}\n\n", b": ping\n\n", b'data: {"text":"a\\nb"}\r\n\r\n', b"data: [DONE]\n\n", b"data: \xf0\x9f\n\n"]


@settings(deadline=None)
@given(st.lists(st.sampled_from(EVENTS), max_size=8), st.lists(st.integers(0, 120), max_size=8), st.binary(max_size=3))
def test_a_stream_passes_byte_for_byte_and_only_in_whole_events(events, cuts, end):
    whole = b"".join(events) + end.replace(b"\n", b"x")
    edges = [0, *sorted(cut for cut in cuts if cut < len(whole)), len(whole)]
    tail, out = EventTail(), b""
    for start, stop in itertools.pairwise(edges):
        out += tail.feed(whole[start:stop])
        assert not out or out.endswith((b"\n\n", b"\r\n\r\n"))
    assert out + tail.rest() == whole


def test_an_event_too_long_to_hold_is_passed_on_in_parts():
    tail = EventTail()
    assert tail.feed(b"x" * 600_000) == b""
    assert not tail.is_torn
    assert len(tail.feed(b"x" * 600_000)) == 1_200_000
    assert tail.is_torn
    assert tail.feed(b"x\n\ndata: {") == b"x\n\n"
    assert not tail.is_torn


def test_internal_params_in_a_stream_are_nulled_and_the_rest_stays():
    event = b'data: {"id":"x","kv_transfer_params":{"remote_host":"10.0.0.1"}}\n\n'
    tail = EventTail()
    out = tail.feed(b"data: 1\n\n" + event[:30]) + tail.feed(event[30:] + b"data: 2\n\n")
    assert b"10.0.0.1" not in out
    lines = out.split(b"\n\n")
    assert (lines[0], lines[2]) == (b"data: 1", b"data: 2")
    assert orjson.loads(lines[1][6:]) == {"id": "x", "kv_transfer_params": None}


def test_internal_params_in_an_unfinished_last_event_are_nulled_too():
    tail = EventTail()
    tail.feed(b'data: {"kv_transfer_params":{"remote_host":"10.0.0.1"}}')
    assert b"10.0.0.1" not in tail.rest()


TOLD = b'data: {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}}\n\n'


@pytest.mark.parametrize("cut", [0, 3, 12, 40, len(TOLD) + 10, len(TOLD) + 12, 1000])
def test_a_stream_ends_with_the_error_that_the_engine_tells_of(cut):
    whole = b"data: 1\n\n" + TOLD + b"data: [DONE]\n\n"
    tail = EventTail()
    assert tail.feed(whole[:cut]) + tail.feed(whole[cut:]) == b"data: 1\n\n" + TOLD
    assert (tail.error.status, tail.is_done, tail.rest()) == (500, False, b"")
    assert tail.feed(b"data: 2\n\n") == b""


def test_an_error_without_a_blank_line_behind_it_is_one_too():
    tail = EventTail()
    assert tail.feed(TOLD[:-2]) == b""
    assert tail.rest() == TOLD[:-2]
    assert tail.error.status == 500


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices": [{"finish_reason": "error"}]}\n\n',
        b'data: {"choices": [], "error": null}\n\n',
        b'data: {"choices": [{"text": "\\"error\\": {}"}]}\n\n',
        b'data: ["error"]\n\n',
        b'data: {"error"\n\n',
        b': "error"\n\n',
    ],
)
def test_what_only_looks_like_an_error_passes(event):
    tail = EventTail()
    assert tail.feed(event + b"data: [DONE]\n\n") == event + b"data: [DONE]\n\n"
    assert (tail.error, tail.is_done) == (None, True)


@pytest.mark.parametrize("done", [b"data: [DONE]\n\n", b"data: [DONE]\r\n\r\n", b"data:[DONE]\n\n"])
def test_a_stream_is_done_with_the_event_that_says_so_and_not_before(done):
    for cut in range(len(done)):
        tail = EventTail()
        tail.feed(b"data: 1\n\n" + done[:cut])
        assert not tail.is_done
        tail.feed(done[cut:])
        assert tail.is_done


@pytest.mark.parametrize(
    "event", [b'data: {"text": "data: [DONE]"}\n\n', b"data: [DONE]\n", b": [DONE]\n\n", b"data: 2\n\n"]
)
def test_a_stream_that_only_mentions_the_end_is_not_done(event):
    tail = EventTail()
    tail.feed(event)
    assert not tail.is_done


def test_an_error_event_is_one_event():
    assert error_event(b"{}") == b"data: {}\n\n"
