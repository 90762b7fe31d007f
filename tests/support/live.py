"""Real engines and a real router for e2e tests, and what to ask and count there."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvshuttle.launcher.fleet import Fleet
from kvshuttle.launcher.machine import free_ports, this_machine
from kvshuttle.launcher.plan import EngineSettings, FleetPlan, Role, plan_engines, plan_fleet, served_name
from support.scores import Step, steps_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvshuttle.config import LauncherConfig

MODEL_NAME = "smollm2"
BLOCK_SIZE_TOKENS = 128
CHUNK_TOKENS = 512
REQUEST_TIMEOUT_S = 120.0
MODE_HEADER = "x-kvshuttle-mode"
HAND_OFFS = {"pull": "read_ok", "push": "received", "auto": "received"}
"""By mode, the outcome of a hand-off to a decode engine that is not busy."""
PUSHED = "kvshuttle:pushed_bytes_total"

_SAMPLE = re.compile(r"^(?P<name>[^{ ]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Answer:
    """One response. ``body``: parsed JSON, or for streams the list of parsed events."""

    status: int
    body: Any
    raw: bytes

    @property
    def text(self) -> str:
        """All generated text of choice 0."""
        events = self.body if isinstance(self.body, list) else [self.body]
        parts = []
        for event in events:
            for choice in event.get("choices", []):
                if choice["index"] == 0:
                    part = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
                    parts.append(part.get("content") or "")
        return "".join(parts)

    @property
    def finish_reason(self) -> str | None:
        """Why choice 0 ended."""
        events = self.body if isinstance(self.body, list) else [self.body]
        reasons = [c["finish_reason"] for e in events for c in e.get("choices", []) if c.get("finish_reason")]
        return reasons[-1] if reasons else None

    @property
    def usage(self) -> dict[str, int] | None:
        """Token counts, when the response carries them."""
        events = self.body if isinstance(self.body, list) else [self.body]
        usages = [event["usage"] for event in events if event.get("usage")]
        if not usages:
            return None
        return {key: usages[-1][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}

    @property
    def num_cached_tokens(self) -> int | None:
        """How much of the prompt nobody computed, when the response says so."""
        events = self.body if isinstance(self.body, list) else [self.body]
        usages = [event["usage"] for event in events if event.get("usage")]
        details = (usages[-1].get("prompt_tokens_details") if usages else None) or {}
        return details.get("cached_tokens")

    @property
    def steps(self) -> list[Step]:
        """The tokens of choice 0, when the request asked for log probabilities."""
        return list(steps_of(self.body if isinstance(self.body, list) else [self.body]))

    @property
    def gist(self) -> tuple[str, str | None, dict[str, int] | None]:
        """What must be equal between a disaggregated and a plain engine."""
        return self.text, self.finish_reason, self.usage


def connect(url: str, *, timeout_s: float = REQUEST_TIMEOUT_S) -> http.client.HTTPConnection:
    """A connection to a server's base URL."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)


