"""What clients are told of cached tokens: what nobody computed for them, whichever way their answer came."""

import asyncio
import json

import pytest

from support.fake_engine import DONE, answer, default_behaviour, reset_before_headers, sse, status, stream
from support.router_cluster import cluster

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "hello"}]},
    COMPLETIONS: {"model": "m", "prompt": "hello"},
}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
COUNTED = 899
TEXT = 'he said "cached_tokens": 899, {"prompt_tokens_details":{"cached_tokens":899}}'

EVERYWHERE = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
EITHER = pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])


def usage(**details):
    return {"prompt_tokens": 900, "total_tokens": 905, "completion_tokens": 5, "prompt_tokens_details": details}


def usage_event(**details):
    return b"data: " + json.dumps({"choices": [], "usage": usage(**details)}, separators=(",", ":")).encode() + b"\n\n"


def answers_with_usage(*, is_stream):
    """A decode engine that got nearly the whole prompt from elsewhere, and whose text speaks of it."""
    if is_stream:
        return stream([sse(TEXT), usage_event(cached_tokens=COUNTED), DONE])
    return answer({"choices": [{"index": 0, "text": TEXT}], "usage": usage(cached_tokens=COUNTED)})


def details_told(reply, *, is_stream):
    """What the client reads; everything else must be as the engine said it."""
    assert reply.status == 200
    if not is_stream:
        assert reply.json["choices"][0]["text"] == TEXT
        return reply.json["usage"]["prompt_tokens_details"]
    text, told, done, rest = reply.read_body.split(b"\n\n")
    assert (text + b"\n\n", done + b"\n\n", rest) == (sse(TEXT), DONE, b"")
    return json.loads(told.removeprefix(b"data: "))["usage"]["prompt_tokens_details"]


def ask(one, path, *, is_stream):
    return one.post(path, BODIES[path] | (STREAMED if is_stream else {}))


@pytest.fixture(scope="module", params=["pull", "push"])
def shared(request):
    with cluster(mode=request.param) as running:
        yield running


@pytest.fixture
def one(shared):
    for engine in (shared.prefills[0], shared.decodes[0]):
        engine.forget()
    yield shared
    shared.wait_until_nothing_is_left()


def when_computed(behaviour):
    """The decode leg of a push that begins when the prompt is computed, and the router has had time to hear of it."""

    async def behave(call):
        if call.leg["mode"] == "pull" or await call.wait_for_push():
            await asyncio.sleep(0.05)
            await behaviour(call)

    return behave


@EVERYWHERE
@EITHER
@pytest.mark.parametrize(("known", "told"), [(640, 640), (0, 0), (COUNTED, COUNTED), (900, COUNTED)])
def test_after_a_hand_off_no_more_is_cached_than_the_prefill_engine_did_not_compute(one, path, is_stream, known, told):
    one.prefills[0].num_cached_tokens = known
    one.decodes[0].script.append(when_computed(answers_with_usage(is_stream=is_stream)))
    assert details_told(ask(one, path, is_stream=is_stream), is_stream=is_stream) == {"cached_tokens": told}


@EVERYWHERE
@EITHER
def test_where_the_prefill_engine_does_not_say_the_count_is_left_out(one, path, is_stream):
    one.decodes[0].script.append(when_computed(answers_with_usage(is_stream=is_stream)))
    assert details_told(ask(one, path, is_stream=is_stream), is_stream=is_stream) == {}


@EITHER
def test_an_engine_that_counts_nothing_is_passed_on_byte_for_byte(one, is_stream):
    one.prefills[0].num_cached_tokens = 0
    events = [sse(TEXT), b'data: {"choices":[], "usage":{"prompt_tokens_details":null}}\n\n', DONE]
    body = b'{"choices": [{"text": "\\"cached_tokens\\": 5"}],  "usage": {"prompt_tokens": 9}}'
    one.decodes[0].script.append(when_computed(stream(events) if is_stream else answer(body)))
    reply = ask(one, COMPLETIONS, is_stream=is_stream)
    assert reply.read_body == (b"".join(events) if is_stream else body)


@EITHER
def test_a_request_that_went_to_one_engine_alone_is_told_that_engines_own_count(one, is_stream):
    body = {**BODIES[COMPLETIONS], "prompt": ["two", "prompts"]} | (STREAMED if is_stream else {})
    one.decodes[0].script.append(answers_with_usage(is_stream=is_stream))
    assert details_told(one.post(COMPLETIONS, body), is_stream=is_stream) == {"cached_tokens": COUNTED}


