"""One streamed chat turn over HTTP, timed; and an engine's metrics."""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvshuttle.errors import PeerUnreachable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a turn. ``ttft_s``: from sending to the first text. Token counts are the engine's, 0 without any."""

    text: str
    num_prompt_tokens: int
    num_answer_tokens: int
    ttft_s: float
    total_s: float

    @property
    def tokens_per_s(self) -> float:
        """Speed after the first token."""
        streaming_s = self.total_s - self.ttft_s
        return (self.num_answer_tokens - 1) / streaming_s if self.num_answer_tokens > 1 and streaming_s > 0 else 0.0


def stream_chat(url: str, model: str, messages: Sequence[dict[str, str]], *, max_tokens: int) -> Answer:
    """Ask for a streamed answer at temperature 0. Raises ``PeerUnreachable`` with the reason when none comes."""
    body = {
        "model": model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started_at_s = time.monotonic()
    first_at_s = None
    pieces: list[str] = []
    usage: dict[str, int] = {}
    for event in _events_of(url, body):
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            piece = choice.get("delta", {}).get("content")
            if piece:
                first_at_s = first_at_s or time.monotonic()
                pieces.append(piece)
    ended_at_s = time.monotonic()
    return Answer(
        text="".join(pieces),
        num_prompt_tokens=usage.get("prompt_tokens", 0),
        num_answer_tokens=usage.get("completion_tokens", 0),
        ttft_s=(first_at_s or ended_at_s) - started_at_s,
        total_s=ended_at_s - started_at_s,
    )


def fetch_metrics(url: str, *, timeout_s: float = _TIMEOUT_S) -> str:
    """The text at an engine's ``/metrics``. Raises ``PeerUnreachable``."""
    connection = _connect(url, timeout_s=timeout_s)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        text = response.read().decode()
    except (OSError, http.client.HTTPException) as error:
        raise PeerUnreachable(f"{url}/metrics: {error}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise PeerUnreachable(f"{url}/metrics: HTTP {response.status}")
    return text


def _events_of(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    connection = _connect(url)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            text = response.read(2000).decode(errors="replace")
            raise PeerUnreachable(f"{url} answered {response.status}: {text}")
        payloads = (line.removeprefix(b"data: ").strip() for line in response if line.startswith(b"data: "))
        for payload in payloads:
            if payload == b"[DONE]":
                continue
            event: dict[str, Any] = json.loads(payload)
            if "error" in event:
                raise PeerUnreachable(f"{url} broke the answer off: {event['error']}")
            yield event
    except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
        raise PeerUnreachable(f"{url}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _connect(url: str, *, timeout_s: float = _TIMEOUT_S) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    assert parts.hostname is not None
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
