"""The router as a process of its own, with the real side channel."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

from kvshuttle.clock import now_s
from kvshuttle.handoff.wire import MessageCodec
from kvshuttle.transport.side_channel import Endpoint, SideChannelThread
from support.fake_engine import FakeEngine, hang, sse, stream
from support.router_cluster import PATIENCE_S, Cluster

BODY = {"model": "m", "prompt": "hello"}
SECRET = "0123456789abcdef0123456789abcdef"
_MAX_LOG_BYTES = 1 << 20


def side_channel_of(engine: FakeEngine, secret: bytes | None) -> SideChannelThread:
    endpoint = Endpoint(
        codec=MessageCodec(), secret=secret, sender=engine.name, handler=engine.answer_side, now_s=now_s
    )
    engine.side_address = endpoint.bind("127.0.0.1", 0)
    thread = SideChannelThread(endpoint, name=engine.name)
    thread.start()
    return thread


class Process(Cluster):
    """Fake engines here, the router in a process."""

    def __init__(self, secret: str | None = None, drain_s: float = 30.0) -> None:
        prefill, decode = FakeEngine("prefill-0"), FakeEngine("decode-0")
        key = secret.encode() if secret else None
        self.threads = [side_channel_of(engine, key) for engine in (prefill, decode)]
        self.secret = secret
        self.drain_s = drain_s
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in _stop
        super().__init__([prefill], [decode])

    def start_unpaired(self) -> None:
        self._thread.start()
        for engine in [*self.prefills, *self.decodes]:
            self.run(engine.start())
        environment = {name: value for name, value in os.environ.items() if name != "KVSHUTTLE_SECRET"}
        if self.secret:
            environment["KVSHUTTLE_SECRET"] = self.secret
        command = [sys.executable, "-m", "kvshuttle", "router", "--port", "0", "--probe-interval-s", "0.1"]
        command += ["--prefill", self.prefills[0].url, "--decode", self.decodes[0].url, "--drain-s", str(self.drain_s)]
        self.process = subprocess.Popen(command, stderr=self.log, env=environment)
        self.wait_for(self._is_listening, timeout_s=60)

    def _is_listening(self) -> bool:
        assert self.process.poll() is None, "the router did not start"
        # The process writes where this file stands: to seek would have it write over its own words.
        log = os.pread(self.log.fileno(), _MAX_LOG_BYTES, 0)
        match = re.search(rb"listening on 127\.0\.0\.1 port (\d+)", log)
        self.port = int(match.group(1)) if match else 0
        return bool(match)

    async def _stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.log.close()
        for engine in [*self.prefills, *self.decodes]:
            await engine.kill()

    def stop(self) -> None:
        super().stop()
        for thread in self.threads:
            assert thread.stop(PATIENCE_S)


@contextlib.contextmanager
def running(*args, **kwargs):
    process = Process(*args, **kwargs)
    try:
        process.start()
        yield process
    finally:
        process.stop()


def test_engines_are_learned_over_the_real_side_channel_and_handles_released():
    with running() as one:
        assert one.post("/v1/completions", BODY).status == 200
        assert one.decodes[0].calls[0].leg["source"]["incarnation"] == "life-1"
        one.decodes[0].script.append(hang)
        client = one.send_post("/v1/completions", BODY)
        one.wait_for(lambda: len(one.decodes[0].calls) == len(one.prefills[0].calls) == 2)
        client.close()
        one.wait_for(lambda: one.prefills[0].calls[1].leg["transfer_id"] in one.prefills[0].released)


def test_a_router_with_the_engines_secret_forms_pairs():
    with running(SECRET) as one:
        assert one.post("/v1/completions", BODY).status == 200


def test_a_terminated_router_lets_its_streams_end_and_exits_with_0():
    with running() as one:
        one.decodes[0].script.append(stream([sse("a"), sse("b"), b"data: [DONE]\n\n"], gap_s=0.2))
        connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=PATIENCE_S)
        connection.request("POST", "/v1/completions", json.dumps({**BODY, "stream": True}))
        response = connection.getresponse()
        one.process.send_signal(signal.SIGTERM)
        assert response.read().endswith(b"[DONE]\n\n")
        connection.close()
        assert one.process.wait(PATIENCE_S) == 0


def test_an_idle_router_exits_at_once():
    with running() as one:
        started_at_s = time.monotonic()
        one.process.send_signal(signal.SIGINT)
        assert one.process.wait(PATIENCE_S) == 0
        assert time.monotonic() - started_at_s < one.drain_s / 2


def test_a_stream_that_does_not_end_is_cut_off_and_the_exit_code_says_so():
    with running(drain_s=1.0) as one:
        one.decodes[0].script.append(stream([sse("a")], then="hang"))
        client = one.send_post("/v1/completions", {**BODY, "stream": True})
        assert client.recv(12) == b"HTTP/1.1 200"
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(PATIENCE_S) == 1
        client.close()


def test_a_port_in_use_is_named_and_the_exit_code_is_2():
    with running() as one:
        engines = ["--prefill", one.prefills[0].url, "--decode", one.decodes[0].url]
        command = [sys.executable, "-m", "kvshuttle", "router", "--port", str(one.port), *engines]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 2
        assert f"port {one.port}" in done.stderr