@EITHER
def test_a_fallback_to_the_decode_engine_alone_is_told_that_engines_own_count(one, is_stream):
    one.prefills[0].num_cached_tokens = 3
    one.prefills[0].script.append(status(400))
    if one.mode == "push":
        one.decodes[0].script.append(default_behaviour)
    one.decodes[0].script.append(answers_with_usage(is_stream=is_stream))
    reply = ask(one, COMPLETIONS, is_stream=is_stream)
    assert one.decodes[0].calls[-1].leg is None
    assert details_told(reply, is_stream=is_stream) == {"cached_tokens": COUNTED}


@EITHER
def test_the_count_of_a_failed_attempt_is_not_that_of_the_next(one, is_stream):
    one.prefills[0].num_cached_tokens = 3
    one.decodes[0].script.append(when_computed(reset_before_headers))
    one.decodes[0].script.append(when_computed(answers_with_usage(is_stream=is_stream)))

    async def says_nothing(call):
        call.engine.num_cached_tokens = None
        await default_behaviour(call)

    one.prefills[0].script.extend([default_behaviour, says_nothing])
    assert details_told(ask(one, COMPLETIONS, is_stream=is_stream), is_stream=is_stream) == {}
    assert len(one.prefills[0].calls) == 2


@EITHER
def test_a_pushed_answer_that_ends_before_the_prefill_legs_own_counts_nothing(is_stream):
    with cluster(mode="push") as one:
        told = asyncio.Event()

        async def late(call):
            await told.wait()
            await default_behaviour(call)

        one.prefills[0].num_cached_tokens = 640
        one.prefills[0].script.append(late)
        one.decodes[0].script.append(answers_with_usage(is_stream=is_stream))
        assert details_told(ask(one, COMPLETIONS, is_stream=is_stream), is_stream=is_stream) == {}
        one.call(told.set)
        one.wait_until_nothing_is_left()


def test_what_becomes_known_while_an_answer_streams_is_told_at_its_end():
    with cluster(mode="push") as one:
        begun = asyncio.Event()

        async def late(call):
            await begun.wait()
            await default_behaviour(call)

        async def slow(call):
            await call.begin_stream()
            await call.chunk(sse(TEXT))
            begun.set()
            await call.wait_for_push()
            await asyncio.sleep(0.1)
            await call.chunk(usage_event(cached_tokens=COUNTED)[:20])
            await call.chunk(usage_event(cached_tokens=COUNTED)[20:])
            await call.chunk(DONE)
            await call.end_stream()

        one.prefills[0].num_cached_tokens = 640
        one.prefills[0].script.append(late)
        one.decodes[0].script.append(slow)
        reply = ask(one, COMPLETIONS, is_stream=True)
        assert details_told(reply, is_stream=True) == {"cached_tokens": 640}
        one.wait_until_nothing_is_left()


def test_a_push_for_which_nothing_is_held_any_more_still_says_what_it_did_not_compute():
    with cluster(mode="push") as one:

        async def spent(call):
            held = {"leg": "prefilled", "transfer_id": call.leg["transfer_id"], "num_tokens": 0, "lease_s": 1.0}
            held["num_cached_tokens"] = 640
            type(one.prefills[0]).computed[call.leg["transfer_id"]].set()
            await call.json(200, {"choices": [], "kv_transfer_params": {"kvshuttle": held}})

        one.prefills[0].script.append(spent)
        one.decodes[0].script.append(when_computed(answers_with_usage(is_stream=False)))
        assert details_told(ask(one, CHAT, is_stream=False), is_stream=False) == {"cached_tokens": 640}
        one.wait_until_nothing_is_left()


def test_a_pull_for_which_nothing_is_held_is_no_hand_off():
    with cluster(mode="pull") as one:

        async def nothing(call):
            held = {"leg": "prefilled", "transfer_id": call.leg["transfer_id"], "num_tokens": 0, "lease_s": 1.0}
            await call.json(200, {"choices": [], "kv_transfer_params": {"kvshuttle": held}})

        one.prefills[0].script.append(nothing)
        one.decodes[0].script.append(answers_with_usage(is_stream=False))
        assert details_told(ask(one, CHAT, is_stream=False), is_stream=False) == {"cached_tokens": COUNTED}
        assert one.decodes[0].calls[-1].leg is None
