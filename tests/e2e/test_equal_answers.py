"""Disaggregated answers equal a plain engine's, and the KV really moved."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from support.live import BLOCK_SIZE_TOKENS, CHUNK_TOKENS, MODEL_NAME, difference

if TYPE_CHECKING:
    from support.live import Answer, Live

NUM_ANSWER_TOKENS = 12
LENGTHS = {
    "below one block": BLOCK_SIZE_TOKENS // 2,
    "3 blocks - 1": 3 * BLOCK_SIZE_TOKENS - 1,
    "3 blocks": 3 * BLOCK_SIZE_TOKENS,
    "3 blocks + 1": 3 * BLOCK_SIZE_TOKENS + 1,
    "beyond one chunk": CHUNK_TOKENS + 150,
}
KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4
"""SmolLM2-135M in float32: layers, K and V, KV heads, head size, bytes."""


def request_for(live: Live, endpoint: str, num_tokens: int, *, is_streamed: bool) -> tuple[str, dict[str, Any]]:
    """Path and body of a greedy request whose prompt has exactly ``num_tokens`` tokens."""
    body: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0, "max_tokens": NUM_ANSWER_TOKENS}
    if endpoint == "chat":
        path = "/v1/chat/completions"
        body["messages"] = live.messages(num_tokens)
    else:
        path = "/v1/completions"
        body["prompt"] = live.token_ids(num_tokens)
    if is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return path, body


def assert_equal(answer: Answer, reference: Answer) -> None:
    """Text, finish reason and token counts are the same."""
    assert answer.status == reference.status == 200, answer.raw
    assert answer.text
    assert answer.gist == reference.gist


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("length", LENGTHS)
def test_an_answer_equals_the_plain_engines_and_its_kv_moved(
    live: Live, endpoint: str, length: str, is_streamed: bool
) -> None:
    num_tokens = LENGTHS[length]
    path, body = request_for(live, endpoint, num_tokens, is_streamed=is_streamed)
    before = live.metrics("decode-0").moved()
    answer = live.ask(path, body)
    moved = difference(live.metrics("decode-0").moved(), before)
    assert_equal(answer, live.ask_plain(path, body))
    assert answer.usage is not None
    assert answer.usage["prompt_tokens"] == num_tokens
    assert moved["read_ok"] == moved["transfers"] == 1
    assert moved["tokens"] == num_tokens
    assert moved["bytes"] >= num_tokens * KV_BYTES_PER_TOKEN
    assert live.wait_settled(timeout_s=10) == {}


def test_a_repeated_prompt_reads_only_what_the_decode_engine_lacks(live: Live) -> None:
    path, body = request_for(live, "completions", 3 * BLOCK_SIZE_TOKENS + 40, is_streamed=False)
    reference = live.ask_plain(path, body)
    assert_equal(live.ask(path, body), reference)
    before = live.metrics("decode-0").moved()
    assert_equal(live.ask(path, body), reference)
    moved = difference(live.metrics("decode-0").moved(), before)
    assert moved["read_ok"] == 1
    assert moved["tokens"] == 40
    assert live.wait_settled(timeout_s=10) == {}


def test_a_full_local_hit_reads_nothing_and_releases_the_prefill_engine(live: Live) -> None:
    path, body = request_for(live, "completions", 3 * BLOCK_SIZE_TOKENS + 1, is_streamed=False)
    reference = live.ask_plain(path, body)
    assert_equal(live.ask(path, body), reference)
    before = live.metrics("decode-0").moved()
    assert_equal(live.ask(path, body), reference)
    moved = difference(live.metrics("decode-0").moved(), before)
    assert moved["full_local_hit"] == moved["transfers"] == 1
    assert moved["bytes"] == 0
    # At once, not when the lease ends.
    assert live.wait_settled(timeout_s=3) == {}


def test_eight_requests_at_once_all_equal_the_reference(live: Live) -> None:
    kinds = [("chat", True), ("completions", False), ("completions", True), ("chat", False)] * 2
    requests = [
        request_for(live, endpoint, 150 + 40 * index, is_streamed=is_streamed)
        for index, (endpoint, is_streamed) in enumerate(kinds)
    ]
    references = [live.ask_plain(path, body) for path, body in requests]
    before = live.metrics("decode-0").moved()
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(lambda request: live.ask(*request), requests))
    for answer, reference in zip(answers, references, strict=True):
        assert_equal(answer, reference)
    moved = difference(live.metrics("decode-0").moved(), before)
    assert moved["read_ok"] == len(requests)
    assert live.wait_settled(timeout_s=10) == {}
