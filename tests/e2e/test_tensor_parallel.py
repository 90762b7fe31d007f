"""The core of the equal-answers matrix with tensor-parallel size 2 on both sides; a tiny model with dummy weights."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from e2e.test_equal_answers import LENGTHS, assert_equal, request_for
from kvshuttle.config import LauncherConfig
from kvshuttle.launcher.model import SMOLLM2, cache_dir_from, ensure_model
from support.live import BLOCK_SIZE_TOKENS, CHUNK_TOKENS, Live, difference, live_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_RANKS = 2
TINY_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
KV_BYTES_PER_TOKEN = 4 * 2 * 4 * 64 * 4
"""Layers, K and V, KV heads over both ranks, head size, bytes."""


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory, log_dir: Path) -> Iterator[Live]:
    """1P1D with two ranks each, the router, and a plain engine with two ranks."""
    source = ensure_model(SMOLLM2, cache_dir_from(os.environ), env=os.environ, report=print)
    model = tmp_path_factory.mktemp("tiny-qwen3")
    (model / "config.json").write_text(json.dumps(TINY_QWEN3))
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copy(source / name, model / name)
    args = (
        "--load-format",
        "dummy",
        "--tensor-parallel-size",
        str(NUM_RANKS),
        "--max-num-batched-tokens",
        str(CHUNK_TOKENS),
    )
    config = LauncherConfig(
        port=0,
        dtype="float32",
        kv_cache_gib=1,
        max_model_len=2048,
        served_model_name="smollm2",
        engine_args=args,
        # Six ranks that spin while they wait share two cores here: this is about what is read, not about how soon.
        connector_options={"acquire_timeout_s": 20.0, "read_timeout_s": 25.0},
    )
    with live_cluster(config, model, log_dir / "tensor-parallel", plain_args=args) as cluster:
        yield cluster


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
    parallel: Live, endpoint: str, length: str, is_streamed: bool
) -> None:
    path, body = request_for(parallel, endpoint, LENGTHS[length], is_streamed=is_streamed)
    before = parallel.metrics("decode-0").moved()
    answer = parallel.ask(path, body)
    assert_equal(answer, parallel.ask_plain(path, body))
    moved = difference(parallel.metrics("decode-0").moved(), before)
    assert moved["read_ok"] == moved["transfers"] == 1
    assert moved["tokens"] == LENGTHS[length]
    assert moved["bytes"] >= LENGTHS[length] * KV_BYTES_PER_TOKEN
    assert parallel.wait_settled(timeout_s=15) == {}


def test_a_repeated_prompt_reads_its_last_block_on_every_rank(parallel: Live) -> None:
    path, body = request_for(parallel, "completions", 2 * BLOCK_SIZE_TOKENS + 50, is_streamed=False)
    reference = parallel.ask_plain(path, body)
    assert_equal(parallel.ask(path, body), reference)
    before = parallel.metrics("decode-0").moved()
    assert_equal(parallel.ask(path, body), reference)
    moved = difference(parallel.metrics("decode-0").moved(), before)
    assert moved["tokens"] == 50
    assert moved["bytes"] == BLOCK_SIZE_TOKENS * KV_BYTES_PER_TOKEN
    assert parallel.wait_settled(timeout_s=15) == {}
