"""What the router itself costs: CPU microseconds for each request and for each streamed chunk.

Runs the real router against a bare upstream that plays both engines, with wrk as the client; all on loopback. The
router has one core to itself, upstream and wrk share the other. Needs wrk (Debian: ``apt-get install wrk``).

    python benchmarks/router_cost.py [--seconds 4] [--log]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop

from kvshuttle.config import RouterConfig
from kvshuttle.handoff.messages import EngineCard, Fingerprint, Hello, HelloAck, Message, Released, Status, StatusReport
from kvshuttle.router.app import serve_until_signalled

PROMPT_BYTES = 2000
NUM_CHUNKS = 100
CHUNK_GAP_S = 0.004
CHUNK = b'data: {"id":"cmpl-1","object":"text_completion","model":"m","choices":[{"index":0,"text":" word"}]}\n\n'
ANSWER = b'{"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":"%b"}],"kv_transfer_params":null}' % (
    b"x" * 300
)
FINGERPRINT = Fingerprint("m", "bf16", 16, 2, 2, 64, 1, "layout", (1024,), "chain")


class Upstream(asyncio.Protocol):
    """Both engines: a prefill leg gets its params, a decode leg a whole answer, a burst or a paced stream."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        match = re.search(rb"content-length: (\d+)", self.buffer[:end])
        size = end + 4 + int(match.group(1) if match else 0)
        if len(self.buffer) < size:
            return
        request, self.buffer = self.buffer[:size], self.buffer[size:]
        self.answer(request, request[end + 4 :])

    def answer(self, request: bytes, body: bytes) -> None:
        if request.startswith(b"GET /v1/models"):
            self.send(b'{"data":[{"id":"m"}]}')
        elif request.startswith(b"GET"):
            self.send(b"{}")
        elif (at := body.find(b'"leg":"prefill"')) >= 0:
            start = body.find(b'"transfer_id":"', at) + 15
            transfer_id = body[start : body.find(b'"', start)]
            held = b'{"leg":"prefilled","transfer_id":"%b","num_tokens":500,"lease_s":30.0}' % transfer_id
            self.send(ANSWER[:-5] + b'{"kvshuttle":' + held + b"}}")
        elif b'"stream":true' not in body:
            self.send(ANSWER)
        else:
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            if b'"paced"' in body:
                self.pace(NUM_CHUNKS)
            else:
                self.transport.write((b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK)) * NUM_CHUNKS + b"0\r\n\r\n")

    def pace(self, num_left: int) -> None:
        if num_left:
            self.transport.write(b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK))
            asyncio.get_running_loop().call_later(CHUNK_GAP_S, self.pace, num_left - 1)
        else:
            self.transport.write(b"0\r\n\r\n")

    def send(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(head + body)


class Channel:
    """A side channel that always has a good answer at once."""

    async def request(self, address: str, message: Message, timeout_s: float) -> Message:
        if isinstance(message, Hello):
            return HelloAck(EngineCard(address, "life", "kv_both", 1, "0", FINGERPRINT, ()))
        if isinstance(message, Status):
            return StatusReport(address, "life", 0, 0, 100, 100, 0, 0, 0)
        return Released()


async def run_upstream() -> None:
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def run_router(upstream_port: int, *, is_logging: bool) -> None:
    url = f"http://127.0.0.1:{upstream_port}"
    knobs = {"port": 0, "is_logging_requests": is_logging}
    config = RouterConfig.from_mapping({"prefill": [f"{url},p:1"], "decode": [f"{url},d:1"], **knobs})
    await serve_until_signalled(config, Channel(), lambda port: print(port, flush=True))


@dataclass(frozen=True)
class Load:
    name: str
    body: dict[str, object]
    connections: int
    chunks: int = 0


def loads() -> list[Load]:
    prompt = "word " * (PROMPT_BYTES // 5)
    pair = {"model": "m", "prompt": prompt, "max_tokens": 100}
    local = {**pair, "prompt": [prompt, "x"]}
    return [
        Load("one leg, whole answer, c32", local, 32),
        Load("two legs, whole answer, c1", pair, 1),
        Load("two legs, whole answer, c32", pair, 32),
        Load("two legs, burst of 100 chunks, c32", {**pair, "stream": True}, 32),
        Load("two legs, paced 100 chunks, c100", {**pair, "stream": True, "user": "paced"}, 100, NUM_CHUNKS),
    ]


def cpu_s(pid: int) -> float:
    """CPU time of all threads, from the scheduler's own count in nanoseconds."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def measure(load: Load, port: int, pid: int, seconds: int, folder: Path) -> str:
    script = folder / "post.lua"
    body = json.dumps(load.body, separators=(",", ":"))
    script.write_text(f"wrk.method='POST'\nwrk.headers['content-type']='application/json'\nwrk.body=[==[{body}]==]\n")
    command = ["wrk", "-t1", f"-c{load.connections}", f"-d{seconds}s", "--latency", "-s", str(script)]
    before_s = cpu_s(pid)
    started_at_s = time.monotonic()
    done = subprocess.run(
        ["taskset", "-c", "1", *command, f"http://127.0.0.1:{port}/v1/completions"],
        check=True, capture_output=True, text=True, timeout=seconds + 20,
    )  # fmt: skip
    wall_s = time.monotonic() - started_at_s
    used_s = cpu_s(pid) - before_s
    requests = int(re.search(r"(\d+) requests in", done.stdout).group(1))
    p50 = re.search(r"50%\s+(\S+)", done.stdout).group(1)
    bad = re.search(r"Non-2xx or 3xx responses: (\d+)", done.stdout)
    per_request_us = used_s / max(requests, 1) * 1e6
    per_chunk = f"{per_request_us / load.chunks:9.1f}" if load.chunks else " " * 9
    failed = f"  {bad.group(1)} FAILED" if bad else ""
    return f"{load.name:38} {requests / wall_s:8.0f} {per_request_us:9.0f} {per_chunk}   p50 {p50}{failed}"


def start(arguments: list[str], core: int) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        ["taskset", "-c", str(core), *arguments], stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=4)
    parser.add_argument("--log", action="store_true", help="with a log line for each request")
    parser.add_argument("--role", choices=["upstream", "router"])
    parser.add_argument("--upstream-port", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.role == "upstream":
        uvloop.run(run_upstream())
    if arguments.role == "router":
        logging.basicConfig(level=logging.INFO)
        uvloop.run(run_router(arguments.upstream_port, is_logging=arguments.log))
        return 0
    if shutil.which("wrk") is None:
        print("wrk is not installed (Debian: apt-get install wrk)")
        return 2
    me = [sys.executable, str(Path(__file__))]
    upstream, upstream_port = start([*me, "--role", "upstream"], 1)
    extra = ["--log"] if arguments.log else []
    router, port = start([*me, "--role", "router", "--upstream-port", str(upstream_port), *extra], 0)
    try:
        time.sleep(1.5)
        print(f"{'':38} {'req/s':>8} {'CPU µs/rq':>9} {'µs/chunk':>9}")
        with tempfile.TemporaryDirectory() as folder:
            for load in loads():
                print(measure(load, port, router.pid, arguments.seconds, Path(folder)), flush=True)
    finally:
        router.send_signal(signal.SIGTERM)
        router.wait(40)
        upstream.kill()
        upstream.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
