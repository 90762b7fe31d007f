import json

import orjson
import pytest

from kvshuttle.errors import RequestError
from kvshuttle.router.openai import (
    MEDIUM_TOKENS,
    Endpoint,
    decode_body,
    error_body,
    has_transfer_params,
    model_names,
    parse_request,
    prefill_body,
    scrub_answer,
    unknown_model_message,
)

CHAT, COMPLETIONS = Endpoint.CHAT, Endpoint.COMPLETIONS
PARAMS = {"kvshuttle": {"leg": "prefill", "transfer_id": "t"}}
MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def parsed(endpoint, fields):
    return parse_request(endpoint, orjson.dumps(fields))


def prefilled(endpoint, fields, keep=()):
    return orjson.loads(prefill_body(parsed(endpoint, fields), PARAMS, keep))


PICTURE = "data:image/png;base64," + "A" * 40_000


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": PICTURE}},
        {"type": "image_url", "image_url": PICTURE},
        {"image_url": PICTURE},
        {"type": "input_audio", "input_audio": {"data": PICTURE, "format": "wav"}},
        {"type": "file", "file": {"file_data": PICTURE}},
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        {"type": ["odd"], "image_embeds": {"a": PICTURE, "b": [1]}},
    ],
)
def test_a_picture_counts_as_a_picture_and_not_by_its_bytes(part):
    text = {"type": "text", "text": "What is this? " * 40}
    without = parsed(CHAT, {"messages": [{"role": "user", "content": [text]}]}).traits.num_tokens
    traits = parsed(CHAT, {"messages": [{"role": "user", "content": [text, part, part]}]}).traits
    assert 2 * MEDIUM_TOKENS <= traits.num_tokens - without < 2 * MEDIUM_TOKENS + 60


def test_long_texts_count_by_their_bytes_wherever_they_stand():
    parts = [{"type": "text", "text": "a" * 4000}, {"type": "refusal", "refusal": "a" * 4000}, {"text": "a" * 4000}]
    assert 3000 <= parsed(CHAT, {"messages": [{"role": "user", "content": parts}]}).traits.num_tokens < 3100


@pytest.mark.parametrize(
    "body", [b"", b"{", b"nonsense", b"[1]", b'"x"', b"null", b"3", b"true", b'{"a":NaN}', b'{"a":1}x', b"\xff{}"]
)
def test_anything_but_a_json_object_is_the_clients_fault(body):
    with pytest.raises(RequestError) as caught:
        parse_request(CHAT, body)
    assert caught.value.status == 400
    assert "JSON" in str(caught.value)


def test_nesting_without_end_is_the_clients_fault():
    with pytest.raises(RequestError):
        parse_request(CHAT, b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


@pytest.mark.parametrize("depth", [200, 300, 600])
def test_deep_nesting_that_an_engine_could_read_is_served(depth):
    body = b'{"remote_host":1,"tools":' + b"[" * depth + b"]" * depth + b"}"
    request = parse_request(CHAT, body)
    assert prefill_body(request, PARAMS).count(b"[") == depth
    assert decode_body(request, PARAMS).count(b"[") == depth


def test_nesting_too_deep_to_be_written_again_is_the_clients_fault():
    request = parse_request(CHAT, b'{"tools":' + b"[" * 1020 + b"]" * 1020 + b"}")
    with pytest.raises(RequestError, match="nested too deeply"):
        prefill_body(request, PARAMS)


def test_the_prefill_leg_of_an_empty_chat_request_has_only_what_is_forced():
    assert prefilled(CHAT, {}) == {
        "stream": False,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "n": 1,
        "ignore_eos": True,
        "kv_transfer_params": PARAMS,
    }


def test_completions_have_no_max_completion_tokens():
    assert "max_completion_tokens" not in prefilled(COMPLETIONS, {"prompt": "x", "max_tokens": 9})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream_options", {"include_usage": True}),
        ("stream_interval", 4),
        ("min_tokens", 5),
        ("stop", ["a"]),
        ("stop", "a"),
        ("stop_token_ids", [1]),
        ("include_stop_str_in_output", True),
        ("best_of", 3),
        ("logprobs", True),
        ("top_logprobs", 5),
        ("logprob_token_ids", [1, 2]),
        ("response_format", {"type": "json_object"}),
        ("structured_outputs", {"regex": "a+"}),
        ("thinking_token_budget", 10),
        ("repetition_detection", {}),
        ("return_token_ids", True),
        ("return_prompt_text", True),
    ],
)
@pytest.mark.parametrize("endpoint", Endpoint)
def test_what_shapes_only_output_is_dropped_from_the_prefill_leg(endpoint, name, value):
    assert name not in prefilled(endpoint, {"model": "m", name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("stream", True), ("max_tokens", 100), ("max_tokens", None), ("max_completion_tokens", 7), ("n", 3), ("n", None)],
)
def test_the_prefill_leg_is_one_token_of_one_answer_in_one_piece(name, value):
    body = prefilled(CHAT, {"messages": MESSAGES, name: value})
    assert (body["stream"], body["max_tokens"], body["max_completion_tokens"], body["n"]) == (False, 1, 1, 1)


