"""OpenAI requests as the router sees them: reading, cleaning, and writing the two legs. Pure.

The router knows just enough of a body to route it; everything else is the engine's business. What decides the
*prompt* (messages, tools, chat template arguments, truncation, salt, adapter, …) must be equal on both legs, or
the decode engine finds that the held tokens are not its own and computes them again. What decides the *output*
(sampling ends, penalties on it, its format) is dropped from the prefill leg, whose one token nobody reads.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from kvshuttle.errors import RequestError
from kvshuttle.policy import RequestTraits

BYTES_PER_TOKEN = 4
"""English text in common tokenizers; only used to weigh requests against one another."""

MEDIUM_TOKENS = 1024
"""An image as common vision models take it: some hundreds of tokens to some thousands."""
_TEXT_KEYS = frozenset({"text", "refusal", "thinking", "reasoning"})
"""What parts of messages call the text that they are."""

_OUTPUT_FIELDS = (
    "stream_options",
    "stream_interval",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "best_of",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "echo",
    "response_format",
    "structured_outputs",
    "thinking_token_budget",
    "repetition_detection",
    "return_token_ids",
    "return_prompt_text",
    "routed_experts_prompt_start",
)
"""Of no effect on the prompt, and harmful or costly on a leg of one token: a stop string that hits the token ends the
request as *aborted*, ``min_tokens`` above one is refused, a grammar is compiled for nothing."""

_FORCED_FIELDS: tuple[tuple[str, Any], ...] = (("stream", False), ("max_tokens", 1), ("n", 1), ("ignore_eos", True))

_INTERNAL_FIELDS = frozenset({"kv_transfer_params", "ec_transfer_params", "kvshuttle"})
_INTERNAL_PREFIXES = ("remote_", "do_remote_", "bootstrap_")
"""Where engines and other routers carry addresses and block ids; a client that could set them could read others' KV."""


_CONVERSATION_FIELD = "conversation_id"
"""For the router only: engines do not know it."""
_CACHE_KEY_FIELD = "prompt_cache_key"


class Endpoint(StrEnum):
    """What the router serves by disaggregation. The value is the path and the metric label's source."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A client's body, understood as far as the router needs.

    ``fields``: the parsed object, cleaned. ``body``: bytes with the same meaning. ``model``: "" when not named.
    ``conversation``: what the body calls its conversation, "" for nothing.
    """

    endpoint: Endpoint
    fields: dict[str, Any]
    body: bytes
    model: str
    traits: RequestTraits
    was_cleaned: bool
    conversation: str = ""


def parse_request(endpoint: Endpoint, body: bytes) -> InferenceRequest:
    """Read and clean a body.

    Raises ``RequestError`` (400) when it is not a JSON object, is nested too deeply, or names its conversation with
    something else than text.
    """
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"The request body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError(f"The request body must be a JSON object, not {_json_type(fields)}.")
    was_cleaned = strip_internal_fields(fields)
    is_named = _CONVERSATION_FIELD in fields
    name = fields.pop(_CONVERSATION_FIELD, None)
    if name is not None and not isinstance(name, str):
        raise RequestError(f"conversation_id must be a string, not {_json_type(name)}.", param="conversation_id")
    names = (name, fields.get(_CACHE_KEY_FIELD))
    if was_cleaned or is_named:
        body = _dump(fields)
    model = fields.get("model")
    traits = _traits(endpoint, fields, len(body))
    conversation = next((name for name in names if isinstance(name, str) and name), "")
    return InferenceRequest(
        endpoint, fields, body, model if isinstance(model, str) else "", traits, was_cleaned, conversation
    )


def strip_internal_fields(fields: dict[str, Any]) -> bool:
    """Remove what only a router may say to an engine. True when there was any."""
    found = [name for name in fields if name in _INTERNAL_FIELDS or name.startswith(_INTERNAL_PREFIXES)]
    for name in found:
        del fields[name]
    extra_args = fields.get("vllm_xargs")
    if isinstance(extra_args, dict):
        # vLLM copies these into the same place that it puts kv_transfer_params.
        nested = [name for name in extra_args if name in _INTERNAL_FIELDS]
        for name in nested:
            del extra_args[name]
        found += nested
    return bool(found)


def prefill_body(request: InferenceRequest, params: dict[str, Any], keep: tuple[str, ...] = ()) -> bytes:
    """The body of the prefill leg: the same prompt, one token, nothing that shapes output.

    ``params``: its ``kv_transfer_params``. ``keep``: fields not to drop, for chat templates that render them.
    Raises ``RequestError`` when the body is nested too deeply.
    """
    fields = dict(request.fields)
    for name in _OUTPUT_FIELDS:
        if name in fields and name not in keep:
            del fields[name]
    fields.update(_FORCED_FIELDS)
    if request.endpoint is Endpoint.CHAT:
        # vLLM prefers this one over max_tokens when both are there.
        fields["max_completion_tokens"] = 1
        if _forces_a_tool(fields.get("tool_choice")) and "tool_choice" not in keep:
            # Tools stay: the chat template renders them. An explicit null keeps them rendered without a grammar.
            fields["tool_choice"] = None
    fields["kv_transfer_params"] = params
    return _dump(fields)


