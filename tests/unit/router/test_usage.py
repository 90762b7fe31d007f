import itertools
import json

import orjson
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvshuttle.router.sse import EventTail
from kvshuttle.router.usage import COUNT, put_right

TRICKY = [
    'he said "cached_tokens": 7',
    "cached_tokens",
    '{"usage":{"prompt_tokens_details":{"cached_tokens":999}}}',
    '"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":900}}',
    "data: cached_tokens\n\ndata: [DONE]\n\n",
    "naïve — 🚀 \\ \u2028 \x00",
]


def details_of(body):
    return orjson.loads(body)["usage"]["prompt_tokens_details"]


def compact(fields):
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


def spaced(fields):
    return json.dumps(fields).encode()


def pretty(fields):
    return json.dumps(fields, indent=1).encode()


def usage(num_cached, **details):
    """As vLLM writes it in a whole answer."""
    return {
        "prompt_tokens": 900,
        "total_tokens": 907,
        "completion_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": num_cached, **details},
        "completion_tokens_details": None,
    }


def answer(num_cached, text="hello", **details):
    choices = [{"index": 0, "message": {"role": "assistant", "content": text}, "logprobs": None}]
    return {"id": "chatcmpl-1", "choices": choices, "usage": usage(num_cached, **details), "kv_transfer_params": None}


@pytest.mark.parametrize(
    ("counted", "known", "shown"), [(899, 640, 640), (899, 0, 0), (899, 899, 899), (128, 640, 128), (0, 640, 0)]
)
@pytest.mark.parametrize("write", [compact, spaced, pretty])
def test_as_many_tokens_are_cached_as_neither_engine_computed(write, counted, known, shown):
    assert details_of(put_right(write(answer(counted)), known)) == {"cached_tokens": shown}


@pytest.mark.parametrize("write", [compact, spaced])
def test_what_is_not_known_is_left_out_and_the_rest_stays(write):
    whole = answer(899, multimodal_tokens={"image": 3})
    put = orjson.loads(put_right(write(whole), None))
    assert put.pop("usage") == {
        "prompt_tokens": 900,
        "total_tokens": 907,
        "completion_tokens": 7,
        "prompt_tokens_details": {"multimodal_tokens": {"image": 3}},
        "completion_tokens_details": None,
    }
    assert put == {name: value for name, value in whole.items() if name != "usage"}


def test_what_went_into_caches_is_left_out_where_it_was_counted_from_the_wrong_token_on():
    whole = compact(answer(899, created_cache_tokens=1, multimodal_tokens=None))
    assert details_of(put_right(whole, 640)) == {"cached_tokens": 640, "multimodal_tokens": None}
    assert put_right(whole, 899) == whole


@pytest.mark.parametrize("text", TRICKY)
@pytest.mark.parametrize("known", [None, 3])
def test_only_the_usage_of_an_answer_changes_and_every_other_byte_stays(text, known):
    whole = compact(answer(899, text))
    expected = answer(899, text)
    expected["usage"]["prompt_tokens_details"] = {} if known is None else {"cached_tokens": known}
    assert put_right(whole, known) == compact(expected)


@pytest.mark.parametrize(
    "fields",
    [
        {"usage": None},
        {"usage": {"prompt_tokens": 9, "prompt_tokens_details": None}},
        {"usage": {"prompt_tokens_details": {"cached_tokens": None}}},
        {"usage": {"prompt_tokens_details": {"multimodal_tokens": {}}}},
        {"usage": [{"prompt_tokens_details": {"cached_tokens": 5}}]},
        {"cached_tokens": 5, "usage": "cached_tokens"},
        {"choices": [{"logprobs": {"top_logprobs": [{"cached_tokens": -0.5}], "tokens": ["cached_tokens"]}}]},
        {"choices": [{"usage": {"prompt_tokens_details": {"cached_tokens": 5}}}]},
        ["cached_tokens"],
        "cached_tokens",
    ],
)
@pytest.mark.parametrize("write", [compact, spaced])
def test_what_counts_no_cached_tokens_passes_byte_for_byte(write, fields):
    assert put_right(write(fields), 0) == write(fields)
    assert put_right(write(fields), None) == write(fields)


