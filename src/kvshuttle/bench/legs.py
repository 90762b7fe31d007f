"""Drives one hand-off: the two HTTP requests of each connector's protocol, without a router between."""

from __future__ import annotations

import contextlib
import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvshuttle.bench.systems import MODEL_NAME, Protocol
from kvshuttle.bench.upstream_params import upstream_prefill_params, upstream_push_params
from kvshuttle.clock import now_s
from kvshuttle.errors import TransportError
from kvshuttle.handoff.params import DecodeLeg, Mode, Peer, PrefillLeg, parse_result, to_params
from kvshuttle.ids import mint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvshuttle.bench.systems import System

_TIMEOUT_S = 120.0
_PATH = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two running engines. ``source``: the prefill engine as our decode legs name it; None for vLLM's connectors."""

    system: System
    prefill_url: str
    decode_url: str
    prefill_side_port: int
    source: Peer | None
    model: str = MODEL_NAME
    """What the engines call it."""


@dataclass(slots=True)
class Driven:
    """What one hand-off came to, as its client saw it."""

    sent_at_s: float = 0.0
    prefill_answered_at_s: float = 0.0
    answered_at_s: float = 0.0
    token_text: str = ""
    error: str = ""
    details: dict[str, Any] = field(default_factory=dict)


def drive(pair: Pair, prompt: Sequence[int], *, output_tokens: int) -> Driven:
    """Both legs of one request, in the order of the system's protocol. Errors are written down, not raised."""
    driven = Driven(sent_at_s=now_s())
    try:
        if pair.system.mode is Mode.PUSH:
            _push(pair, prompt, output_tokens, driven)
        else:
            _pull(pair, prompt, output_tokens, driven)
    except (OSError, http.client.HTTPException, TransportError, ValueError) as error:
        driven.error = f"{type(error).__name__}: {error}"
    return driven


def complete(url: str, prompt: Sequence[int], *, max_tokens: int, **extra: Any) -> dict[str, Any]:
    """One completion that is not streamed. Raises ``TransportError`` when the answer is not 200."""
    with contextlib.closing(send(url, prompt, max_tokens=max_tokens, **extra)) as connection:
        response = connection.getresponse()
        data = response.read()
    if response.status != 200:
        raise TransportError(f"{url}: HTTP {response.status}: {data[:200].decode(errors='replace')}")
    answer: dict[str, Any] = json.loads(data)
    return answer


def stream(url: str, prompt: Sequence[int], *, max_tokens: int, **extra: Any) -> None:
    """One completion, streamed to its end. Raises ``TransportError`` when the answer is not 200."""
    with contextlib.closing(send(url, prompt, max_tokens=max_tokens, stream=True, **extra)) as connection:
        response = connection.getresponse()
        if response.status != 200:
            raise TransportError(f"{url}: HTTP {response.status}: {response.read(200).decode(errors='replace')}")
        for _ in response:
            pass


def send(
    url: str, prompt: Sequence[int], *, max_tokens: int, headers: Mapping[str, str] | None = None, **extra: Any
) -> http.client.HTTPConnection:
    """Send a request for exactly ``max_tokens`` tokens, and leave its answer to the caller."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    body = {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "min_tokens": max_tokens,
        "temperature": 0,
        **extra,
    }
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S)
    connection.request(
        "POST", _PATH, json.dumps(body).encode(), {"content-type": "application/json", **(headers or {})}
    )
    return connection


def _pull(pair: Pair, prompt: Sequence[int], output_tokens: int, driven: Driven) -> None:
    transfer_id = mint("bench")
    answer = complete(
        pair.prefill_url, prompt, max_tokens=1, model=pair.model, kv_transfer_params=_prefill_params(pair, transfer_id)
    )
    driven.prefill_answered_at_s = now_s()
    result = answer.get("kv_transfer_params")
    if pair.system.protocol is Protocol.SHUTTLE:
        if parse_result(result) is None:
            raise TransportError("the prefill engine holds nothing")
        params = _decode_params(pair, transfer_id)
    elif isinstance(result, dict):
        params = result
    else:
        raise TransportError("the prefill engine's answer carries no kv_transfer_params")
    _finish(pair, prompt, output_tokens, params, driven, {})


def _push(pair: Pair, prompt: Sequence[int], output_tokens: int, driven: Driven) -> None:
    """Both legs at once. vLLM's connectors match them by the request id, so it is the same on both."""
    transfer_id = mint("bench")
    headers = {"x-request-id": transfer_id}
    with ThreadPoolExecutor(1) as executor:
        prefill = executor.submit(
            complete,
            pair.prefill_url,
            prompt,
            max_tokens=1,
            model=pair.model,
            kv_transfer_params=_prefill_params(pair, transfer_id),
            headers=headers,
        )
        prefill.add_done_callback(lambda _: setattr(driven, "prefill_answered_at_s", now_s()))
        _finish(pair, prompt, output_tokens, _decode_params(pair, transfer_id), driven, headers)
        prefill.result()


def _finish(
    pair: Pair,
    prompt: Sequence[int],
    output_tokens: int,
    params: Mapping[str, Any],
    driven: Driven,
    headers: Mapping[str, str],
) -> None:
    answer = complete(
        pair.decode_url,
        prompt,
        max_tokens=output_tokens,
        model=pair.model,
        kv_transfer_params=dict(params),
        headers=dict(headers),
    )
    driven.answered_at_s = now_s()
    driven.token_text = answer["choices"][0]["text"]


def _prefill_params(pair: Pair, transfer_id: str) -> dict[str, Any]:
    if pair.system.protocol is Protocol.SHUTTLE:
        return to_params(PrefillLeg(transfer_id, mode=pair.system.mode))
    return upstream_prefill_params()


def _decode_params(pair: Pair, transfer_id: str) -> dict[str, Any]:
    """Where D finds P. For vLLM's pull connector P's own answer says it."""
    if pair.system.protocol is Protocol.SHUTTLE:
        assert pair.source is not None
        return to_params(DecodeLeg(transfer_id, pair.source, mode=pair.system.mode))
    return upstream_push_params(transfer_id, "prefill-0", f"127.0.0.1:{pair.prefill_side_port}")
