"""The benchmark's client, which is OpenAI's own, through a real router: what it measures, and what it gives away."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvshuttle.bench.router_calls import forget, wait_for_pair
from kvshuttle.bench.router_log import read_request_lines
from kvshuttle.bench.talk import API_KEY, Client
from kvshuttle.errors import PeerUnreachable, TransportError
from support.fake_engine import DONE, FINGERPRINT, FakeEngine, status, stream
from support.fake_engine import answer as answer_with
from support.router_cluster import Cluster, cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("openai", reason="needs the package openai")

NAMING = {"conversation_id", "prompt_cache_key", "session_id", "user"}
"""Fields of a body by which a client may name its conversation or itself."""


def event(**fields: Any) -> bytes:
    """One event of a chat's stream."""
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [], **fields}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def piece(text: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}])


USAGE = event(usage={"prompt_tokens": 70, "completion_tokens": 2, "total_tokens": 72})
ANSWER = [piece(""), piece("hello"), piece(" world"), USAGE, DONE]


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with cluster(mode="pull", is_reusing_history=True) as running:
        yield running


@pytest.fixture
def one(shared: Cluster) -> Cluster:
    for engine in (shared.prefills[0], shared.decodes[0]):
        engine.forget()
    return shared


@pytest.fixture
def url(one: Cluster) -> str:
    return f"http://127.0.0.1:{one.port}"


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    made = Client(url, "m", salt="cell")
    yield made
    made.close()


def test_an_answer_is_read_whole_and_timed(one: Cluster, client: Client) -> None:
    one.decodes[0].script.append(stream(ANSWER, gap_s=0.3))
    answer = client.ask([{"role": "user", "content": "timed"}], max_tokens=2)
    assert (answer.text, answer.prompt_tokens, answer.answer_tokens) == ("hello world", 70, 2)
    # The first event has no text, so the first text comes a gap later, and the end three more.
    assert 0.25 < answer.ttft_s < answer.total_s - 0.3


def test_a_whole_answer_has_no_first_token_and_its_conversation_may_be_named(one: Cluster, url: str) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "hello world"}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 70, "completion_tokens": 2, "total_tokens": 72}
    whole = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    one.decodes[0].script.extend([answer_with(whole), answer_with({**whole, "choices": []})])
    client = Client(url, "m", salt="cell", is_streaming=False, conversation="mine 1")
    answer = client.ask([{"role": "user", "content": "whole"}], max_tokens=2)
    assert (answer.text, answer.prompt_tokens, answer.answer_tokens, answer.ttft_s) == ("hello world", 70, 2, -1.0)
    assert answer.total_s > 0
    assert answer.request_id
    call = one.decodes[0].calls[-1]
    assert call.headers["x-conversation-id"] == "mine 1"
    assert call.body["cache_salt"] == "cell"
    with pytest.raises(TransportError, match="no text"):
        client.ask([{"role": "user", "content": "nothing"}], max_tokens=2)
    client.close()


def test_the_client_names_no_conversation_and_its_next_turn_is_recognised(one: Cluster, client: Client) -> None:
    messages = [{"role": "user", "content": "unnamed"}]
    one.decodes[0].script.extend([stream(ANSWER), stream(ANSWER)])
    first = client.ask(messages, max_tokens=2)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "and then?"}]
    second = client.ask(messages, max_tokens=2)
    assert first.conversation == second.conversation != ""
    calls = one.decodes[0].calls
    for call in calls:
        assert not NAMING & set(call.body)
        assert not [name for name in call.headers if "conversation" in name or "session" in name]
        assert call.body["cache_salt"] == "cell"
    assert "history" not in one.prefills[0].calls[0].leg
    assert one.prefills[0].calls[1].leg["history"]["handle"] == calls[0].leg["keep"]["handle"]


def test_the_routers_log_line_of_an_answer_is_found(one: Cluster, client: Client, tmp_path: Path, caplog) -> None:
    one.decodes[0].script.append(stream(ANSWER))
    with caplog.at_level(logging.INFO, logger="kvshuttle.router.requests"):
        answer = client.ask([{"role": "user", "content": "logged"}], max_tokens=2)
        one.wait_until_nothing_is_left()
    log = tmp_path / "router.log"
    log.write_text("".join(f"now INFO {record.name}: {record.getMessage()}\n" for record in caplog.records))
    line = read_request_lines(log)[answer.request_id]
    assert line.mode == "pull"
    assert line.stages_s["prefill"] > 0


@pytest.mark.parametrize("behaviour", [status(400), stream([piece("hello")], then="reset"), stream([piece("x"), DONE])])
def test_what_is_no_whole_answer_is_an_error(one: Cluster, client: Client, behaviour) -> None:
    one.decodes[0].script.append(behaviour)
    with pytest.raises(TransportError):
        client.ask([{"role": "user", "content": "broken"}], max_tokens=2)


def test_conversations_are_forgotten_with_the_clients_own_key(one: Cluster, client: Client, url: str) -> None:
    one.decodes[0].script.append(stream(ANSWER))
    answer = client.ask([{"role": "user", "content": "forgotten"}], max_tokens=2)
    handle = one.decodes[0].calls[-1].leg["keep"]["handle"]
    forget(url, {answer.conversation}, api_key="another")
    assert one.decodes[0].released == []
    forget(url, {answer.conversation}, api_key=API_KEY)
    one.wait_for(lambda: handle in one.decodes[0].released)


def test_a_router_with_a_pair_is_not_waited_for_and_one_without_is_given_up(url: str) -> None:
    wait_for_pair(url, timeout_s=0)
    other = msgspec.structs.replace(FINGERPRINT, kv_dtype="another")
    unpaired = Cluster([FakeEngine("prefill-0", fingerprint=other)], [FakeEngine("decode-0")])
    unpaired.start_unpaired()
    try:
        with pytest.raises(PeerUnreachable, match="no pair of engines"):
            wait_for_pair(f"http://127.0.0.1:{unpaired.port}", timeout_s=0)
    finally:
        unpaired.stop()
