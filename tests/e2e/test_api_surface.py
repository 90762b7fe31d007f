"""Whatever a client sends: the plain engine's answer, or a clean 4xx, and no engine dies."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from support.live import MODEL_NAME

if TYPE_CHECKING:
    from support.live import Live

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = "The ferry left the old harbour a little after six, while the lamps along the quay were still burning. On deck"
ASK = [{"role": "user", "content": "Name three colours of the rainbow, then say which one you like best and why."}]
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ANSWER_SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {
            "type": "object",
            "properties": {"colour": {"type": "string", "maxLength": 12}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}


def completion(**extra: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"model": MODEL_NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": 10, **extra}


def chat(**extra: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": MODEL_NAME, "messages": ASK, "temperature": 0, "max_tokens": 10, **extra}


SAME = {
    "logprobs": completion(logprobs=3),
    "chat logprobs": chat(logprobs=True, top_logprobs=3),
    "n=3": completion(n=3, temperature=1, top_k=1),
    "chat n=3": chat(n=3, temperature=1, top_k=1),
    "a list of prompts": completion(prompt=[PROMPT, "Once upon a time", PROMPT + " a woman"]),
    "lists of token ids": completion(prompt=[[1, 2, 3, 4, 5], [6, 7, 8]]),
    "echo": completion(echo=True),
    "echo with logprobs": completion(echo=True, logprobs=1),
    "prompt_logprobs": completion(prompt_logprobs=1),
    "max_tokens 1": completion(max_tokens=1),
    "chat max_completion_tokens": chat(max_tokens=None, max_completion_tokens=5),
    "min_tokens": completion(min_tokens=8),
    "min_tokens above one": chat(min_tokens=5, max_tokens=6),
    "stop": completion(stop=["a"]),
    "several stops": chat(stop=[".", "\n"]),
    "stop_token_ids": completion(stop_token_ids=[198, 30, 28]),
    "ignore_eos": completion(ignore_eos=True),
    "stream": completion(stream=True),
    "stream_options": chat(stream=True, stream_options={"include_usage": True}),
    "stream with continuous usage": completion(
        stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    ),
    "tools not called": chat(tools=[WEATHER_TOOL], tool_choice="none"),
    "json_schema": chat(response_format=ANSWER_SCHEMA, max_tokens=30),
    "structured outputs": completion(structured_outputs={"choice": ["red", "green"]}),
    "system message": chat(messages=[{"role": "system", "content": "Be brief."}, *ASK]),
    "priority and user": completion(user="somebody"),
    "add_generation_prompt off": chat(add_generation_prompt=False),
    "penalties": completion(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1),
    "logit_bias": completion(logit_bias={"30": 5}),
    "bad_words": completion(bad_words=["the"]),
    "truncate_prompt_tokens": completion(truncate_prompt_tokens=8),
    "cache_salt": completion(cache_salt="tenant-1"),
    "max_tokens left out": (COMPLETIONS, {"model": MODEL_NAME, "prompt": PROMPT, "temperature": 0}),
    "unknown field": completion(no_such_field=1),
    "client-sent kv_transfer_params": completion(
        kv_transfer_params={"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 1}
    ),
    "client-sent params of ours": chat(
        kv_transfer_params={"kvshuttle": {"leg": "decode", "transfer_id": "x", "source": {"address": "10.0.0.1:1"}}}
    ),
}

REFUSED = {
    "malformed JSON": (CHAT, b'{"model": "smollm2", "messages": [', 400),
    "an empty body": (CHAT, b"", 400),
    "not an object": (COMPLETIONS, b"[1, 2]", 400),
    "no messages": (CHAT, {"model": MODEL_NAME}, 400),
    "messages of a wrong type": (CHAT, {"model": MODEL_NAME, "messages": 7}, 400),
    "temperature of a wrong type": (*completion(temperature="hot"), 400),
    "negative temperature": (*completion(temperature=-1), 400),
    "max_tokens of a wrong type": (*completion(max_tokens="many"), 400),
    "max_tokens below zero": (*completion(max_tokens=-1), 400),
    "n=3 with greedy sampling": (*completion(n=3), 400),
    "unknown model": (*completion(model="nobody"), 404),
    "model of a wrong type": (*completion(model=7), 400),
    "over-long prompt": (*completion(prompt=PROMPT * 400), 400),
    "prompt and answer over the limit": (*completion(max_tokens=100_000), 400),
    "min_tokens above max_tokens": (*completion(min_tokens=20), 400),
    "token ids out of range": (*completion(prompt=[10**9]), 400),
    "stream_options without stream": (*completion(stream_options={"include_usage": True}), 400),
    "forced tool without a parser": (*chat(tools=[WEATHER_TOOL], tool_choice="auto"), 400),
    "an empty prompt list": (*completion(prompt=[]), 400),
    "bad json_schema": (*chat(response_format={"type": "json_schema"}), 400),
}

SECRETS = ("127.0.0.1", "xfer-", "inc-", "prefill-0", "decode-0", "transfer_id", "remote_host", "lease_")


PASSING = ("id", "created", "system_fingerprint", "prompt_tokens_details")


def comparable(body: Any) -> Any:
    """A response without what differs from call to call: ids, times, and what caches had of the prompt."""
    if isinstance(body, list):
        return [comparable(each) for each in body]
    if not isinstance(body, dict):
        return body
    return {key: comparable(value) for key, value in body.items() if key not in PASSING}


def without_close_numbers(body: Any) -> Any:
    """Log probabilities differ in the last bits between batch shapes; four digits must agree."""
    if isinstance(body, float):
        return round(body, 3)
    if isinstance(body, list):
        return [without_close_numbers(each) for each in body]
    if isinstance(body, dict):
        return {key: without_close_numbers(value) for key, value in body.items()}
    return body


@pytest.mark.parametrize("name", SAME)
def test_the_answer_is_the_plain_engines(live: Live, name: str) -> None:
    path, body = SAME[name]
    answer, reference = live.ask(path, body), live.ask_plain(path, body)
    assert answer.status == reference.status == 200, (answer.raw, reference.raw)
    if body.get("stream"):
        assert answer.gist == reference.gist
    else:
        assert without_close_numbers(comparable(answer.body)) == without_close_numbers(comparable(reference.body))
    for secret in SECRETS:
        assert secret not in answer.raw.decode()


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_request_gets_a_clean_4xx_as_from_a_plain_engine(live: Live, name: str) -> None:
    path, body, status = REFUSED[name]
    answer, reference = live.ask(path, body), live.ask_plain(path, body)
    assert answer.status == status, answer.raw
    # A plain engine answers some malformed bodies with other 4xx of its own.
    assert 400 <= reference.status < 500
    error = answer.body["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert set(error) >= {"message", "type", "code"}
    for secret in SECRETS:
        assert secret not in answer.raw.decode()


def test_models_are_the_engines(live: Live) -> None:
    from support.live import get

    status, body = get(live.url, "/v1/models")
    assert status == 200
    models = json.loads(body)
    assert [model["id"] for model in models["data"]] == [MODEL_NAME]
    for secret in SECRETS:
        assert secret not in body.decode()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize", "/", "/v1/chat/completions/x"])
def test_other_paths_are_not_found(live: Live, path: str) -> None:
    answer = live.ask(path, {"model": MODEL_NAME})
    assert answer.status == 404
    assert answer.body["error"]["message"]


def test_all_engines_survived_and_hold_nothing(live: Live) -> None:
    assert live.fleet.check("prefill-0")
    assert live.fleet.check("decode-0")
    assert live.wait_settled(timeout_s=10) == {}
