"""The conversations of a churn run, with a server in place of the router that answers as it is told."""

from __future__ import annotations

import http.server
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kvshuttle.bench import churn_talk
from kvshuttle.bench.answers import chat_ids, expected_answer
from kvshuttle.bench.churn_plan import MODES, ChurnPlan
from kvshuttle.bench.churn_records import AskRecord, Client, How, Journal, read_churn_records
from kvshuttle.bench.churn_talk import Asker, Manner, Talker
from kvshuttle.clock import now_s

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("openai")

NUM_TOKENS = 5
MESSAGES = [{"role": "user", "content": "baba bebe bibi"}]


class Server(http.server.ThreadingHTTPServer):
    """Answers chats as emulated engines do, or as ``behaviour`` says."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviour = "right"
        self.is_over = threading.Event()
        self.asked: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.headers["x-kvshuttle-mode"], self.headers["x-request-id"]))
        behaviour = self.server.behaviour
        if behaviour == "reset":
            self.connection.shutdown(2)
            self.close_connection = True
            return
        if behaviour == "garbage":
            self._send(200, b"data: {half\n\n", "text/event-stream")
            return
        if behaviour == "silent":
            self.server.is_over.wait(10)
            return
        if behaviour == "busy":
            self._send(503, b'{"error": {"message": "no"}}', "application/json")
            return
        ids = chat_ids(body["messages"])
        words = expected_answer(ids, body["max_tokens"]).split()
        words = [*words[1:], words[0]] if behaviour == "wrong" else words[:2] if behaviour == "short" else words
        usage = {"prompt_tokens": len(ids) + (behaviour == "miscounted"), "completion_tokens": body["max_tokens"]}
        usage["total_tokens"] = sum(usage.values())
        if body["stream"]:
            self._stream(words, usage, behaviour)
        else:
            choice = {
                "index": 0,
                "finish_reason": "length",
                "message": {"role": "assistant", "content": " ".join(words)},
            }
            self._send(200, json.dumps(self._envelope([choice], usage)).encode(), "application/json")

    def _stream(self, words: list[str], usage: dict[str, int], behaviour: str) -> None:
        events: list[Any] = [
            self._envelope([{"index": 0, "finish_reason": None, "delta": {"content": f" {word}"}}]) for word in words
        ]
        if behaviour == "error event":
            events = [*events[:2], {"error": {"message": "the engine died"}}]
        elif behaviour not in ("short", "uncounted"):
            events.append(self._envelope([], usage))
        data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
        self._send(200, data if behaviour == "cut" else data + b"data: [DONE]\n\n", "text/event-stream", behaviour)

    def _envelope(self, choices: list[Any], usage: dict[str, int] | None = None) -> dict[str, Any]:
        told = {"usage": usage} if usage else {}
        return {"id": "x", "object": "chat", "created": 1, "model": "emulated", "choices": choices, **told}

    def _send(self, status: int, data: bytes, kind: str, behaviour: str = "") -> None:
        is_cut = behaviour in ("cut", "stuck")
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data) + 9 * is_cut))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if is_cut else data)
        if behaviour == "stuck":
            self.wfile.flush()
            self.server.is_over.wait(10)
        self.close_connection = is_cut

    def log_message(self, *_: object) -> None:
        """Not of interest."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.is_over.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def asker(server: Server) -> Iterator[Asker]:
    asker = Asker(server.url, now_s())
    yield asker
    asker.close()


@pytest.mark.parametrize(
    ("behaviour", "is_streamed", "how"),
    [
        ("right", True, How.RIGHT),
        ("right", False, How.RIGHT),
        ("wrong", True, How.WRONG),
        ("wrong", False, How.WRONG),
        ("short", True, How.WRONG),
        ("uncounted", True, How.WRONG),
        ("short", False, How.WRONG),
        ("miscounted", True, How.WRONG),
        ("miscounted", False, How.WRONG),
        ("error event", True, How.CUT),
        ("cut", True, How.CUT),
        ("busy", True, How.ERROR),
        ("busy", False, How.ERROR),
        ("reset", True, How.REFUSED),
        ("reset", False, How.REFUSED),
        ("garbage", True, How.WRONG),
    ],
)
def test_what_becomes_of_a_request_is_told_apart(
    server: Server, asker: Asker, behaviour: str, is_streamed: bool, how: How
) -> None:
    server.behaviour = behaviour
    record, text = asker.ask(MESSAGES, NUM_TOKENS, Manner("r-1", "pull", is_streamed), client=Client.LAST)
    assert record.how is how, record
    assert record.status == {"busy": 503, "reset": 0, "cut": 0, "error event": 0, "garbage": 0}.get(behaviour, 200)
    assert server.asked == [("pull", "r-1")]
    if how is How.RIGHT:
        assert text == expected_answer(chat_ids(MESSAGES), NUM_TOKENS)
        assert record.num_tokens == NUM_TOKENS


@pytest.mark.parametrize("behaviour", ["silent", "stuck"])
def test_a_hang_is_silence_before_the_answer_and_in_the_middle_of_it(
    server: Server, behaviour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(churn_talk, "_PATIENCE_S", 0.3)
    server.behaviour = behaviour
    asker = Asker(server.url, now_s())
    record, _ = asker.ask(MESSAGES, NUM_TOKENS, Manner("r-1", "pull", is_streamed=True), client=Client.TALK)
    asker.close()
    assert record.how is How.SILENT, record


def test_a_client_that_leaves_is_told_apart_from_a_stream_that_is_cut(server: Server, asker: Asker) -> None:
    record, text = asker.ask(MESSAGES, NUM_TOKENS, Manner("r-1", "push", True, leaves_after=3), client=Client.TALK)
    assert (record.how, record.num_tokens) == (How.LEFT, 3)
    assert expected_answer(chat_ids(MESSAGES), NUM_TOKENS).startswith(text)


def test_a_client_that_leaves_a_wrong_answer_was_answered_wrong(server: Server, asker: Asker) -> None:
    server.behaviour = "wrong"
    record, _ = asker.ask(MESSAGES, NUM_TOKENS, Manner("r-1", "push", True, leaves_after=2), client=Client.TALK)
    assert record.how is How.WRONG


def test_a_talker_holds_conversations_until_it_is_told_to_stop(server: Server, asker: Asker, tmp_path: Path) -> None:
    plan = ChurnPlan(output_tokens=NUM_TOKENS, turn_tokens=4, turns=3)
    journal = Journal(tmp_path / "records.jsonl")
    talker = Talker(plan, 2, asker, journal, lambda: len(server.asked) >= 30, lambda _: None)
    talker.run()
    asks = [record for record in read_churn_records(journal.path) if isinstance(record, AskRecord)]
    assert len(asks) == len(server.asked) == 30
    assert {ask.how for ask in asks} == {How.RIGHT, How.LEFT}
    assert {ask.mode for ask in asks} == set(MODES)
    assert {ask.is_streamed for ask in asks} == {True, False}
    assert max(ask.turn for ask in asks) == 3
    assert [ask.request_id for ask in asks] == [f"talk2-{number}" for number in range(1, 31)]