PROMPT_FIELDS = {
    "model": "m",
    "messages": MESSAGES,
    "tools": TOOLS,
    "tool_choice": "auto",
    "reasoning_effort": "low",
    "include_reasoning": False,
    "add_generation_prompt": False,
    "continue_final_message": True,
    "add_special_tokens": True,
    "documents": [{"title": "t", "text": "x"}],
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"enable_thinking": False},
    "mm_processor_kwargs": {"a": 1},
    "media_io_kwargs": {"image": {}},
    "truncate_prompt_tokens": 10,
    "truncation_side": "left",
    "cache_salt": "salt",
    "priority": 3,
    "user": "u",
    "session_id": "s",
    "request_id": "r",
    "vllm_xargs": {"x": 1},
    "temperature": 0.5,
    "seed": 7,
    "suffix": "tail",
    "logit_bias": {"5": 1},
}


def test_everything_that_may_decide_the_prompt_is_kept_on_the_prefill_leg():
    body = prefilled(CHAT, PROMPT_FIELDS)
    assert {name: body[name] for name in PROMPT_FIELDS} == PROMPT_FIELDS


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_forced_tool_is_rendered_but_not_forced_on_the_one_token(choice):
    body = prefilled(CHAT, {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice})
    assert body["tools"] == TOOLS
    assert body["tool_choice"] is None


@pytest.mark.parametrize("choice", ["none", "auto", None])
def test_other_tool_choices_are_kept_since_they_may_change_the_prompt(choice):
    assert prefilled(CHAT, {"tools": TOOLS, "tool_choice": choice})["tool_choice"] == choice
    assert "tool_choice" not in prefilled(CHAT, {"tools": TOOLS})


def test_fields_can_be_kept_for_chat_templates_that_render_them():
    fields = {"response_format": {"type": "json_object"}, "tool_choice": "required"}
    body = prefilled(CHAT, fields, keep=("response_format", "tool_choice"))
    assert {name: body[name] for name in fields} == fields


def test_building_the_prefill_leg_leaves_the_request_as_it_was():
    request = parsed(CHAT, {"messages": MESSAGES, "stream": True, "stop": "x"})
    before = json.dumps(request.fields)
    prefill_body(request, PARAMS)
    assert json.dumps(request.fields) == before


def test_the_decode_leg_is_the_clients_bytes_with_params_spliced_in():
    body = b' {"model" : "m",\n "prompt":"\\u00e9 }"}  \r\n'
    request = parse_request(COMPLETIONS, body)
    spliced = decode_body(request, PARAMS)
    assert spliced.startswith(body.rstrip()[:-1])
    assert orjson.loads(spliced) == {"model": "m", "prompt": "é }", "kv_transfer_params": PARAMS}


def test_the_decode_leg_of_an_empty_object_is_valid_json():
    assert orjson.loads(decode_body(parse_request(CHAT, b"{ }"), PARAMS)) == {"kv_transfer_params": PARAMS}