def decode_body(request: InferenceRequest, params: dict[str, Any] | None) -> bytes:
    """The body of the decode leg: the client's own bytes with our params spliced in before the closing brace."""
    if params is None:
        return request.body
    head = request.body.rstrip()
    assert head.endswith(b"}"), "a JSON object ends with a brace"
    comma = b"," if request.fields else b""
    return b'%b%b"kv_transfer_params":%b}' % (head[:-1], comma, orjson.dumps(params))


def _dump(fields: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(fields)
    except orjson.JSONEncodeError:
        # orjson reads 1024 levels but writes only 254.
        try:
            return json.dumps(fields).encode()
        except RecursionError as error:
            raise RequestError("The request body is nested too deeply.") from error


def _forces_a_tool(tool_choice: object) -> bool:
    return tool_choice == "required" or isinstance(tool_choice, dict)


def _traits(endpoint: Endpoint, fields: dict[str, Any], len_body: int) -> RequestTraits:
    num_media, num_media_bytes = _media(fields.get("messages"))
    num_tokens = max(len_body - num_media_bytes, 0) // BYTES_PER_TOKEN + num_media * MEDIUM_TOKENS
    num_prompts = 1
    wants_prompt_logprobs = fields.get("prompt_logprobs") is not None
    is_echo = bool(fields.get("echo"))
    if endpoint is Endpoint.COMPLETIONS:
        num_prompts, listed_tokens = _count_prompts(fields.get("prompt"))
        num_tokens = listed_tokens or num_tokens
        # vLLM: echo with logprobs means prompt_logprobs; on chat, echo alone does.
        is_echo = is_echo and fields.get("logprobs") is not None
    max_tokens = fields.get("max_completion_tokens") if endpoint is Endpoint.CHAT else None
    if max_tokens is None:
        max_tokens = fields.get("max_tokens")
    return RequestTraits(
        num_tokens=num_tokens,
        num_prompts=num_prompts,
        wants_prompt_logprobs=wants_prompt_logprobs or is_echo,
        has_prompt_embeds=fields.get("prompt_embeds") is not None,
        is_beam_search=bool(fields.get("use_beam_search")),
        is_without_output=max_tokens == 0 and max_tokens is not False,
    )


def _media(messages: object) -> tuple[int, int]:
    """How many parts of messages are no text (images, sound, files), and the bytes of what they carry inline.

    A picture sent in base64 is a megabyte of body and a thousand tokens of prompt.
    """
    contents = [message.get("content") for message in _dicts(messages)]
    parts = [part for content in contents for part in _dicts(content) if _TEXT_KEYS.isdisjoint(part)]
    return len(parts), sum(_inline_bytes(value) for part in parts for value in part.values())


def _dicts(values: object) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _inline_bytes(value: object) -> int:
    """Of a string, or of those in an object: OpenAI's ``{"url": …}``, ``{"data": …}``."""
    if isinstance(value, dict):
        return sum(len(each) for each in value.values() if isinstance(each, str))
    return len(value) if isinstance(value, str) else 0


def _count_prompts(prompt: object) -> tuple[int, int]:
    """Number of prompts, and their tokens when they are given as ids (else 0)."""
    if not isinstance(prompt, list) or not prompt:
        return 1, 0
    if isinstance(prompt[0], int):
        return 1, len(prompt)
    if isinstance(prompt[0], list):
        return len(prompt), sum(len(ids) for ids in prompt if isinstance(ids, list))
    return len(prompt), 0


def _json_type(value: object) -> str:
    names = {list: "an array", dict: "an object", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


# --- answers ---------------------------------------------------------------------------------------


def error_body(
    message: str, *, status: int, kind: str, param: str | None = None, code: str | int | None = None
) -> bytes:
    """An error as vLLM and OpenAI shape it. ``code`` defaults to the status, as vLLM does."""
    return orjson.dumps(
        {"error": {"message": message, "type": kind, "param": param, "code": status if code is None else code}}
    )


def unknown_model_message(model: str, served: frozenset[str]) -> str:
    """vLLM's own words for a model that it does not serve."""
    return f"The model `{model}` does not exist. Valid aliases: {', '.join(sorted(served))}."


def model_names(body: bytes) -> frozenset[str] | None:
    """Names in the answer of ``/v1/models``; None when it is not such an answer."""
    try:
        cards = orjson.loads(body)["data"]
        return frozenset(str(card["id"]) for card in cards)
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None


_PARAMS_KEY = b'_transfer_params"'


def scrub_answer(body: bytes) -> bytes:
    """A JSON answer without ``kv_transfer_params``. Engines send ``null`` there, which passes untouched."""
    if not has_transfer_params(body):
        return body
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return b"{}"
    _null_params(answer)
    return orjson.dumps(answer)


def has_transfer_params(data: bytes) -> bool:
    """True when a ``…_transfer_params`` key with a value other than null may be in ``data``.

    Inside JSON strings the quote would be escaped, so text generated by a model never matches.
    """
    at = data.find(_PARAMS_KEY)
    while at >= 0:
        rest = data[at + len(_PARAMS_KEY) : at + len(_PARAMS_KEY) + 32].lstrip()
        if rest[:1] == b":" and not rest[1:].lstrip().startswith(b"null"):
            return True
        at = data.find(_PARAMS_KEY, at + 1)
    return False


def _null_params(value: object) -> None:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in _INTERNAL_FIELDS:
                value[name] = None
            else:
                _null_params(inner)
    elif isinstance(value, list):
        for inner in value:
            _null_params(inner)