def post(url: str, path: str, body: Any, *, headers: dict[str, str] | None = None) -> Answer:
    """POST JSON (or raw bytes) and read the whole answer, parsed by its content type."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with contextlib.closing(connect(url)) as connection:
        connection.request("POST", path, data, {"content-type": "application/json", **(headers or {})})
        response = connection.getresponse()
        raw = response.read()
        return Answer(response.status, _parsed(raw, response.getheader("content-type") or ""), raw)


def get(url: str, path: str) -> tuple[int, bytes]:
    """GET; status and body."""
    with contextlib.closing(connect(url, timeout_s=10)) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()


def _parsed(raw: bytes, content_type: str) -> Any:
    if content_type.startswith("text/event-stream"):
        lines = [line[6:] for line in raw.decode().splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]
    try:
        return json.loads(raw)
    except ValueError:
        return raw


@dataclass
class Live:
    """A running 1P1D cluster and, apart from it, a plain engine for reference."""

    fleet: Fleet
    reference: Fleet
    rng: random.Random
    plain_name: str = "plain"
    endpoint: str | None = None
    """Another router than the fleet's."""
    prefill_names: tuple[str, ...] = ("prefill-0",)
    decode_names: tuple[str, ...] = ("decode-0",)
    _token_cache: dict[str, list[int]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The router."""
        url = self.endpoint or self.fleet.endpoint
        assert url is not None
        return url

    @property
    def plain_url(self) -> str:
        """The reference engine."""
        return self.reference.plan_of(self.plain_name).url

    def engine_url(self, name: str) -> str:
        """An engine of the cluster, for its metrics."""
        return self.fleet.plan_of(name).url

    def ask(self, path: str, body: Any, *, mode: str | None = None) -> Answer:
        """Through the router, which chooses the mode unless it is given."""
        return post(self.url, path, body, headers={MODE_HEADER: mode} if mode else None)

    def ask_plain(self, path: str, body: Any) -> Answer:
        """The reference engine."""
        return post(self.plain_url, path, body)

    def token_ids(self, num_tokens: int) -> list[int]:
        """A prompt of exactly so many tokens of natural text that no earlier prompt shares a block with."""
        salt = f"Entry {self.rng.randrange(10**9)}. "
        text = salt + PROSE * (1 + num_tokens // 150)
        tokens: list[int] = post(self.plain_url, "/tokenize", {"model": MODEL_NAME, "prompt": text}).body["tokens"]
        assert len(tokens) >= num_tokens
        return tokens[:num_tokens]

    def messages(self, num_tokens: int) -> list[dict[str, str]]:
        """A chat whose rendered prompt has exactly so many tokens, by growing it word by word."""
        words = f"Entry {self.rng.randrange(10**9)}. {PROSE * (1 + num_tokens // 150)}".split()
        low, high = 1, len(words)
        while low < high:
            middle = (low + high + 1) // 2
            if self._rendered_length(" ".join(words[:middle])) <= num_tokens:
                low = middle
            else:
                high = middle - 1
        content = " ".join(words[:low])
        while self._rendered_length(content) < num_tokens:
            content += " a"
        assert self._rendered_length(content) == num_tokens
        return [{"role": "user", "content": content}]

    def _rendered_length(self, content: str) -> int:
        body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": content}]}
        count: int = post(self.plain_url, "/tokenize", body).body["count"]
        return count

    def metrics(self, name: str) -> Metrics:
        """An engine's metrics now."""
        status, text = get(self.engine_url(name), "/metrics")
        assert status == 200
        return Metrics.parse(text.decode())

    @property
    def engine_names(self) -> tuple[str, ...]:
        """All engines that the router knows."""
        return self.prefill_names + self.decode_names

    def moved(self) -> dict[str, float]:
        """What hand-offs have changed so far on the decode side, over all its engines."""
        scrapes = [self.metrics(name).moved() for name in self.decode_names]
        return {key: sum(scrape[key] for scrape in scrapes) for key in scrapes[0]}

    def pushed(self) -> dict[str, float]:
        """Bytes that prefill engines wrote so far, by whether the prompt's last forward pass was still to end."""
        scrapes = [self.metrics(name) for name in self.prefill_names]
        return {when: sum(each.sum(PUSHED, when=when) for each in scrapes) for when in ("streamed", "final")}

    def nudge(self) -> None:
        """A tiny request to each engine: blocks let go while it idled return at its next step, and metrics follow."""
        for name in self.engine_names:
            body = {"model": MODEL_NAME, "prompt": "Hi", "max_tokens": 2, "temperature": 0}
            assert post(self.engine_url(name), "/v1/completions", body).status == 200

    def wait_settled(self, *, timeout_s: float) -> dict[str, dict[str, float]]:
        """Wait until no engine runs, holds, leases or quarantines anything; what is still there when time is up."""
        deadline_at_s = time.monotonic() + timeout_s
        while True:
            self.nudge()
            residue = {name: self.metrics(name).residue() for name in self.engine_names}
            if not any(any(values.values()) for values in residue.values()):
                return {}
            if time.monotonic() > deadline_at_s:
                return residue
            time.sleep(0.5)


class Metrics:
    """A scrape: sums of samples by name and labels."""

    def __init__(self, samples: list[tuple[str, dict[str, str], float]]) -> None:
        self._samples = samples

    @classmethod
    def parse(cls, text: str) -> Metrics:
        """Read Prometheus' text format."""
        samples = []
        for line in text.splitlines():
            match = None if line.startswith("#") else _SAMPLE.match(line)
            if match:
                labels = dict(_LABEL.findall(match["labels"] or ""))
                samples.append((match["name"], labels, float(match["value"])))
        return cls(samples)

    def sum(self, name: str, **labels: str) -> float:
        """All samples of ``name`` that carry these labels, added; 0 when there is none."""
        return sum(
            value
            for each, its, value in self._samples
            if each == name and all(its.get(key) == wanted for key, wanted in labels.items())
        )

    def residue(self) -> dict[str, float]:
        """What must be 0 when nothing is going on."""
        return {
            "running": self.sum("vllm:num_requests_running"),
            "waiting": self.sum("vllm:num_requests_waiting"),
            "usage": self.sum("vllm:kv_cache_usage_perc"),
            "held_blocks": self.sum("kvshuttle:held_blocks"),
            "leases_held": self.sum("kvshuttle:leases_held"),
            "quarantined_blocks": self.sum("kvshuttle:quarantined_blocks"),
            "internal_errors": self.sum("kvshuttle:internal_errors_total"),
        }

    def num_requests(self) -> float:
        """Requests that the engine has ended well."""
        return self.sum("vllm:request_success_total")

    def prompts(self) -> dict[str, float]:
        """Where the tokens of prompts came from; ``fetched``: those that earlier turns had left at another engine."""
        by_source = "vllm:prompt_tokens_by_source_total"
        return {
            "computed": self.sum(by_source, source="local_compute"),
            "local": self.sum(by_source, source="local_cache_hit"),
            "loaded": self.sum(by_source, source="external_kv_transfer"),
            "fetched": self.sum("kvshuttle:transfer_tokens_total", direction="history"),
        }

    def moved(self) -> dict[str, float]:
        """What a hand-off changes on the decode side."""
        return {
            "read_ok": self.sum("kvshuttle:transfers_total", outcome="read_ok"),
            "received": self.sum("kvshuttle:transfers_total", outcome="received"),
            "full_local_hit": self.sum("kvshuttle:transfers_total", outcome="full_local_hit"),
            "transfers": self.sum("kvshuttle:transfers_total"),
            "tokens": self.sum("kvshuttle:transfer_tokens_total"),
            "bytes": self.sum("kvshuttle:transfer_bytes_total"),
        }


def difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """Per key, how much was added."""
    return {key: after[key] - before[key] for key in after}


@contextlib.contextmanager
def live_cluster(config: LauncherConfig, model: Path, log_dir: Path, *, plain_args: tuple[str, ...]) -> Iterator[Live]:
    """Start a cluster and a plain engine of the same model; stop both, by process, at the end."""
    rng = fresh_rng()
    ports = free_ports(rng)
    plan = plan_fleet(config, model, this_machine(), ports, sys.executable)
    plain = plan_plain(config, model, ports, plain_args)
    with live_engines(plan, plain, log_dir, rng) as live:
        yield live


@contextlib.contextmanager
def live_engines(plan: FleetPlan, plain: FleetPlan, log_dir: Path, rng: random.Random) -> Iterator[Live]:
    """Start ``plan``, with or without a router, and the reference; stop both, by process, at the end."""
    with (
        Fleet(plan, env=os.environ, log_dir=log_dir, report=_say) as fleet,
        Fleet(plain, env=os.environ, log_dir=log_dir, report=_say) as reference,
    ):
        reference.spawn("plain")
        fleet.start(timeout_s=400)
        reference.wait_healthy(["plain"], timeout_s=400)
        yield Live(fleet, reference, rng)


def plan_plain(config: LauncherConfig, model: Path, ports: Iterator[int], args: tuple[str, ...]) -> FleetPlan:
    """An engine without a connector."""
    settings = [EngineSettings("plain", Role.PLAIN, args)]
    return FleetPlan(served_name(config), plan_engines(settings, config, model, this_machine(), ports, sys.executable))


def fresh_rng() -> random.Random:
    """Another one for each run: prompts must not repeat, and runs beside each other must not want the same ports."""
    return random.Random(f"{os.getpid()}-{time.time_ns()}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


PROSE = (
    "The ferry left the old harbour a little after six, while the lamps along the quay were still burning. "
    "On deck a woman in a grey coat counted the crates of oranges that the sailors had stacked beside the mast, "
    "and wrote the numbers into a small book with a blue cover. Behind her the town rose in terraces, white and "
    "ochre, up to the fort on the hill, where a flag that nobody had taken down for the night hung without moving. "
    "A boy asked the captain how long the crossing would take. Four hours with this wind, the captain said, five if "
    "it turned, and he looked at the clouds over the cape as if they owed him an answer. By eight the coast had become "
    "a line, and the passengers had gone below to drink coffee and to argue about the price of wool. Only the woman "
    "stayed, turning the pages back and forth, because the sum of the third column was wrong and she could not find "
    "the reason. The light grew, gulls followed the ship in a loose cloud, and far to the south another sail appeared, "
    "very small, and kept its distance all morning. "
)