def test_without_params_the_decode_leg_is_the_clients_bytes():
    body = b'{ "model":"m" }\n'
    assert decode_body(parse_request(CHAT, body), None) == body


@pytest.mark.parametrize(
    "body",
    [
        b'{"kv_transfer_params":{"do_remote_prefill":true},"model":"m"}',
        b'{"kv\\u005ftransfer_params":{"remote_host":"10.0.0.1"},"model":"m"}',
        b'{"kv_transfer_params":null,"model":"m","kv_transfer_params":{"x":1}}',
        b'{"ec_transfer_params":{"x":1},"model":"m"}',
        b'{"remote_block_ids":[1],"model":"m"}',
        b'{"remote_host":"h","do_remote_prefill":true,"bootstrap_room":1,"kvshuttle":{},"model":"m"}',
        b'{"model":"m","vllm_xargs":{"kv_transfer_params":"x"}}',
    ],
)
def test_what_only_a_router_may_say_is_taken_out_of_both_legs(body):
    request = parse_request(CHAT, body)
    assert request.was_cleaned
    decoded = decode_body(request, PARAMS)
    assert decoded.count(b"transfer_params") == 1
    for text in (decoded, decode_body(request, None)):
        assert not any(word in text for word in (b"remote_", b"bootstrap_", b"ec_transfer"))
    assert orjson.loads(prefill_body(request, PARAMS))["kv_transfer_params"] == PARAMS
    assert orjson.loads(decoded)["model"] == "m"


def test_messages_that_talk_about_transfer_params_are_not_touched():
    body = orjson.dumps({"messages": [{"role": "user", "content": 'what is "kv_transfer_params": {"a": 1}?'}]})
    request = parse_request(CHAT, body)
    assert not request.was_cleaned
    assert request.body == body


@pytest.mark.parametrize(
    ("prompt", "num_prompts", "num_tokens"),
    [
        ([1, 2, 3], 1, 3),
        ([[1, 2], [3]], 2, 3),
        ([[1, 2, 3]], 1, 3),
        (["a", "b"], 2, None),
        (["a"], 1, None),
        ([], 1, None),
        ("text", 1, None),
        (None, 1, None),
        (5, 1, None),
    ],
)
def test_prompts_and_their_tokens_are_counted(prompt, num_prompts, num_tokens):
    request = parsed(COMPLETIONS, {"prompt": prompt})
    assert request.traits.num_prompts == num_prompts
    assert request.traits.num_tokens == (len(request.body) // 4 if num_tokens is None else num_tokens)


@pytest.mark.parametrize(
    ("endpoint", "fields", "trait"),
    [
        (CHAT, {"prompt_logprobs": 0}, "wants_prompt_logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 1}, "wants_prompt_logprobs"),
        (COMPLETIONS, {"echo": True, "logprobs": 0}, "wants_prompt_logprobs"),
        (CHAT, {"echo": True}, "wants_prompt_logprobs"),
        (COMPLETIONS, {"prompt_embeds": "AA=="}, "has_prompt_embeds"),
        (CHAT, {"use_beam_search": True}, "is_beam_search"),
        (CHAT, {"max_completion_tokens": 0, "max_tokens": 5}, "is_without_output"),
        (CHAT, {"max_tokens": 0}, "is_without_output"),
        (COMPLETIONS, {"max_tokens": 0, "echo": True}, "is_without_output"),
    ],
)
def test_requests_that_a_prefill_leg_cannot_serve_are_recognised(endpoint, fields, trait):
    assert getattr(parsed(endpoint, fields).traits, trait)


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        (COMPLETIONS, {"echo": True}),
        (COMPLETIONS, {"echo": False, "logprobs": 3}),
        (CHAT, {"logprobs": True, "top_logprobs": 3}),
        (CHAT, {"max_tokens": 0, "max_completion_tokens": 5}),
        (CHAT, {"max_tokens": False}),
        (CHAT, {"n": 3}),
        (CHAT, {"prompt_logprobs": None, "prompt_embeds": None}),
    ],
)
def test_requests_that_a_prefill_leg_can_serve_stay_ordinary(endpoint, fields):
    traits = parsed(endpoint, fields).traits
    flags = (traits.wants_prompt_logprobs, traits.has_prompt_embeds, traits.is_beam_search, traits.is_without_output)
    assert flags == (False, False, False, False)


