"""How many tokens of its prompt nobody computed: what an answer says of that, put right. Pure.

An engine counts as cached what it did not compute itself. For a decode engine that got its KV by hand-off this is
nearly the whole prompt, though the prefill engine computed most of it. Both compute a prompt from some token on to its
end, so what neither computed are its first tokens, as many as the smaller of their two counts says.
"""

from __future__ import annotations

from typing import Any

import orjson

COUNT = b'"cached_tokens"'
"""What an answer without this says nothing of cached tokens. Inside JSON strings its quotes would be escaped."""


def put_right(body: bytes, num_cached_tokens: int | None) -> bytes:
    """A JSON answer, or event of one, whose ``usage`` counts no more tokens as cached than ``num_cached_tokens``.

    None says that this is not known, so the count is left out. Everything else passes byte for byte.
    """
    if COUNT not in body:
        return body
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body
    usage = _object_in(answer, "usage")
    details = _object_in(usage, "prompt_tokens_details")
    counted = details.get("cached_tokens")
    if not isinstance(counted, int) or (num_cached_tokens is not None and counted <= num_cached_tokens):
        return body
    before = orjson.dumps(usage)
    if num_cached_tokens is None:
        del details["cached_tokens"]
    else:
        details["cached_tokens"] = num_cached_tokens
    # What was written into caches is counted from the decode engine's number on.
    details.pop("created_cache_tokens", None)
    # Engines write JSON without spaces, so that nothing but the usage changes.
    return body.replace(before, orjson.dumps(usage)) if body.count(before) == 1 else orjson.dumps(answer)


def _object_in(value: Any, name: str) -> dict[str, Any]:
    inner = value.get(name) if isinstance(value, dict) else None
    return inner if isinstance(inner, dict) else {}
