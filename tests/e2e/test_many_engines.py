"""Several prefill engines with one decode engine, and one with several; a tiny model."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from e2e.test_disconnects import NUM_DISCONNECTS, leave_after
from e2e.test_engine_death import SUSPENDED_ANSWER_WITHIN_S, source_of, suspended
from e2e.test_equal_answers import LENGTHS, assert_eight_at_once, assert_equal, assert_handed_off, request_for
from kvshuttle.config import LauncherConfig
from kvshuttle.handoff.params import DecodeLeg, Mode, PrefillLeg, to_params
from kvshuttle.launcher.fleet import Fleet
from kvshuttle.launcher.machine import free_ports
from kvshuttle.launcher.plan import FleetPlan, plan_router
from support.live import BLOCK_SIZE_TOKENS, Live, difference, live_cluster, post
from support.tiny_model import KV_BYTES_PER_TOKEN, make_talking_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from support.live import Answer

CHUNK_TOKENS = 128
MAX_MODEL_LEN = 2048
NUM_DECODE_BLOCKS = 64
"""So few that a handful of requests has used each of them."""
MAX_ATTEMPTS = 20
PATH = "/v1/completions"
MODES = ("push", "auto")
TOPOLOGIES = {
    "2P1D": (("prefill-0", "prefill-1"), ("decode-0",)),
    "1P2D": (("prefill-0",), ("decode-0", "decode-1")),
}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, log_dir: Path) -> Iterator[Crowd]:
    """Two prefill and two decode engines, and a plain one. Each topology gets a router that knows some of them."""
    model = make_talking_model(tmp_path_factory.mktemp("talking-qwen3"), max_model_len=MAX_MODEL_LEN)
    args = ("--max-num-batched-tokens", str(CHUNK_TOKENS), "--max-num-seqs", "16")
    config = LauncherConfig(
        port=0,
        dtype="float32",
        kv_cache_gib=1,
        max_model_len=MAX_MODEL_LEN,
        served_model_name="smollm2",
        num_prefill=2,
        num_decode=2,
        engine_args=args,
        decode_args=("--num-gpu-blocks-override", str(NUM_DECODE_BLOCKS)),
        # These tests are about single hand-offs, and want nothing held when one is over.
        router_args=("--no-reuse-history",),
        connector_options={"lease_s": 6.0, "push_timeout_s": 3.0},
    )
    with live_cluster(config, model, log_dir / "many-engines", plain_args=args) as cluster:
        ports = free_ports(cluster.rng)
        plans = {
            name: plan_router(
                tuple(cluster.fleet.plan_of(engine) for engine in (*prefills, *decodes)),
                config,
                next(ports),
                sys.executable,
            )
            for name, (prefills, decodes) in TOPOLOGIES.items()
        }
        # A fleet has one router; these share the engines.
        routers = {
            name: Fleet(
                FleetPlan(cluster.fleet.plan.model_name, (), plan),
                env=os.environ,
                log_dir=log_dir / "many-engines" / name,
                report=print,
            )
            for name, plan in plans.items()
        }
        with routers["2P1D"] as first, routers["1P2D"] as second:
            for fleet in (first, second):
                fleet.start(timeout_s=60)
            yield Crowd(cluster, {"2P1D": first, "1P2D": second})


@dataclass
class Crowd:
    """The engines, and a router for each topology."""

    live: Live
    routers: dict[str, Fleet]

    def behind(self, topology: str) -> Live:
        """The cluster as one of the routers sees it."""
        prefills, decodes = TOPOLOGIES[topology]
        endpoint = self.routers[topology].endpoint
        return replace(self.live, endpoint=endpoint, prefill_names=prefills, decode_names=decodes)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_an_answer_equals_the_plain_engines_and_its_kv_moved(
    four: Crowd, topology: str, mode: str, endpoint: str, length: str, is_streamed: bool
) -> None:
    live = four.behind(topology)
    path, body = request_for(live, endpoint, LENGTHS[length], is_streamed=is_streamed)
    assert_handed_off(live, mode, path, body, num_tokens=LENGTHS[length], bytes_per_token=KV_BYTES_PER_TOKEN)


@pytest.mark.parametrize("mode", [*MODES, "mixed"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_eight_requests_at_once_all_equal_the_reference_and_every_engine_takes_part(
    four: Crowd, topology: str, mode: str
) -> None:
    live = four.behind(topology)
    before = {name: live.metrics(name).num_requests() for name in live.engine_names}
    assert_eight_at_once(live, mode)
    for name in live.engine_names:
        assert live.metrics(name).num_requests() > before[name], name


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_most_of_a_long_prompt_is_written_while_it_is_computed(four: Crowd, topology: str) -> None:
    live = four.behind(topology)
    live.nudge()
    before = live.pushed()
    for num_chunks in (6, 8, 12):
        path, body = request_for(live, "completions", num_chunks * CHUNK_TOKENS, is_streamed=True)
        assert_equal(live.ask(path, body, mode="push"), live.ask_plain(path, body))
    # A prefill engine that idles tells of its last write with its next step.
    live.nudge()
    pushed = difference(live.pushed(), before)
    assert pushed["streamed"] > (pushed["streamed"] + pushed["final"]) / 2
    assert pushed["streamed"] + pushed["final"] == (6 + 8 + 12) * CHUNK_TOKENS * KV_BYTES_PER_TOKEN


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_twenty_disconnects_leave_nothing_held(four: Crowd, topology: str) -> None:
    live = four.behind(topology)
    for _ in range(NUM_DISCONNECTS):
        leave_after(live, live.rng.uniform(0.0, 0.6), num_tokens=live.rng.choice((100, 300, 900)), mode="push")
    assert live.wait_settled(timeout_s=20.0) == {}


def test_readers_and_writers_with_several_peers_at_once(four: Crowd) -> None:
    """Both routers send at the same time: an engine writes to two others, and one is written to by two."""
    lives = [four.behind(topology) for topology in TOPOLOGIES]
    requests = [request_for(four.live, "completions", 200 + 90 * index, is_streamed=True) for index in range(8)]
    references = [four.live.ask_plain(path, body) for path, body in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        asked = [
            pool.submit(lives[index % 2].ask, path, body, mode="push") for index, (path, body) in enumerate(requests)
        ]
        for each, reference in zip(asked, references, strict=True):
            assert_equal(each.result(), reference)
    for live in lives:
        assert live.wait_settled(timeout_s=10) == {}


@pytest.mark.parametrize("round_number", range(3))
def test_a_prefill_engine_that_wakes_up_too_late_writes_into_nobodys_blocks(four: Crowd, round_number: int) -> None:
    """It was suspended in the middle of a push for longer than every deadline, and goes on with it afterwards."""
    live = replace(four.behind("2P1D"), prefill_names=("prefill-0",))
    for _ in range(MAX_ATTEMPTS):
        before = live.moved()
        body = {**request_for(live, "completions", 2000, is_streamed=False)[1], "max_tokens": 4 + round_number}
        reference = live.ask_plain(PATH, body)
        streamed = live.pushed()["streamed"]
        with ThreadPoolExecutor(2) as pool:
            prefilling, decoding = push_by_hand(live, body, pool)
            wait_until_streaming(live, streamed, decoding)
            with suspended(live, "prefill-0"):
                assert_equal(decoding.result(timeout=SUSPENDED_ANSWER_WITHIN_S), reference)
                is_caught = difference(live.moved(), before)["received"] == 0
                if is_caught:
                    assert live.metrics("decode-0").sum("kvshuttle:quarantined_blocks") > 0
                    assert_churn_is_right(live)
            assert_churn_is_right(live)
            assert prefilling.result().status == 200
        assert live.wait_settled(timeout_s=15) == {}
        if is_caught:
            return
    pytest.fail(f"{MAX_ATTEMPTS} prompts were written before their engine could be suspended")


def push_by_hand(live: Live, body: dict[str, Any], pool: ThreadPoolExecutor) -> tuple[Future[Answer], Future[Answer]]:
    """Both legs past the router, which would not leave it to the decode engine to notice."""
    transfer_id = f"by-hand-{live.rng.randrange(10**9)}"
    prefill = PrefillLeg(transfer_id, Mode.PUSH)
    decode = DecodeLeg(transfer_id, source_of(live, "prefill-0"), Mode.PUSH)
    return (
        pool.submit(
            post,
            live.engine_url("prefill-0"),
            PATH,
            {**body, "max_tokens": 1, "kv_transfer_params": to_params(prefill)},
        ),
        pool.submit(post, live.engine_url("decode-0"), PATH, {**body, "kv_transfer_params": to_params(decode)}),
    )


def wait_until_streaming(live: Live, before_bytes: float, decoding: Future[Answer]) -> None:
    """Until a first chunk is written, or all of it."""
    while live.pushed()["streamed"] == before_bytes and not decoding.done():
        pass


def assert_churn_is_right(live: Live) -> None:
    """Requests that use every block of the decode engine that it may use, asked past the router, answer rightly."""
    num_tokens = 1500
    for _ in range(2 * NUM_DECODE_BLOCKS * BLOCK_SIZE_TOKENS // num_tokens):
        body = request_for(live, "completions", num_tokens, is_streamed=False)[1]
        answer = post(live.engine_url("decode-0"), PATH, body)
        assert_equal(answer, live.ask_plain(PATH, body))
