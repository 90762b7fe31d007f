"""Disaggregated answers equal a plain engine's, and the KV really moved."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from support.live import BLOCK_SIZE_TOKENS, CHUNK_TOKENS, HAND_OFFS, MODEL_NAME, difference
from support.scores import ASK_SCORES_CHAT, ASK_SCORES_COMPLETION, assert_same

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
        body |= {"messages": live.messages(num_tokens), **ASK_SCORES_CHAT}
    else:
        path = "/v1/completions"
        body |= {"prompt": live.token_ids(num_tokens), **ASK_SCORES_COMPLETION}
    if is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return path, body


def assert_equal(answer: Answer, reference: Answer) -> None:
    """Tokens and how likely each was, finish reason and token counts are the same."""
    assert answer.status == reference.status == 200, answer.raw
    assert answer.text
    assert_same(answer, reference)


def assert_handed_off(
    live: Live, mode: str, path: str, body: dict[str, Any], *, num_tokens: int, bytes_per_token: int
) -> None:
    """The answer is the plain engine's, and its prompt's KV moved in the way that was asked for, and only once."""
    before = live.moved()
    answer = live.ask(path, body, mode=mode)
    moved = difference(live.moved(), before)
    assert_equal(answer, live.ask_plain(path, body))
    assert answer.usage is not None
    assert answer.usage["prompt_tokens"] == num_tokens
    assert moved[HAND_OFFS[mode]] == moved["transfers"] == 1
    assert moved["tokens"] == num_tokens
    assert moved["bytes"] >= num_tokens * bytes_per_token
    assert live.wait_settled(timeout_s=10) == {}


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("mode", HAND_OFFS)
def test_an_answer_equals_the_plain_engines_and_its_kv_moved(
    live: Live, mode: str, endpoint: str, length: str, is_streamed: bool
) -> None:
    path, body = request_for(live, endpoint, LENGTHS[length], is_streamed=is_streamed)
    assert_handed_off(live, mode, path, body, num_tokens=LENGTHS[length], bytes_per_token=KV_BYTES_PER_TOKEN)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("mode", HAND_OFFS)
def test_cached_tokens_are_those_that_neither_engine_computed(
    live: Live, mode: str, endpoint: str, is_streamed: bool
) -> None:
    path, body = request_for(live, endpoint, 3 * BLOCK_SIZE_TOKENS + 40, is_streamed=is_streamed)
    for expected in (0, 3 * BLOCK_SIZE_TOKENS):
        told, plain = live.ask(path, body, mode=mode).num_cached_tokens, live.ask_plain(path, body).num_cached_tokens
        assert plain == expected
        # In a push the prefill engine may not have said in time.
        assert told in ((expected,) if mode == "pull" else (expected, None))


@pytest.mark.parametrize("mode", HAND_OFFS)
def test_a_repeated_prompt_moves_only_what_the_decode_engine_lacks(live: Live, mode: str) -> None:
    path, body = request_for(live, "completions", 3 * BLOCK_SIZE_TOKENS + 40, is_streamed=False)
    reference = live.ask_plain(path, body)
    assert_equal(live.ask(path, body, mode=mode), reference)
    before = live.moved()
    assert_equal(live.ask(path, body, mode=mode), reference)
    moved = difference(live.moved(), before)
    assert moved[HAND_OFFS[mode]] == 1
    assert moved["tokens"] == 40
    assert live.wait_settled(timeout_s=10) == {}


@pytest.mark.parametrize("mode", HAND_OFFS)
def test_a_full_local_hit_moves_nothing_and_releases_the_prefill_engine(live: Live, mode: str) -> None:
    path, body = request_for(live, "completions", 3 * BLOCK_SIZE_TOKENS + 1, is_streamed=False)
    reference = live.ask_plain(path, body)
    assert_equal(live.ask(path, body, mode=mode), reference)
    before = live.moved()
    assert_equal(live.ask(path, body, mode=mode), reference)
    moved = difference(live.moved(), before)
    assert moved["full_local_hit"] == moved["transfers"] == 1
    assert moved["bytes"] == 0
    # At once, not when the lease ends.
    assert live.wait_settled(timeout_s=3) == {}


@pytest.mark.parametrize("mode", [*HAND_OFFS, "mixed"])
def test_eight_requests_at_once_all_equal_the_reference(live: Live, mode: str) -> None:
    assert_eight_at_once(live, mode)


def assert_eight_at_once(live: Live, mode: str) -> None:
    """Each with another length, endpoint and way of answering; all hand-offs succeed."""
    kinds = [("chat", True), ("completions", False), ("completions", True), ("chat", False)] * 2
    modes = ["pull", "push"] * 4 if mode == "mixed" else [mode] * 8
    requests = [
        request_for(live, endpoint, 150 + 40 * index, is_streamed=is_streamed)
        for index, (endpoint, is_streamed) in enumerate(kinds)
    ]
    references = [live.ask_plain(path, body) for path, body in requests]
    before = live.moved()
    with ThreadPoolExecutor(len(requests)) as pool:
        asked = [
            pool.submit(live.ask, path, body, mode=each) for (path, body), each in zip(requests, modes, strict=True)
        ]
        answers = [each.result() for each in asked]
    for answer, reference in zip(answers, references, strict=True):
        assert_equal(answer, reference)
    moved = difference(live.moved(), before)
    assert moved["read_ok"] + moved["received"] == moved["transfers"] == len(requests)
    if mode in ("pull", "push"):
        assert moved[HAND_OFFS[mode]] == len(requests)
    assert live.wait_settled(timeout_s=10) == {}