@pytest.mark.parametrize("model", [None, 5, ["m"], ""])
def test_a_model_that_is_not_a_name_is_left_to_the_engine(model):
    assert parsed(CHAT, {"model": model}).model == ""


# --- answers ---


@pytest.mark.parametrize(
    "body",
    [
        b'{"kv_transfer_params":null}',
        b'{"kv_transfer_params" : null,"ec_transfer_params":null}',
        b'{"text":"say \\"kv_transfer_params\\": {1}"}',
        b"{}",
        b"",
        b"not json",
    ],
)
def test_answers_without_internal_params_pass_byte_for_byte(body):
    assert scrub_answer(body) is body


@pytest.mark.parametrize(
    "body",
    [
        b'{"id":"x","kv_transfer_params":{"remote_host":"10.0.0.1"}}',
        b'{"id":"x","kv_transfer_params": \n {"remote_host":"10.0.0.1"}}',
        b'{"id":"x","kv_transfer_params":null,"ec_transfer_params":{"remote_host":"10.0.0.1"}}',
        b'{"id":"x","choices":[{"kv_transfer_params":{"remote_host":"10.0.0.1"}}]}',
    ],
)
def test_internal_params_are_nulled_on_the_way_out(body):
    scrubbed = scrub_answer(body)
    assert b"10.0.0.1" not in scrubbed
    assert orjson.loads(scrubbed)["id"] == "x"
    assert not has_transfer_params(scrubbed)


def test_an_unreadable_answer_with_internal_params_is_withheld():
    assert scrub_answer(b'{"kv_transfer_params":{"remote_host":"10.0.0.1"') == b"{}"


def test_errors_have_the_shape_that_vllm_gives_them():
    assert orjson.loads(error_body("m", status=404, kind="NotFoundError", param="model")) == {
        "error": {"message": "m", "type": "NotFoundError", "param": "model", "code": 404}
    }


def test_an_unknown_model_is_refused_in_vllms_words():
    assert unknown_model_message("x", frozenset({"b", "a"})) == "The model `x` does not exist. Valid aliases: a, b."


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"data":[{}]}', b'{"data":5}', b'{"error":"Unauthorized"}'])
def test_model_names_are_unknown_when_the_answer_is_not_a_list_of_models(body):
    assert model_names(body) is None


def test_model_names_are_read_from_the_cards():
    assert model_names(b'{"data":[{"id":"a"},{"id":"b"}]}') == {"a", "b"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"conversation_id": "a", "prompt_cache_key": "b"}, "a"),
        ({"prompt_cache_key": "b"}, "b"),
        ({"conversation_id": "", "prompt_cache_key": "b"}, "b"),
        ({"conversation_id": None, "prompt_cache_key": ["b"]}, ""),
        ({}, ""),
    ],
)
def test_what_the_body_calls_its_conversation_is_read_and_only_what_engines_know_stays(fields, expected):
    request = parse_request(Endpoint.CHAT, json.dumps({"messages": [], **fields}).encode())
    assert request.conversation == expected
    fields.pop("conversation_id", None)
    assert json.loads(request.body) == {"messages": [], **fields}


@pytest.mark.parametrize(("name", "told"), [(7, "a number"), (True, "a boolean"), ({}, "an object"), ([], "an array")])
def test_a_conversation_is_named_by_text_or_not_at_all(name, told):
    with pytest.raises(RequestError, match=f"conversation_id must be a string, not {told}") as caught:
        parse_request(Endpoint.CHAT, json.dumps({"messages": [], "conversation_id": name}).encode())
    assert (caught.value.status, caught.value.param) == (400, "conversation_id")


def test_a_body_without_a_conversation_passes_byte_for_byte():
    body = b'{ "prompt_cache_key": "b",  "messages": [] }'
    assert parse_request(Endpoint.CHAT, body).body == body
