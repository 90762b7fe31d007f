"""The core of the equal-answers matrix with tensor-parallel size 2 on both sides; a tiny model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from e2e.test_equal_answers import LENGTHS, assert_equal, assert_handed_off, request_for
from kvshuttle.config import LauncherConfig
from support.live import BLOCK_SIZE_TOKENS, CHUNK_TOKENS, HAND_OFFS, Live, difference, live_cluster
from support.tiny_model import KV_BYTES_PER_TOKEN, make_talking_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_RANKS = 2
MAX_MODEL_LEN = 2048


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory, log_dir: Path) -> Iterator[Live]:
    """1P1D with two ranks each, the router, and a plain engine with two ranks."""
    model = make_talking_model(tmp_path_factory.mktemp("talking-qwen3"), max_model_len=MAX_MODEL_LEN)
    args = ("--tensor-parallel-size", str(NUM_RANKS), "--max-num-batched-tokens", str(CHUNK_TOKENS))
    config = LauncherConfig(
        port=0,
        dtype="float32",
        kv_cache_gib=1,
        max_model_len=MAX_MODEL_LEN,
        served_model_name="smollm2",
        # These tests are about single hand-offs, and want nothing held when one is over.
        router_args=("--no-reuse-history",),
        engine_args=args,
        # Six ranks that spin while they wait share two cores here: this is about what is read, not about how soon.
        connector_options={"acquire_timeout_s": 20.0, "read_timeout_s": 25.0},
    )
    with live_cluster(config, model, log_dir / "tensor-parallel", plain_args=args) as cluster:
        yield cluster


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize(
    ("endpoint", "length", "is_streamed"),
    [
        ("completions", "below one block", False),
        ("completions", "3 blocks - 1", False),
        ("completions", "3 blocks", True),
        ("chat", "3 blocks + 1", True),
        ("completions", "beyond one chunk", False),
    ],
)
def test_two_ranks_on_both_sides_answer_as_a_plain_engine(
    parallel: Live, endpoint: str, length: str, is_streamed: bool, mode: str
) -> None:
    path, body = request_for(parallel, endpoint, LENGTHS[length], is_streamed=is_streamed)
    assert_handed_off(parallel, mode, path, body, num_tokens=LENGTHS[length], bytes_per_token=KV_BYTES_PER_TOKEN)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_repeated_prompt_moves_its_last_block_on_every_rank(parallel: Live, mode: str) -> None:
    path, body = request_for(parallel, "completions", 2 * BLOCK_SIZE_TOKENS + 50, is_streamed=False)
    reference = parallel.ask_plain(path, body)
    assert_equal(parallel.ask(path, body, mode=mode), reference)
    before = parallel.moved()
    assert_equal(parallel.ask(path, body, mode=mode), reference)
    moved = difference(parallel.moved(), before)
    assert moved[HAND_OFFS[mode]] == 1
    assert moved["tokens"] == 50
    assert moved["bytes"] == BLOCK_SIZE_TOKENS * KV_BYTES_PER_TOKEN
    assert parallel.wait_settled(timeout_s=15) == {}
