"""Requests that benchmarks send by themselves: what is read of the answer, and what is told of a bad one."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING

import pytest

from kvshuttle.bench.legs import complete, stream
from kvshuttle.errors import TransportError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Engine(BaseHTTPRequestHandler):
    """Answers by the path's first request: a whole answer, a stream in pieces, or an error."""

    bodies: list[bytes]
    status = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.bodies.append(body)
        self.send_response(self.status)
        self.end_headers()
        if self.status != 200:
            self.wfile.write(b"no such model")
        elif b'"stream": true' in body:
            for piece in (b"data: {}\n\n", b"data: {}\n\n", b"data: [DONE]\n\n"):
                self.wfile.write(piece)
        else:
            self.wfile.write(b'{"id": "one"}')

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the library has it
        pass


@pytest.fixture
def engine() -> Iterator[type[Engine]]:
    handler = type("OneEngine", (Engine,), {"bodies": []})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    handler.url = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_answer_is_read_whole_and_a_stream_to_its_end(engine) -> None:
    assert complete(engine.url, [5, 6], max_tokens=3, model="m") == {"id": "one"}
    stream(engine.url, [5, 6], max_tokens=3, model="m", ignore_eos=True)
    whole, streamed = engine.bodies
    assert b'"stream"' not in whole
    assert b'"prompt": [5, 6], "max_tokens": 3, "min_tokens": 3' in streamed
    assert b'"ignore_eos": true' in streamed


@pytest.mark.parametrize("ask", [complete, stream])
def test_an_error_is_told_with_its_engine(engine, ask) -> None:
    engine.status = 404
    with pytest.raises(TransportError, match=rf"{engine.url}: HTTP 404: no such model"):
        ask(engine.url, [5], max_tokens=1)
