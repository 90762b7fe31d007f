"""Emulated accelerators in real engines: what the stamps are for is caught there too.

vLLM's own pull connector compares no tokens, so it can be made to hand over the KV of another prompt.
"""

from __future__ import annotations

import os
import random
import sys
from typing import TYPE_CHECKING

import pytest

from kvshuttle.bench.legs import complete
from kvshuttle.bench.plan import HandoffPlan, SystemName
from kvshuttle.bench.systems import SYSTEMS, Places, plan_pair
from kvshuttle.emulate.model_dir import FIRST_WORD, VOCAB_SIZE, write_model_dir
from kvshuttle.emulate.profile import effective_profile
from kvshuttle.emulate.trace import read_trace
from kvshuttle.launcher.fleet import Fleet
from kvshuttle.launcher.machine import free_ports
from support.live import get

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_TOKENS = 6
PREFILL_LEG = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    path = tmp_path_factory.mktemp("emulated")
    return Places(path / "model", path / "traces")


@pytest.fixture(scope="module")
def pair(places: Places, log_dir: Path) -> Iterator[Fleet]:
    """P and D with emulated accelerators and vLLM's pull connector."""
    plan = HandoffPlan(prompt_tokens=("1024",), kv_cache_gib=1, time_scale=1.0)
    write_model_dir(places.model_dir, effective_profile(plan), max_model_len=plan.max_model_len)
    system = SYSTEMS[SystemName.UPSTREAM_PULL_QUIET]
    planned = plan_pair(system, plan, places, free_ports(random.Random()), sys.executable)
    with Fleet(planned, env=os.environ, log_dir=log_dir / "emulated", report=print) as fleet:
        fleet.start(timeout_s=300)
        yield fleet


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(FIRST_WORD, VOCAB_SIZE) for _ in range(900)]


def text_of(answer: dict) -> str:
    return answer["choices"][0]["text"]


def hand_off(pair: Fleet, computed: list[int], asked: list[int]) -> str:
    """P computes one prompt, D is asked another with the handle of the first. D's text."""
    prefilled = complete(pair.plan_of("prefill-0").url, computed, max_tokens=1, kv_transfer_params=PREFILL_LEG)
    params = prefilled["kv_transfer_params"]
    decode_url = pair.plan_of("decode-0").url
    return text_of(complete(decode_url, asked, max_tokens=NUM_TOKENS, kv_transfer_params=params))


def num_corrupted(pair: Fleet) -> float:
    """What vLLM counts on D."""
    _, raw = get(pair.plan_of("decode-0").url, "/metrics")
    lines = [line for line in raw.decode().splitlines() if line.startswith("vllm:corrupted_requests_total")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_a_hand_off_between_emulated_engines_gives_the_answer_of_one_alone(pair: Fleet, places: Places) -> None:
    alone = text_of(complete(pair.plan_of("prefill-0").url, prompt(1), max_tokens=NUM_TOKENS))
    assert hand_off(pair, prompt(2), prompt(2)) != alone
    assert hand_off(pair, prompt(1), prompt(1)) == alone
    assert len(alone.split()) == NUM_TOKENS
    assert num_corrupted(pair) == 0
    (trace,) = places.trace_dir_of("decode-0").glob("*.jsonl")
    passes, _ = read_trace(trace)
    assert max(request.end - request.start for forward in passes for request in forward.requests) < 128


def test_kv_of_another_prompt_is_caught_on_real_engines_and_counted(pair: Fleet) -> None:
    counted_before = num_corrupted(pair)
    assert hand_off(pair, prompt(3), prompt(4)) == "<wrong-kv>" * NUM_TOKENS
    assert num_corrupted(pair) == counted_before + 1
    log = pair.log_path("decode-0").read_text()
    assert "has wrong KV: Mismatch(layer=0, block_index=0" in log