@pytest.mark.parametrize(
    "body", [b"", b"[DONE]", b'{"usage":{"prompt_tokens_details":{"cached_tokens":5', b'"cached_tokens"x']
)
def test_what_is_no_json_passes_byte_for_byte(body):
    assert put_right(body, 0) == body


# --- streams ----------------------------------------------------------------------------------------


def through(tail, whole, cuts):
    edges = [0, *sorted(cut for cut in cuts if cut < len(whole)), len(whole)]
    out = b"".join(tail.feed(whole[start:stop]) for start, stop in itertools.pairwise(edges))
    return out + tail.rest()


def chunk(text, **fields):
    return {"id": "c", "choices": [{"index": 0, "delta": {"content": text}}], **fields}


WORDS = st.one_of(st.sampled_from(TRICKY), st.text(max_size=20))
COUNTLESS = st.one_of(
    st.none(),
    st.just({"prompt_tokens": 9, "total_tokens": 9, "completion_tokens": 0}),
    st.just({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": None}}),
)
LINE_ENDS = st.sampled_from([b"\n\n", b"\r\n\r\n"])
EVENTS = st.one_of(
    st.builds(
        lambda text, usage, write, end: b"data: " + write(chunk(text, usage=usage)) + end,
        WORDS,
        COUNTLESS,
        st.sampled_from([compact, spaced]),
        LINE_ENDS,
    ),
    st.sampled_from(
        [
            b': "cached_tokens"\n\n',
            b'event: "cached_tokens"\ndata:  1 \n\n',
            b"data: [DONE]\n\n",
            b'data: {"cached_tokens":5}\n\n',
        ]
    ),
)
CUTS = st.lists(st.integers(0, 600), max_size=8)


@settings(deadline=None)
@given(st.lists(EVENTS, max_size=6), CUTS, st.sampled_from([None, 0, 5]))
def test_a_stream_without_such_a_usage_passes_byte_for_byte_however_it_is_read(events, cuts, known):
    whole = b"".join(events)
    assert through(EventTail(lambda body: put_right(body, known)), whole, cuts) == whole


@settings(deadline=None)
@given(
    st.lists(EVENTS, max_size=4),
    st.lists(EVENTS, max_size=2),
    CUTS,
    st.sampled_from([None, 0, 5, 898]),
    WORDS,
    LINE_ENDS,
)
def test_in_a_stream_the_event_with_the_usage_is_put_right_and_no_other_byte_changes(
    before, after, cuts, known, text, end
):
    shown = usage(899)
    event = b"data: " + compact(chunk(text, usage=usage(899))) + end
    shown["prompt_tokens_details"] = {} if known is None else {"cached_tokens": known}
    expected = b"data: " + compact(chunk(text, usage=shown)) + end
    head, tail = b"".join(before), b"".join(after)
    put = through(EventTail(lambda body: put_right(body, known)), head + event + tail, cuts)
    assert put == head + expected + tail


def test_each_event_of_continuous_usage_is_put_right_by_what_is_known_then():
    known = []
    tail = EventTail(lambda body: put_right(body, known[-1] if known else None))
    event = b"data: " + compact(chunk("a", usage=usage(899))) + b"\n\n"
    assert details_of(tail.feed(event)[6:]) == {}
    known.append(64)
    assert details_of(tail.feed(event)[6:]) == {"cached_tokens": 64}


def test_a_last_event_without_a_blank_line_is_put_right_too():
    tail = EventTail(lambda body: put_right(body, 1))
    assert tail.feed(b"data: " + compact(chunk("a", usage=usage(899)))) == b""
    assert details_of(tail.rest()[6:]) == {"cached_tokens": 1}


def test_where_nothing_was_handed_off_the_count_stays():
    event = b"data: " + compact(chunk("a", usage=usage(899))) + b"\n\n"
    assert EventTail().feed(event) == event


@given(WORDS)
def test_the_name_of_the_count_cannot_be_mistaken_in_text(text):
    assume(text != "cached_tokens")
    assert COUNT not in json.dumps({"content": text}).encode()
